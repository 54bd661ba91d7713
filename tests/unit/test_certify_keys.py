"""Keys on disk, the store of trusted ones, and the certificate that a group finds."""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from splitwave.certify.keys import (
    BadKey,
    KeyExists,
    PublicKey,
    SigningKey,
    load_public_key,
    load_signing_key,
    load_trust_store,
)
from splitwave.certify.store import choose, files, read_file, write_file
from splitwave.core.certificate import CertificateRefused, RefusalKind
from splitwave.core.evidence import Level
from tests.unit.certificates import DAY_S, KEY, NOW_S, TRUST, signed, wanted

RFC_8032_KEY = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
RFC_8032_SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b4"
    "6bd25bf5f0595bbe24655141438e7a100b"
)
"""RFC 8032, 7.1, test 1: the signature over no bytes."""


def test_a_signature_is_ed25519s() -> None:
    key = PublicKey(RFC_8032_KEY)

    assert key.verify(RFC_8032_SIGNATURE, b"")
    assert not key.verify(RFC_8032_SIGNATURE, b"\x00")
    assert not key.verify(RFC_8032_SIGNATURE[:-1], b"")
    assert not key.verify(b"", b"")
    assert key.key_id == "21fe31dfa154a261"


def test_a_key_pair_survives_its_files(tmp_path: Path) -> None:
    key = SigningKey.generate()
    public_path = key.save(tmp_path / "new" / "release.pem")

    again = load_signing_key(tmp_path / "new" / "release.pem")

    assert public_path.name == "release.pub.pem"
    assert again.public == key.public == load_public_key(public_path)
    assert key.public.verify(again.sign(b"x"), b"x")
    assert SigningKey.generate().public != key.public


def test_a_private_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    SigningKey.generate().save(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(BadKey, match="chmod 600"):
            load_signing_key(path)


@pytest.mark.parametrize("taken", ["key.pem", "key.pub.pem"])
def test_no_key_is_overwritten(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")

    with pytest.raises(BadKey, match=f"{taken} exists; a key is never overwritten"):
        SigningKey.generate().save(tmp_path / "key.pem")

    assert (tmp_path / taken).read_text() == "mine"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("file/key.pem", "file cannot be made a directory"),
        ("file/deeper/key.pem", "deeper cannot be made a directory"),
        (f"{'k' * 300}.pem", "cannot be written"),
    ],
)
def test_a_key_that_cannot_be_written_is_told_and_leaves_nothing(
    tmp_path: Path, where: str, words: str
) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(BadKey, match=words):
        SigningKey.generate().save(tmp_path / where)

    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_private_key_is_left_without_its_public_half(tmp_path: Path) -> None:
    name = f"{'k' * 249}.pem"  # Its public half's name is too long for a file.

    with pytest.raises(BadKey, match="cannot be"):
        SigningKey.generate().save(tmp_path / name)

    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_hard_links_a_key_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    key = SigningKey.generate()

    key.save(tmp_path / "key.pem")

    assert load_signing_key(tmp_path / "key.pem").public == key.public
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.pem", "key.pub.pem"]
    (tmp_path / "key.pub.pem").unlink()
    with pytest.raises(KeyExists, match="never overwritten"):
        SigningKey.generate().save(tmp_path / "key.pem")


def test_a_key_needs_a_name() -> None:
    with pytest.raises(BadKey, match="names no file"):
        SigningKey.generate().save(Path())


def pem_of_a_curve_that_is_not_ours() -> tuple[bytes, bytes]:
    private = ec.generate_private_key(ec.SECP256R1())
    return (
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )


def test_a_file_that_holds_no_such_key_is_named(tmp_path: Path) -> None:
    private_pem, public_pem = pem_of_a_curve_that_is_not_ours()
    path = tmp_path / "k.pem"

    for pem, load, words in (
        (b"", load_public_key, "holds no public key"),
        (public_pem, load_public_key, "is no Ed25519 key"),
        (private_pem, load_public_key, "is a private key; take it out"),
        (b"", load_signing_key, "holds no unencrypted private key"),
        (private_pem, load_signing_key, "is no Ed25519 key; make one"),
    ):
        path.write_bytes(pem)
        path.chmod(0o600)
        with pytest.raises(BadKey, match=words):
            load(path)
    with pytest.raises(BadKey, match=r"gone\.pem cannot be read"):
        load_signing_key(tmp_path / "gone.pem")


