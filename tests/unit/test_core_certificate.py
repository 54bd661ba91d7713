"""What a certificate must be to let a group serve; each way to fail is told apart."""

import dataclasses
import json
from typing import Any  # JSON

import pytest

from splitwave.certify.keys import SigningKey, TrustStore, sign_certificate
from splitwave.core.certificate import (
    Certificate,
    CertificateRefused,
    Refusal,
    RefusalKind,
    SignedCertificate,
    examine,
    proves,
    read_certificate,
    value_digests,
)
from splitwave.core.certificate import signed as sign
from splitwave.core.evidence import Check, Level
from splitwave.core.fingerprint import STEPS_TOGETHER, Fingerprint
from splitwave.core.strict_json import canonical, flatten
from tests.unit.certificates import (
    CONTROL,
    DAY_S,
    ENVELOPE,
    FULL,
    KEY,
    NOW_S,
    SHAPE,
    TRUST,
    VALUES,
    certificate,
    evidence,
    signed,
    wanted,
)


def judged(found: SignedCertificate, now_s: float = NOW_S, **changed: Any) -> Refusal | None:
    return examine(found, wanted(**changed), TRUST, now_s)


def forged(body: Certificate) -> SignedCertificate:
    """Sign whatever it is, as somebody with the key and another program could."""
    return SignedCertificate(body, KEY.sign(body.message), value_digests(body.to_json()))


def test_a_good_certificate_lets_its_group_serve() -> None:
    assert judged(signed()) is None


def test_a_certificate_survives_its_file() -> None:
    before = signed()

    after = read_certificate(before.to_bytes())

    assert after == before
    assert after.to_bytes() == before.to_bytes()
    assert judged(after) is None


def test_a_file_that_was_laid_out_anew_is_the_same_certificate() -> None:
    pretty = json.dumps(json.loads(signed().to_bytes()), indent=4).encode()

    assert judged(read_certificate(pretty)) is None


def leaves() -> list[str]:
    return sorted(flatten(certificate().to_json()))


