"""Certificates: what was proved of a mode, for which engines, within which envelope, until when.

A certificate is canonical JSON, signed with Ed25519. Nothing here signs or reads files: signature
checks come in as a `Trust`, the time as `now_s`. `examine` is the one place that decides whether
a certificate lets a group serve; each of its refusals has a kind of its own and names the first
difference.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from splitwave.core.envelope import Envelope, GroupShape, read_envelope
from splitwave.core.evidence import Evidence, Level, first_flaw, read_evidence, required_checks
from splitwave.core.fingerprint import Fingerprint
from splitwave.core.mode import UnknownModeError, lookup
from splitwave.core.refusal import CertificateRefused as CertificateRefused
from splitwave.core.refusal import Refusal as Refusal
from splitwave.core.refusal import RefusalKind as RefusalKind
from splitwave.core.strict_json import Fields, JsonError, canonical, flatten, parse

FORMAT = 1
BYTES_MAX = 4 * 2**20
NAMED_MAX = 8
"""Differences of fingerprints, beside the first, whose names a refusal has."""
_CONTEXT = b"splitwave certificate 1\n"
"""Before what is signed, so that a signature can never be taken for one over something else."""

Verify = Callable[[bytes, bytes], bool]
"""(signature, message) -> True if this key made it."""
Trust = Callable[[str], Verify | None]
"""Key id -> how to check its signatures; None for a key that is not trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is signed. Times are seconds since 1970 UTC, whole."""

    level: Level
    mode: str
    role: str
    envelope: Envelope
    fingerprint: Fingerprint
    evidence: tuple[Evidence, ...]
    issued_at_s: int
    expires_at_s: int
    key_id: str
    """Of the key that signs it; `splitwave.certify.keys` says how it is made."""

    @property
    def certificate_id(self) -> str:
        """Sixteen hexadecimal digits of the digest of what is signed: its name in descriptions."""
        return hashlib.sha256(canonical(self.to_json())).hexdigest()[:16]

    @property
    def message(self) -> bytes:
        """The bytes that the signature is over."""
        return _CONTEXT + canonical(self.to_json())

    def to_json(self) -> dict[str, object]:
        """The certificate as plain values."""
        return {
            "format": FORMAT,
            "level": self.level.value,
            "mode": self.mode,
            "role": self.role,
            "envelope": self.envelope.to_json(),
            "fingerprint": dict(self.fingerprint.values),
            "evidence": [item.to_json() for item in self.evidence],
            "issued_at_s": self.issued_at_s,
            "expires_at_s": self.expires_at_s,
            "key_id": self.key_id,
        }


@dataclass(frozen=True, slots=True)
class SignedCertificate:
    """A certificate with its signature, as it lies in a file."""

    certificate: Certificate
    signature: bytes
    digests: Mapping[str, str] = field(default_factory=dict)
    """First digits of each value's digest when it was signed. Not trusted: with them a refusal of
    a tampered file can say what was changed."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        return canonical(
            {
                "certificate": self.certificate.to_json(),
                "signature": self.signature.hex(),
                "digests": dict(self.digests),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The group that is to serve, as it is known before its engines run."""

    mode: str
    role: str
    level: Level = Level.FULL
    """Least level that is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Sought):
    """The group that wants to serve."""

    fingerprint: Fingerprint
    """As recomputed from the running engines."""
    shape: GroupShape


def signed(certificate: Certificate, sign: Callable[[bytes], bytes]) -> SignedCertificate:
    """Sign a certificate, with `sign` from its message to a signature.

    Raises CertificateRefused for one that `examine` would not accept for its evidence, its mode
    or its times: what proves nothing is never signed.
    """
    refusal = _flawed(certificate)
    if refusal is not None:
        raise CertificateRefused(refusal)
    return SignedCertificate(
        certificate, sign(certificate.message), value_digests(certificate.to_json())
    )


def value_digests(body: object) -> dict[str, str]:
    """The first eight digits of the digest of each value of a certificate, by dotted name."""
    return {
        name: hashlib.sha256(canonical(value)).hexdigest()[:8]
        for name, value in flatten(body).items()
    }


def read_certificate(data: bytes) -> SignedCertificate:
    """Read a certificate file. Raises CertificateRefused (MALFORMED) naming what is wrong.

    Nothing is verified: that is `examine`'s work.
    """
    try:
        found = Fields(parse(data, bytes_max=BYTES_MAX), "")
        certificate = _read_body(found.fields("certificate"))
        signature = _read_hex(found, "signature")
        digests = {name: str(value) for name, value in found.scalars("digests").items()}
        found.end()
    except JsonError as error:
        raise CertificateRefused(
            Refusal(RefusalKind.MALFORMED, str(error).partition(":")[0], f"the file: {error}")
        ) from None
    return SignedCertificate(certificate, signature, digests)


def _read_hex(found: Fields, name: str) -> bytes:
    digits = found.text(name)
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise JsonError(f"{found.name_of(name)}: is not hexadecimal") from None


def _read_body(found: Fields) -> Certificate:
    if (version := found.whole("format")) != FORMAT:
        raise JsonError(f"certificate.format: is {version}; this release reads {FORMAT}")
    level = found.text("level")
    if level not in set(Level):
        raise JsonError(f"certificate.level: {level!r} is none of {', '.join(Level)}")
    try:
        fingerprint = Fingerprint(found.scalars("fingerprint"))
    except ValueError as error:
        raise JsonError(f"certificate.{error}") from None
    certificate = Certificate(
        level=Level(level),
        mode=found.text("mode"),
        role=found.text("role"),
        envelope=read_envelope(found.take("envelope"), "certificate.envelope"),
        fingerprint=fingerprint,
        evidence=tuple(
            read_evidence(item, f"certificate.evidence.{number}")
            for number, item in enumerate(found.items("evidence"))
        ),
        issued_at_s=found.whole("issued_at_s"),
        expires_at_s=found.whole("expires_at_s"),
        key_id=found.text("key_id"),
    )
    found.end()
    return certificate