def test_a_trust_store_is_all_keys_of_a_directory(tmp_path: Path) -> None:
    keys = [SigningKey.generate() for _ in range(2)]
    for number, key in enumerate(keys):
        (tmp_path / f"{number}.pem").write_bytes(key.public.to_pem())
    (tmp_path / "README").write_text("not a key")

    store = load_trust_store(tmp_path)

    assert set(store.keys) == {key.public.key_id for key in keys}
    verify = store(keys[1].public.key_id)
    assert verify is not None
    assert verify(keys[1].sign(b"x"), b"x")
    assert not verify(keys[0].sign(b"x"), b"x")
    assert store("0" * 16) is None


def test_a_trust_store_that_could_accept_nothing_or_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadKey, match="holds no"):
        load_trust_store(tmp_path)
    with pytest.raises(BadKey, match="is no directory"):
        load_trust_store(tmp_path / "gone")
    KEY.save(tmp_path / "key.pem")
    with pytest.raises(BadKey, match="is a private key"):
        load_trust_store(tmp_path)


def test_a_certificate_file_is_named_for_what_it_is_and_reads_back(tmp_path: Path) -> None:
    good = signed()

    path = write_file(good, tmp_path / "certificates")

    name = f"decode_cpu_compiled.full.{good.certificate.certificate_id}.cert.json"
    assert path.name == name
    assert read_file(path) == good
    assert files(path.parent) == [path] == files(path)
    assert list(path.parent.iterdir()) == [path]


def test_of_several_the_one_that_is_valid_longest_is_chosen(tmp_path: Path) -> None:
    for days in (1, 3, 2):
        write_file(signed(expires_at_s=NOW_S + days * DAY_S), tmp_path)

    _, chosen = choose(tmp_path, wanted(), TRUST, NOW_S)

    assert chosen.certificate.expires_at_s == NOW_S + 3 * DAY_S


def test_a_smoke_one_that_is_valid_longer_does_not_hide_a_full_one(tmp_path: Path) -> None:
    full = write_file(signed(), tmp_path)
    write_file(signed(level=Level.SMOKE, expires_at_s=NOW_S + 9 * DAY_S), tmp_path)

    asked = wanted(level=Level.SMOKE)
    assert choose(tmp_path, asked, TRUST, NOW_S)[0] == full


def test_bad_ones_beside_it_do_not_keep_a_good_one_from_serving(tmp_path: Path) -> None:
    good = write_file(signed(), tmp_path)
    write_file(signed(expires_at_s=NOW_S - 1), tmp_path)
    (tmp_path / "broken.cert.json").write_text("{")

    assert choose(tmp_path, wanted(), TRUST, NOW_S)[0] == good


def test_no_one_value_of_a_file_keeps_a_good_one_from_serving(tmp_path: Path) -> None:
    good = write_file(signed(), tmp_path)
    whole = json.loads(good.read_bytes())
    bad = tmp_path / "0.cert.json"

    odd: list[object] = ["\ud800", 10**4000, -1, None, [], {"\udfff": 1}]
    for name in whole["certificate"]:
        for value in odd:
            body = whole["certificate"] | {name: value}
            bad.write_text(json.dumps(whole | {"certificate": body}))
            assert choose(tmp_path, wanted(), TRUST, NOW_S)[0] == good, (name, value)


def test_the_refusal_that_came_nearest_is_told_with_its_file(tmp_path: Path) -> None:
    write_file(signed(expires_at_s=NOW_S - 1), tmp_path)
    (tmp_path / "broken.cert.json").write_text("{")
    path = write_file(signed(), tmp_path)
    asked = wanted()
    moved = wanted(
        fingerprint=type(asked.fingerprint)(dict(asked.fingerprint.values) | {"env.X": "1"})
    )

    with pytest.raises(CertificateRefused) as refused:
        choose(tmp_path, moved, TRUST, NOW_S)

    assert refused.value.refusal.kind is RefusalKind.WRONG_FINGERPRINT
    assert refused.value.refusal.first == "env.X"
    assert path.name in refused.value.refusal.message


def test_without_any_certificate_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CertificateRefused, match="make one with `splitwave certify`") as refused:
        choose(tmp_path, wanted(), TRUST, NOW_S)
    assert f"in {tmp_path}, which holds no *.cert.json" in str(refused.value)
    with pytest.raises(CertificateRefused, match="No such file"):
        choose(tmp_path / "one.cert.json", wanted(), TRUST, NOW_S)
