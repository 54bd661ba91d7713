"""Why a certificate does not let a group serve: the closed list, with what to do about each."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class RefusalKind(enum.StrEnum):
    """Why a certificate does not let a group serve, as logs, metrics and exit messages name it.

    In the order in which they are asked: a later kind came nearer to serving.
    """

    NONE_FOUND = "none_found"
    MALFORMED = "malformed"
    WRONG_KEY = "wrong_key"
    TAMPERED = "tampered"
    BAD_SIGNATURE = "bad_signature"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    WRONG_ROLE = "wrong_role"
    WRONG_MODE = "wrong_mode"
    WRONG_LEVEL = "wrong_level"
    CHECK_MISSING = "check_missing"
    CHECK_REPEATED = "check_repeated"
    CHECK_FAILED = "check_failed"
    CHECK_EMPTY = "check_empty"
    CONTROL_MISSING = "control_missing"
    CONTROL_NOT_CAUGHT = "control_not_caught"
    WRONG_FINGERPRINT = "wrong_fingerprint"
    OUTSIDE_ENVELOPE = "outside_envelope"


_AGAIN = "certify again, with the program that is installed"

TOLD: Mapping[RefusalKind, tuple[str, str, str]] = {
    RefusalKind.NONE_FOUND: (
        "there is no certificate where it was looked for",
        "the path",
        "`splitwave certify`, or correct `certificates`",
    ),
    RefusalKind.MALFORMED: (
        "the file is no certificate that this release reads",
        "the field",
        "take the file as `certify` wrote it",
    ),
    RefusalKind.WRONG_KEY: (
        "it is signed by a key that is not in the trust store",
        "the key's id",
        "put that public key into the store if you trust it",
    ),
    RefusalKind.TAMPERED: (
        "a value is not as it was signed",
        "the first such value",
        "find out who changed the file; take the original",
    ),
    RefusalKind.BAD_SIGNATURE: (
        "the signature is not this key's over this certificate",
        "the signature",
        "find out where the file comes from; take the original",
    ),
    RefusalKind.NOT_YET_VALID: (
        "its time has not begun",
        "how long it takes",
        "set this machine's clock",
    ),
    RefusalKind.EXPIRED: ("its time is over", "since when", "certify again"),
    RefusalKind.WRONG_ROLE: ("it is for groups of the other role", "both roles", "take the other"),
    RefusalKind.WRONG_MODE: ("it is for another mode", "both modes", "take that mode's"),
    RefusalKind.WRONG_LEVEL: ("less was proved than is demanded", "both levels", "certify in full"),
    RefusalKind.CHECK_MISSING: ("a required check did not run", "the check", _AGAIN),
    RefusalKind.CHECK_REPEATED: ("a check stands there twice", "the check", _AGAIN),
    RefusalKind.CHECK_FAILED: (
        "a check failed",
        "the check",
        "read its figures in the report; the mode is not fit here",
    ),
    RefusalKind.CHECK_EMPTY: ("no step ran for a check", "the check", _AGAIN),
    RefusalKind.CONTROL_MISSING: ("nobody knows whether a check can fail", "the check", _AGAIN),
    RefusalKind.CONTROL_NOT_CAUGHT: (
        "a check passed what was broken on purpose",
        "the check, and what was broken",
        "do not trust the check here; report it",
    ),
    RefusalKind.WRONG_FINGERPRINT: (
        "the engines are not the certified ones",
        "the first difference, certified and found",
        "the table below",
    ),
    RefusalKind.OUTSIDE_ENVELOPE: (
        "the group is larger than, or shaped unlike, what was certified",
        "the limit, asked and certified",
        "change the group's settings, or certify this shape",
    ),
}
"""What each means, what its message names, and what to do."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a certificate does not count. `first` names the first thing that is not as it must be."""

    kind: RefusalKind
    first: str
    message: str

    def __str__(self) -> str:
        return f"certificate refused ({self.kind}): {self.message}"


class CertificateRefused(Exception):
    """A certificate that cannot be read, made or used."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