def examine(
    signed: SignedCertificate, wanted: Wanted, trust: Trust, now_s: float
) -> Refusal | None:
    """Say why a certificate does not let this group serve, or None if it does.

    In this order: who signed it and whether it is as signed; its time; role, mode and level; its
    evidence; the engines; the group's shape.
    """
    body = signed.certificate
    return (
        foresee(signed, wanted, trust, now_s)
        or _other_engines(body, wanted)
        or _outside(body, wanted)
    )


def foresee(
    signed: SignedCertificate, sought: Sought, trust: Trust, now_s: float
) -> Refusal | None:
    """Say why a certificate will not let a group serve, whatever its engines are, or None."""
    body = signed.certificate
    return (
        authenticate(signed, trust)
        or _untimely(body, now_s)
        or _for_another(body, sought)
        or _flawed(body)
    )


def proves(signed: SignedCertificate, trust: Trust, level: Level, now_s: float) -> Refusal | None:
    """Say why a certificate does not count now for any group, whatever its engines, or None."""
    body = signed.certificate
    return (
        authenticate(signed, trust)
        or _untimely(body, now_s)
        or _too_little(body, level)
        or _flawed(body)
    )


def authenticate(signed: SignedCertificate, trust: Trust) -> Refusal | None:
    """Say why it is not known that a trusted key signed exactly this, or None."""
    body = signed.certificate
    verify = trust(body.key_id)
    if verify is None:
        return Refusal(
            RefusalKind.WRONG_KEY, "key_id",
            f"it is signed by key {body.key_id}, which is not in the trust store",
        )  # fmt: skip
    if verify(signed.signature, body.message):
        return None
    now = value_digests(body.to_json())
    names = sorted(now.keys() | signed.digests.keys())
    changed = [name for name in names if now.get(name) != signed.digests.get(name)]
    if changed:
        return Refusal(
            RefusalKind.TAMPERED, changed[0],
            f"{changed[0]} is not as key {body.key_id} signed it",
        )  # fmt: skip
    return Refusal(
        RefusalKind.BAD_SIGNATURE, "signature",
        f"the signature is not one of key {body.key_id} over this certificate",
    )  # fmt: skip


def _untimely(body: Certificate, now_s: float) -> Refusal | None:
    if now_s < body.issued_at_s:
        return Refusal(
            RefusalKind.NOT_YET_VALID, "issued_at_s",
            f"it is valid in {body.issued_at_s - now_s:.0f} s; look at this machine's clock",
        )  # fmt: skip
    if now_s >= body.expires_at_s:
        return Refusal(
            RefusalKind.EXPIRED, "expires_at_s",
            f"it expired {now_s - body.expires_at_s:.0f} s ago; certify again",
        )  # fmt: skip
    return None


def _for_another(body: Certificate, wanted: Sought) -> Refusal | None:
    """Role before mode, since another role's certificate is of another mode as well."""
    if body.role != wanted.role:
        return Refusal(
            RefusalKind.WRONG_ROLE, "role",
            f"it is for {body.role} groups; this is a {wanted.role} group",
        )  # fmt: skip
    if body.mode != wanted.mode:
        return Refusal(
            RefusalKind.WRONG_MODE, "mode",
            f"it is for mode {body.mode}; this group runs {wanted.mode}",
        )  # fmt: skip
    return _too_little(body, wanted.level)


def _too_little(body: Certificate, level: Level) -> Refusal | None:
    if body.level.reaches(level):
        return None
    words = f"its level is {body.level}; {level} is demanded"
    return Refusal(RefusalKind.WRONG_LEVEL, "level", words)


def _flawed(body: Certificate) -> Refusal | None:
    """What makes it worthless for any group."""
    try:
        mode = lookup(body.mode)
    except UnknownModeError as error:
        return Refusal(RefusalKind.WRONG_MODE, "mode", str(error))
    if mode.role != body.role:
        words = f"mode {mode.name} is a {mode.role} mode; it says {body.role}"
        return Refusal(RefusalKind.WRONG_ROLE, "role", words)
    if body.expires_at_s <= body.issued_at_s:
        return Refusal(RefusalKind.EXPIRED, "expires_at_s", "it expires before it is issued")
    required = required_checks(
        mode,
        body.level,
        ranks=body.envelope.ranks,
        steps_together=body.fingerprint.steps_together,
    )
    if (flaw := first_flaw(body.evidence, required)) is None:
        return None
    kind, check, words = flaw
    return Refusal(RefusalKind(kind.value), f"evidence.{check}", f"the check {check} {words}")


def _other_engines(body: Certificate, wanted: Wanted) -> Refusal | None:
    differences = body.fingerprint.differences(wanted.fingerprint)
    if not differences:
        return None
    first, rest = differences[0], [difference.name for difference in differences[1:]]
    more = f"; then {len(rest)} more: {', '.join(rest[:NAMED_MAX])}" if rest else ""
    unnamed = ", ..." if len(rest) > NAMED_MAX else ""
    return Refusal(RefusalKind.WRONG_FINGERPRINT, first.name, f"{first}{more}{unnamed}")


def _outside(body: Certificate, wanted: Wanted) -> Refusal | None:
    if (outside := body.envelope.refuse_group(wanted.shape)) is None:
        return None
    return Refusal(RefusalKind.OUTSIDE_ENVELOPE, outside.limit, str(outside))
