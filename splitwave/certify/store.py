"""Certificates on disk, and which of them lets a group serve."""

import os
from pathlib import Path

from splitwave.core.certificate import (
    BYTES_MAX,
    CertificateRefused,
    Refusal,
    RefusalKind,
    SignedCertificate,
    Trust,
    Wanted,
    examine,
    read_certificate,
)
from splitwave.core.evidence import Level

SUFFIX = ".cert.json"

_NEARNESS = {kind: place for place, kind in enumerate(RefusalKind)}
"""`examine` asks in the order in which the kinds stand, so a later kind came nearer to serving."""


def read_file(path: Path) -> SignedCertificate:
    """Read one certificate. Raises CertificateRefused with the path in its message."""
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise _refused(RefusalKind.NONE_FOUND, f"{path}: {error.strerror}") from None
    try:
        return read_certificate(data)
    except CertificateRefused as refused:
        words = f"{path}: {refused.refusal.message}"
        refusal = Refusal(refused.refusal.kind, refused.refusal.first, words)
        raise CertificateRefused(refusal) from None


def write_file(signed: SignedCertificate, directory: Path) -> Path:
    """Write a certificate as MODE.LEVEL.ID.cert.json, whole or not at all; return its path."""
    body = signed.certificate
    path = directory / f"{body.mode}.{body.level}.{body.certificate_id}{SUFFIX}"
    directory.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(signed.to_bytes())
    part.replace(path)
    return path


def files(place: Path) -> list[Path]:
    """The certificates of a directory, by name; or the one file that `place` is."""
    return sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]


def choose(
    place: Path, wanted: Wanted, trust: Trust, now_s: float
) -> tuple[Path, SignedCertificate]:
    """The certificate that lets this group serve, of a directory or the one file that `place` is:
    of several a full one, the one valid longest.

    Raises CertificateRefused with the refusal of the one that came nearest.
    """
    fitting: list[tuple[bool, int, Path, SignedCertificate]] = []
    refusals: list[Refusal] = []
    for path in files(place):
        try:
            signed = read_file(path)
        except CertificateRefused as refused:
            refusals.append(refused.refusal)
            continue
        if (refusal := examine(signed, wanted, trust, now_s)) is None:
            # A smoke one that is younger must not hide what routers demand.
            is_full = signed.certificate.level is Level.FULL
            fitting.append((is_full, signed.certificate.expires_at_s, path, signed))
        else:
            words = f"{path.name}: {refusal.message}"
            refusals.append(Refusal(refusal.kind, refusal.first, words))
    if fitting:
        _, _, path, signed = max(fitting, key=lambda item: item[:3])
        return path, signed
    if not refusals:
        raise _refused(
            RefusalKind.NONE_FOUND,
            f"there is no certificate for {wanted.mode} in {place}, which holds no *{SUFFIX}; "
            "make one with `splitwave certify`",
        )
    raise CertificateRefused(max(refusals, key=lambda refusal: _NEARNESS[refusal.kind]))


def _refused(kind: RefusalKind, message: str) -> CertificateRefused:
    return CertificateRefused(Refusal(kind, "certificate", message))
