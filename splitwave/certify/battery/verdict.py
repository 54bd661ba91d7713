"""What a check found, and whether that is good enough."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any  # JSON

from splitwave.core.strict_json import Scalar

Observed = dict[str, Any]
"""What a check saw, as JSON: kept in its state file, drawn in the report, judged by `judge`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that must not be so. `code` is what a positive control expects to see."""

    code: str
    words: str


@dataclass(slots=True)
class Verdict:
    """Figures with the bounds they were held against, and what is wrong with them."""

    figures: dict[str, Scalar] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def note(self, **figures: Scalar) -> None:
        """Add figures."""
        self.figures |= figures

    def require(self, holds: bool, code: str, words: str) -> None:
        """Add a problem unless `holds`."""
        if not holds:
            self.problems.append(Problem(code, words))

    def shows(self, code: str) -> bool:
        """True if this very problem was found."""
        return any(problem.code == code for problem in self.problems)

    def said(self) -> str:
        """All problems in one line."""
        return "; ".join(problem.words for problem in self.problems)


class CheckBroken(Exception):
    """A check could not be run to its end: neither passed nor failed, and no certificate."""


def figures_of(observed: Mapping[str, Any], *names: str) -> dict[str, Scalar]:
    """Those of the observations that are figures already."""
    return {name: observed[name] for name in names if name in observed}
