"""Comparing greedy tokens of two modes, sequence by sequence."""

import hashlib
import json
import statistics
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Tokens = Mapping[str, Sequence[int]]
"""First tokens of each sequence, by its name."""


@dataclass(frozen=True, slots=True)
class Equality:
    """How a mode's tokens compare with the eager ones of the same sequences."""

    sequences: int
    """Those that both have."""
    equal: int
    first_differing: tuple[int, ...]
    """Place of the first differing token of each of the others, ascending."""
    tokens_compared: int
    """Tokens up to and with each first difference: a later one has another history."""

    @property
    def fraction(self) -> float:
        """Share of sequences without a difference."""
        return self.equal / self.sequences if self.sequences else 0.0

    def report(self) -> dict[str, object]:
        """For the results: counts, and where differences begin."""
        differing = self.first_differing
        return {
            "sequences": self.sequences,
            "equal": self.equal,
            "fraction": self.fraction,
            "tokens_compared": self.tokens_compared,
            "differences_a_token": len(differing) / max(1, self.tokens_compared),
            "first_differing_min": min(differing, default=None),
            "first_differing_median": statistics.median(differing) if differing else None,
            "first_differing_max": max(differing, default=None),
        }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Place of the first differing token, the shorter one's end included; None if equal."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare(ours: Tokens, eager: Tokens) -> Equality:
    """Compare the sequences that both have."""
    names = sorted(ours.keys() & eager.keys())
    places = [first_difference(ours[name], eager[name]) for name in names]
    differing = tuple(sorted(place for place in places if place is not None))
    compared = sum(
        len(ours[name]) if place is None else place + 1
        for name, place in zip(names, places, strict=True)
    )
    return Equality(len(names), len(names) - len(differing), differing, compared)


def digest(tokens: Sequence[int]) -> str:
    """A short hash of one sequence."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:12]


def digest_all(tokens: Tokens) -> str:
    """A hash of all sequences with their names."""
    lines = "\n".join(f"{name} {digest(tokens[name])}" for name in sorted(tokens))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


class TokenFile:
    """The tokens of many rows in one archive beside the results; a row's last entry counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, row: str, phases: Mapping[str, Tokens]) -> None:
        """Keep one row's tokens, by phase."""
        text = json.dumps({phase: dict(tokens) for phase, tokens in phases.items()})
        with zipfile.ZipFile(self._path, "a", zipfile.ZIP_DEFLATED) as archive:
            count = sum(name.startswith(f"{row}#") for name in archive.namelist())
            archive.writestr(f"{row}#{count:04d}.json", text)

    def read(self, row: str) -> dict[str, dict[str, list[int]]]:
        """One row's tokens, by phase; empty if there are none."""
        if not self._path.exists():
            return {}
        with zipfile.ZipFile(self._path) as archive:
            names = sorted(name for name in archive.namelist() if name.startswith(f"{row}#"))
            if not names:
                return {}
            found: dict[str, dict[str, list[int]]] = json.loads(archive.read(names[-1]))
            return found