def changed_at(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of a certificate's JSON with one value changed."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    place: Any = copy
    parts = name.split(".")
    if name.startswith("fingerprint."):
        parts = ["fingerprint", name.removeprefix("fingerprint.")]
    for part in parts[:-1]:
        place = place[int(part) if isinstance(place, list) else part]
    last: Any = int(parts[-1]) if isinstance(place, list) else parts[-1]
    place[last] = OTHER.get(name) or other(place[last])
    return copy


OTHER = {
    "envelope.capture_grid.3": 5,
    "envelope.traffic.sampling.0": "a",
    "envelope.traffic.sampling.1": "z",
    "level": "smoke",
}
"""Values that still make a certificate."""


def other(value: object) -> object:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return next(x for x in Check if x != value) if value in set(Check) else f"{value}x"
    return "something"


@pytest.mark.parametrize("name", [x for x in leaves() if x not in ("format", "key_id")])
def test_each_value_is_sealed_and_a_change_of_it_is_named(name: str) -> None:
    file = json.loads(signed().to_bytes())
    file["certificate"] = changed_at(file["certificate"], name)

    try:
        refusal = judged(read_certificate(json.dumps(file).encode()))
    except CertificateRefused as refused:  # it no longer makes an envelope
        assert name.startswith("envelope.")
        refusal = refused.refusal
        assert refusal.kind is RefusalKind.MALFORMED
    else:
        assert refusal is not None
        assert (refusal.kind, refusal.first) == (RefusalKind.TAMPERED, name)


def test_a_change_that_hides_its_digest_is_refused_all_the_same() -> None:
    good = signed()
    body = dataclasses.replace(good.certificate, expires_at_s=NOW_S + 900 * DAY_S)
    hidden = SignedCertificate(body, good.signature, value_digests(body.to_json()))

    refusal = judged(hidden)

    assert refusal is not None
    assert refusal.kind is RefusalKind.BAD_SIGNATURE


def test_a_certificate_that_names_a_trusted_key_and_is_signed_by_another_is_refused() -> None:
    stranger = SigningKey.generate()
    body = certificate()
    refusal = judged(
        SignedCertificate(body, stranger.sign(body.message), value_digests(body.to_json()))
    )

    assert refusal is not None
    assert refusal.kind is RefusalKind.BAD_SIGNATURE


def test_a_signature_over_the_bare_json_is_none_over_the_certificate() -> None:
    body = certificate()
    bare = canonical(body.to_json())
    assert body.message.endswith(bare)

    refusal = judged(SignedCertificate(body, KEY.sign(bare), value_digests(body.to_json())))

    assert refusal is not None
    assert refusal.kind is RefusalKind.BAD_SIGNATURE


def test_a_key_that_is_not_trusted_is_named() -> None:
    refusal = examine(signed(), wanted(), TrustStore({}), NOW_S)

    assert refusal is not None
    assert refusal.kind is RefusalKind.WRONG_KEY
    assert KEY.public.key_id in refusal.message


@pytest.mark.parametrize(
    ("changes", "kind", "first", "words"),
    [
        ({"issued_at_s": NOW_S + 60}, "not_yet_valid", "issued_at_s", "valid in 60 s"),
        ({"expires_at_s": NOW_S}, "expired", "expires_at_s", "expired 0 s ago"),
        ({"expires_at_s": NOW_S - 7}, "expired", "expires_at_s", "expired 7 s ago"),
        ({"level": Level.SMOKE}, "wrong_level", "level", "full is demanded"),
        ({"mode": "decode_cpu_eager"}, "wrong_mode", "mode", "runs decode_cpu_compiled"),
        ({"mode": "decode_fast"}, "wrong_mode", "mode", "for mode decode_fast"),
        ({"role": "prefill"}, "wrong_role", "role", "this is a decode group"),
        (
            {"mode": "prefill_cpu_eager", "role": "prefill"},
            "wrong_role", "role", "it is for prefill groups",
        ),
        ({"evidence": evidence(*FULL[1:])}, "check_missing", f"evidence.{FULL[0]}", "did not run"),
        ({"evidence": ()}, "check_missing", f"evidence.{FULL[0]}", "did not run"),
        (
            {"evidence": evidence(*FULL, FULL[2])},
            "check_repeated", f"evidence.{FULL[2]}", "more than once",
        ),
        (
            {"evidence": (*evidence(*FULL[:-1]), *evidence(FULL[-1], passed=False))},
            "check_failed", f"evidence.{FULL[-1]}", "failed",
        ),
        (
            {"evidence": (*evidence(*FULL[:-1]), *evidence(FULL[-1], replays=0))},
            "check_empty", f"evidence.{FULL[-1]}", "ran no step",
        ),
        (
            {"evidence": (*evidence(*FULL[:-1]), *evidence(FULL[-1], control=None))},
            "control_missing", f"evidence.{FULL[-1]}", "no positive control",
        ),
    ],
)  # fmt: skip
def test_each_way_to_fail_has_its_kind_and_names_what_is_wrong(
    changes: dict[str, Any], kind: str, first: str, words: str
) -> None:
    refusal = judged(forged(certificate(**changes)))

    assert refusal is not None
    assert (refusal.kind, refusal.first) == (kind, first)
    assert words in refusal.message


def test_a_control_that_was_not_caught_spoils_its_check() -> None:
    control = dataclasses.replace(CONTROL, was_caught=False)
    spoilt = (*evidence(FULL[0], control=control), *evidence(*FULL[1:]))

    refusal = judged(forged(certificate(evidence=spoilt)))

    assert refusal is not None
    assert (refusal.kind, refusal.first) == ("control_not_caught", f"evidence.{FULL[0]}")
    assert "routing shifted by one" in refusal.message


@pytest.mark.parametrize("says", [False, True, None])
def test_ranks_that_step_each_by_itself_need_no_proof_of_lock_step(says: bool | None) -> None:
    values = VALUES if says is None else VALUES | {STEPS_TOGETHER: says}
    group = Fingerprint(values)
    without = [check for check in FULL if check not in (Check.WAVE_STORM, Check.RAGGED_HAMMER)]

    found = forged(certificate(fingerprint=group, evidence=evidence(*without)))

    assert len(without) == len(FULL) - 2
    refusal = judged(found, fingerprint=group)
    if says is False:
        assert refusal is None
    else:
        assert refusal is not None
        assert (refusal.kind, refusal.first) == ("check_missing", "evidence.ragged_hammer")


@pytest.mark.parametrize("place", range(len(FULL)))
@pytest.mark.parametrize("change", [{"control": None}, {"passed": False}, {"replays": 0}])
def test_nothing_is_signed_that_one_check_does_not_prove(
    place: int, change: dict[str, Any]
) -> None:
    spoilt = list(evidence(*FULL))
    spoilt[place] = dataclasses.replace(spoilt[place], **change)
    asked: list[bytes] = []

    def sign_it(message: bytes) -> bytes:
        asked.append(message)
        return b""

    with pytest.raises(CertificateRefused) as refused:
        sign(certificate(evidence=tuple(spoilt)), sign_it)

    assert refused.value.refusal.first == f"evidence.{FULL[place]}"
    assert asked == []


def test_smoke_serves_only_where_smoke_is_enough() -> None:
    body = certificate(level=Level.SMOKE)

    assert judged(forged(body), level=Level.SMOKE) is None
    assert judged(signed(), level=Level.SMOKE) is None


@pytest.mark.parametrize("name", VALUES)
def test_any_other_value_of_the_fingerprint_is_named(name: str) -> None:
    now = Fingerprint(VALUES | {name: "other"})

    refusal = judged(signed(), fingerprint=now)

    assert refusal is not None
    assert (refusal.kind, refusal.first) == (RefusalKind.WRONG_FINGERPRINT, name)
    assert repr(VALUES[name]) in refusal.message
    assert "'other'" in refusal.message


def test_differences_beyond_the_first_are_counted_and_named_as_far_as_fits() -> None:
    two = judged(signed(), fingerprint=Fingerprint(VALUES | {"env.A": "1", "env.B": "1"}))
    many = judged(
        signed(), fingerprint=Fingerprint(VALUES | {f"env.A{n:02}": "1" for n in range(10)})
    )

    assert two is not None
    assert two.message == "env.A: certified not there, found '1'; then 1 more: env.B"
    assert many is not None
    assert "; then 9 more: env.A01, env.A02," in many.message
    assert many.message.endswith("env.A08, ...")


def test_a_group_of_another_shape_is_outside_the_envelope() -> None:
    refusal = judged(signed(), shape=dataclasses.replace(SHAPE, ranks=3))

    assert refusal is not None
    assert (refusal.kind, refusal.first) == (RefusalKind.OUTSIDE_ENVELOPE, "ranks")


def test_what_proves_asks_of_any_group_alike() -> None:
    assert proves(signed(), TRUST, Level.FULL, NOW_S) is None
    late = proves(signed(), TRUST, Level.FULL, NOW_S + 2 * DAY_S)
    strange = proves(signed(), TrustStore({}), Level.FULL, NOW_S)
    smoke = proves(forged(certificate(level=Level.SMOKE)), TRUST, Level.FULL, NOW_S)
    mixed = proves(forged(certificate(mode="prefill_cpu_eager")), TRUST, Level.FULL, NOW_S)

    found = [x and x.kind for x in (late, strange, smoke, mixed)]
    assert found == ["expired", "wrong_key", "wrong_level", "wrong_role"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda file: file.pop("signature"), "signature: is missing"),
        (lambda file: file.update(note=1), "note: is unknown"),
        (lambda file: file.update(signature="zz"), "signature: is not hexadecimal"),
        (lambda file: file["certificate"].update(format=2), "this release reads 1"),
        (lambda file: file["certificate"].update(level="half"), "none of smoke, full"),
        (lambda file: file["certificate"].update(issued_at_s=1.5), "issued_at_s: is no whole"),
        (lambda file: file["certificate"].update(issued_at_s=True), "issued_at_s: is no whole"),
        (lambda file: file["certificate"]["fingerprint"].update(odd=1), "odd is in none of"),
        (
            lambda file: file["certificate"]["evidence"][0].update(check="luck"),
            "evidence.0.check: 'luck' is no check",
        ),
        (
            lambda file: file["certificate"]["envelope"].update(seats_max=5),
            "envelope.seats_max: is 5, above the largest capture size, 4",
        ),
    ],
)
def test_a_file_that_is_no_certificate_says_where(edit: Any, words: str) -> None:
    file = json.loads(signed().to_bytes())
    edit(file)

    with pytest.raises(CertificateRefused) as refused:
        read_certificate(json.dumps(file).encode())

    assert refused.value.refusal.kind is RefusalKind.MALFORMED
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not JSON"),
        (b"[]", "is no object"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"signature":"","signature":""}', "'signature' twice"),
        (b'{"signature":NaN}', "NaN"),
        (b'{"signature":1e999}', "too large"),
        (b'{"signature":9223372036854775808}', "too large"),
        (b'{"signature":-1' + b"0" * 5000 + b"}", "too large"),
        (b'{"signature":"\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDfff":[{}]}', "half of a surrogate pair"),
        (b'{"\\ud83d\\ude00":1}', "certificate: is missing"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (4 * 2**20 + 1), "at most"),
    ],
)
def test_what_two_readers_could_read_apart_is_not_read_at_all(data: bytes, words: str) -> None:
    with pytest.raises(CertificateRefused, match=words):
        read_certificate(data)


def test_the_id_names_one_content() -> None:
    one, same, other_one = certificate(), certificate(), certificate(expires_at_s=NOW_S + 1)

    assert one.certificate_id == same.certificate_id != other_one.certificate_id
    assert len(one.certificate_id) == 16


def test_a_key_signs_only_what_names_it() -> None:
    with pytest.raises(AssertionError):
        sign_certificate(certificate(key_id="0" * 16), KEY)


def test_the_envelope_is_that_of_the_certificate() -> None:
    assert read_certificate(signed().to_bytes()).certificate.envelope == ENVELOPE
