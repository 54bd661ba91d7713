"""`splitwave certificate`: keys are made, certificates told, judged and compared."""

import json
from pathlib import Path

import pytest

from services.cli.main import main
from splitwave.certify.keys import load_signing_key
from splitwave.certify.store import write_file
from splitwave.core.fingerprint import Fingerprint
from tests.unit.certificates import DAY_S, KEY, NOW_S, VALUES, signed

FAR_S = 40_000_000_000
"""Year 3237."""

Out = pytest.CaptureFixture[str]


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    directory = tmp_path / "trust"
    directory.mkdir()
    (directory / "key.pem").write_bytes(KEY.public.to_pem())
    return directory


def test_keygen_makes_a_pair_and_says_where_each_half_belongs(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "release.pem"

    assert main(["certificate", "keygen", str(path)]) == 0

    said = capsys.readouterr().out
    assert load_signing_key(path).public.key_id in said
    assert str(tmp_path / "release.pub.pem") in said
    assert main(["certificate", "keygen", str(path)]) == 1
    assert "never overwritten" in capsys.readouterr().err


def test_keygen_that_cannot_write_says_so(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "file").write_text("")

    assert main(["certificate", "keygen", str(tmp_path / "file" / "key.pem")]) == 1
    assert "certificate keygen: " in (said := capsys.readouterr().err)
    assert "cannot be made a directory" in said


def test_show_tells_times_that_no_calendar_has(tmp_path: Path, capsys: Out) -> None:
    path = write_file(signed(), tmp_path)
    file = json.loads(path.read_bytes())
    file["certificate"]["expires_at_s"] = 2**62
    path.write_text(json.dumps(file))

    assert main(["certificate", "show", str(path)]) == 0
    assert f"to {2**62} s since 1970" in capsys.readouterr().out


def test_show_tells_all_without_judging(tmp_path: Path, capsys: Out) -> None:
    path = write_file(signed(expires_at_s=NOW_S - 1), tmp_path)

    assert main(["certificate", "show", str(path)]) == 0

    said = capsys.readouterr().out
    for words in (
        "full certificate", "decode_cpu_compiled (decode)", KEY.public.key_id,
        "2 ranks x 1", "4 seats", "grid: 4 sizes to 4", "prompts to 96 tokens", "seed, top_k",
        "9 values", "control caught: routing shifted by one", "two_boots",
    ):  # fmt: skip
        assert words in said
    assert "NCCL_ODD_NEW_ONE" not in said
    assert main(["certificate", "show", "--fingerprint", str(path)]) == 0
    assert "env.NCCL_ODD_NEW_ONE = '1'" in capsys.readouterr().out


def test_verify_says_good_or_why_not_of_each(tmp_path: Path, trust: Path, capsys: Out) -> None:
    good = write_file(signed(issued_at_s=1, expires_at_s=FAR_S), tmp_path)
    old = write_file(signed(issued_at_s=1, expires_at_s=2), tmp_path)
    changed = tmp_path / "changed.cert.json"
    file = json.loads(good.read_bytes())
    file["certificate"]["envelope"]["seats_max"] = 3
    changed.write_text(json.dumps(file))

    assert main(["certificate", "verify", "--trust", str(trust), str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: good\n"
    code = main(["certificate", "verify", "--trust", str(trust), str(good), str(old), str(changed)])

    assert code == 3
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{good}: good"
    assert second.startswith(f"{old}: refused (expired, expires_at_s)")
    assert third.startswith(f"{changed}: refused (tampered, envelope.seats_max)")


def test_verify_needs_a_store_that_can_be_used(tmp_path: Path, capsys: Out) -> None:
    path = write_file(signed(), tmp_path)

    assert main(["certificate", "verify", "--trust", str(tmp_path), str(path)]) == 1
    assert "holds no *.pem" in capsys.readouterr().err


def test_diff_names_what_differs_between_certificates(tmp_path: Path, capsys: Out) -> None:
    one = write_file(signed(), tmp_path)
    other = write_file(
        signed(
            fingerprint=Fingerprint(VALUES | {"version.vllm": "0.33.0"}),
            expires_at_s=NOW_S + 2 * DAY_S,
        ),
        tmp_path,
    )

    assert main(["certificate", "diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["certificate", "diff", str(one), str(other)]) == 1
    assert capsys.readouterr().out == "version.vllm: '0.32.0' | '0.33.0'\n"


def test_diff_takes_a_bare_fingerprint_too(tmp_path: Path, capsys: Out) -> None:
    certificate = write_file(signed(), tmp_path)
    now = tmp_path / "now.json"
    now.write_text(json.dumps(VALUES | {"env.NCCL_ODD_NEW_ONE": "2", "env.UCX_TLS": "tcp"}))

    assert main(["certificate", "diff", str(certificate), str(now)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "env.NCCL_ODD_NEW_ONE: '1' | '2'",
        "env.UCX_TLS: not there | 'tcp'",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"foo": 1}', "neither a certificate nor a fingerprint: fingerprint: foo is in none of"),
        ('{"vllm.a": [1]}', "neither a certificate nor a fingerprint: fingerprint.vllm.a: is no"),
        ('{"a":' * 100_000, "is not JSON"),
        ('{"vllm.a": 1, "vllm.a": 2}', "'vllm.a' twice"),
        ("[1]", "is no object"),
    ],
)
def test_diff_says_of_a_file_that_is_neither_what_is_wrong_with_it(
    tmp_path: Path, capsys: Out, text: str, words: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)

    assert main(["certificate", "diff", str(write_file(signed(), tmp_path)), str(other)]) == 1

    said = capsys.readouterr().err
    assert words in said
    assert str(other) in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: Out) -> None:
    gone = tmp_path / "gone.cert.json"

    for words in (["show", str(gone)], ["diff", str(gone), str(gone)]):
        assert main(["certificate", *words]) == 1
        assert str(gone) in capsys.readouterr().err
