"""Certificates on disk, and which of them lets a group serve."""

import os
from collections.abc import Callable
from pathlib import Path

from splitwave.core.certificate import (
    BYTES_MAX,
    CertificateRefused,
    Refusal,
    RefusalKind,
    SignedCertificate,
    Sought,
    Trust,
    Wanted,
    examine,
    foresee,
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
    fitting = _judged(place, lambda signed: examine(signed, wanted, trust, now_s), wanted)
    # A smoke one that is younger must not hide what routers demand.
    return max(fitting, key=lambda item: _rank(*item))


def foresee_any(place: Path, sought: Sought, trust: Trust, now_s: float) -> None:
    """See that a certificate there may let such a group serve, before its engines are started.

    Raises CertificateRefused, as `choose` would once they run, if none can whatever they are.
    """
    _judged(place, lambda signed: foresee(signed, sought, trust, now_s), sought)


def _rank(path: Path, signed: SignedCertificate) -> tuple[bool, int, Path]:
    body = signed.certificate
    return body.level is Level.FULL, body.expires_at_s, path


def _judged(
    place: Path, judge: Callable[[SignedCertificate], Refusal | None], sought: Sought
) -> list[tuple[Path, SignedCertificate]]:
    """The certificates that are not refused. Raises CertificateRefused if each is."""
    fitting: list[tuple[Path, SignedCertificate]] = []
    refusals: list[Refusal] = []
    try:
        place.stat()
    except OSError as error:
        words = f"{place}: {error.strerror}; name a certificate, or a directory of them"
        raise _refused(RefusalKind.NONE_FOUND, words) from None
    for path in files(place):
        try:
            signed = read_file(path)
        except CertificateRefused as refused:
            refusals.append(refused.refusal)
            continue
        if (refusal := judge(signed)) is None:
            fitting.append((path, signed))
        else:
            words = f"{path.name}: {refusal.message}"
            refusals.append(Refusal(refusal.kind, refusal.first, words))
    if fitting:
        return fitting
    if not refusals:
        raise _refused(
            RefusalKind.NONE_FOUND,
            f"there is no certificate for {sought.mode} in {place}, which holds no *{SUFFIX}; "
            "make one with `splitwave certify`",
        )
    raise CertificateRefused(max(refusals, key=lambda refusal: _NEARNESS[refusal.kind]))


def _refused(kind: RefusalKind, message: str) -> CertificateRefused:
    return CertificateRefused(Refusal(kind, "certificate", message))
