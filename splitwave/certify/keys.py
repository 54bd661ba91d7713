"""Ed25519 keys: making and reading them, signing certificates, and the store of trusted ones.

A private key is one PEM file (PKCS 8, unencrypted) that only its owner may read. A trust store is
a directory of public keys, one PEM file each, whatever their names; a key is known by its id.
"""

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from splitwave.core.certificate import Certificate, SignedCertificate, Verify, signed

PUBLIC_SUFFIX = ".pub.pem"
KEY_BYTES_MAX = 64 * 1024
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems without hard links say."""


class BadKey(ValueError):
    """A key file or trust store that cannot be used. The message names the path and the fix."""


class KeyExists(BadKey):
    """There is a file where a new key was to be written."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Checks signatures of one key."""

    raw: bytes
    """The 32 bytes of the key."""

    @property
    def key_id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the raw key."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def verify(self, signature: bytes, message: bytes) -> bool:
        """True if this key made the signature."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """The key as a trust store holds it."""
        return Ed25519PublicKey.from_public_bytes(self.raw).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )


class SigningKey:
    """A private key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> "SigningKey":
        """Make a new key from the system's source of randomness."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> PublicKey:
        """The key that others check with."""
        return PublicKey(
            self._private.public_key().public_bytes(
                serialization.Encoding.Raw, serialization.PublicFormat.Raw
            )
        )

    def sign(self, message: bytes) -> bytes:
        """Sign bytes: 64 bytes of signature."""
        return self._private.sign(message)

    def save(self, path: Path) -> Path:
        """Write the private key, readable by its owner alone, and its public half beside it.

        Returns the public key's path. Raises KeyExists if either exists, since a key is never
        overwritten, and BadKey where neither can be written: no half of a pair is left then.
        """
        if not path.name:
            raise BadKey(f"{str(path)!r} names no file; give the one to write, as keys/release.pem")
        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public_path = path.with_name(path.name.removesuffix(".pem") + PUBLIC_SUFFIX)
        make_directory(path.parent)
        if os.path.lexists(public_path):  # Not told once others may have read the private one.
            raise KeyExists(f"{public_path} exists; a key is never overwritten, move it away")
        _write_new(path, pem, mode=0o600)
        try:
            _write_new(public_path, self.public.to_pem(), mode=0o644)
        except BadKey:
            path.unlink()  # With no public half it signs what nobody can check.
            raise
        return public_path


def write_public(key: PublicKey, path: Path) -> None:
    """Write a public key, whole or not at all; one that is there already is left. Raises BadKey."""
    try:
        _write_new(path, key.to_pem(), mode=0o644)
    except KeyExists:
        if not path.exists():
            raise BadKey(f"{path} cannot be written: it is a link to nothing") from None


def make_directory(path: Path) -> None:
    """Make a directory for keys if it is not there. Raises BadKey where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadKey(f"{path} cannot be made a directory: {error.strerror}") from None


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file whole or not at all: who finds it there finds all of it.

    Raises KeyExists if it is there already; of two who write it at once the second one does.
    """
    part = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        try:
            _create(part, data, mode)
            _publish(part, path, data, mode)
        finally:
            part.unlink(missing_ok=True)
    except FileExistsError:
        raise KeyExists(f"{path} exists; a key is never overwritten, choose another name") from None
    except OSError as error:
        raise BadKey(f"{path} cannot be written: {error.strerror}") from None


def _create(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def _publish(part: Path, path: Path, data: bytes, mode: int) -> None:
    """Give a written file its name. A renamed one would replace a key that came meanwhile."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _create(path, data, mode)  # Still never over another; who reads it now may see half.


def load_signing_key(path: Path) -> SigningKey:
    """Read a private key. Raises BadKey if it is none or if others than its owner may read it."""
    pem = _read(path)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadKey(f"{path} can be read by others than its owner; run: chmod 600 {path}")
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadKey(f"{path} holds no unencrypted private key: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise BadKey(f"{path} is no Ed25519 key; make one with `splitwave certificate keygen`")
    return SigningKey(private)


def load_public_key(path: Path) -> PublicKey:
    """Read a public key. Raises BadKey if the file holds anything else, a private key above all."""
    pem = _read(path)
    if b"PRIVATE KEY" in pem:
        raise BadKey(f"{path} is a private key; take it out of here and put its public half in")
    try:
        public = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadKey(f"{path} holds no public key: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise BadKey(f"{path} is no Ed25519 key")
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return PublicKey(raw)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_BYTES_MAX)
    except OSError as error:
        raise BadKey(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class TrustStore:
    """The public keys whose certificates count, by id. Call it to get a key's check (`Trust`)."""

    keys: Mapping[str, PublicKey]

    def __call__(self, key_id: str) -> Verify | None:
        """How to check the signatures of a key; None if it is not trusted."""
        key = self.keys.get(key_id)
        return None if key is None else key.verify


def load_trust_store(directory: Path) -> TrustStore:
    """Read every `*.pem` of a directory. Raises BadKey for a bad one, and if there is none."""
    try:
        is_there = directory.is_dir()
    except OSError as error:
        raise BadKey(f"{directory} cannot be read: {error.strerror}") from None
    if not is_there:
        raise BadKey(f"{directory} is no directory; put the public keys that you trust into one")
    keys = [load_public_key(path) for path in sorted(directory.glob("*.pem"))]
    if not keys:
        raise BadKey(f"{directory} holds no *.pem file, so no certificate could be accepted")
    return TrustStore({key.key_id: key for key in keys})


def sign_certificate(certificate: Certificate, key: SigningKey) -> SignedCertificate:
    """Sign a certificate whose `key_id` is this key's.

    Raises CertificateRefused for one whose evidence proves nothing (`signed`).
    """
    assert certificate.key_id == key.public.key_id
    return signed(certificate, key.sign)
