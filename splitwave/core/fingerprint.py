"""What a certificate is bound to: everything about a group that decides how its steps run.

A fingerprint is a flat table, so two of them differ by name. What is left out of it stands in
`splitwave.core.neutral`, each with its reason; whatever is not there counts.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from splitwave.core.neutral import is_neutral
from splitwave.core.strict_json import Scalar, canonical

SECTIONS = ("version", "hardware", "parallel", "env", "sim", "vllm", "kernel", "weights")
"""First parts of the names, in the order in which differences are told: causes before effects."""

STEPS_TOGETHER = "parallel.steps_together"
"""Whether ranks need one another in each step, so that waves of them are coordinated."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One name by which two fingerprints differ."""

    name: str
    certified: Scalar
    found: Scalar
    is_certified: bool = True
    """False if the certificate does not have the name at all."""
    is_found: bool = True
    """False if the group does not have the name at all."""

    def __str__(self) -> str:
        certified = repr(self.certified) if self.is_certified else "not there"
        found = repr(self.found) if self.is_found else "not there"
        return f"{self.name}: certified {certified}, found {found}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Values by dotted name, `SECTION.rest`."""

    values: Mapping[str, Scalar]

    def __post_init__(self) -> None:
        strays = [name for name in self.values if name.partition(".")[0] not in SECTIONS]
        if strays:
            raise ValueError(f"fingerprint: {min(strays)} is in none of {', '.join(SECTIONS)}")

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hexadecimal."""
        return hashlib.sha256(canonical(dict(self.values))).hexdigest()

    @property
    def steps_together(self) -> bool:
        """Whether the group's ranks step in lock-step; True if it does not say."""
        return self.values.get(STEPS_TOGETHER) is not False

    def differences(self, found: "Fingerprint") -> list[Difference]:
        """By what `found` differs from this certified one, causes first; empty if they are equal.

        Values are equal if kind and value are: 1, 1.0 and True are three different values.
        """
        names = sorted(self.values.keys() | found.values.keys(), key=_order)
        return [
            Difference(
                name,
                self.values.get(name),
                found.values.get(name),
                name in self.values,
                name in found.values,
            )
            for name in names
            if not _same(self.values, found.values, name)
        ]


def _same(one: Mapping[str, Scalar], other: Mapping[str, Scalar], name: str) -> bool:
    if name not in one or name not in other:
        return False
    return type(one[name]) is type(other[name]) and one[name] == other[name]


def _order(name: str) -> tuple[int, str]:
    return SECTIONS.index(name.partition(".")[0]), name


def without_neutral(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The values that count."""
    return {name: value for name, value in values.items() if not is_neutral(name)}


def ranks_differ(ranks: Iterable[Mapping[str, Scalar]]) -> tuple[int, Difference] | None:
    """The first rank whose values differ from rank 0's, and by what; None if all agree."""
    first: Fingerprint | None = None
    for rank, values in enumerate(ranks):
        found = Fingerprint(values)
        first = first or found
        if differences := first.differences(found):
            return rank, differences[0]
    return None
