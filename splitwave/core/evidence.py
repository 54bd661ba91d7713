"""What a certificate's battery found: each check with its figures and its positive control."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.mode import Mode
from splitwave.core.strict_json import Fields, JsonError, Scalar


class Level(enum.StrEnum):
    """How much was proved."""

    SMOKE = "smoke"
    """Enough for one's own machine; seconds."""
    FULL = "full"
    """The whole battery; what routers demand."""

    def reaches(self, wanted: "Level") -> bool:
        """True if this level is at least `wanted`."""
        return self is Level.FULL or wanted is Level.SMOKE


class Check(enum.StrEnum):
    """The checks of the battery, in the order in which they run."""

    ORACLE = "oracle"
    """Tokens equal an eager oracle's; log probabilities within a bound."""
    TWO_BOOTS = "two_boots"
    """Two boots give the same tokens and the same fingerprint."""
    PADDING_POISON = "padding_poison"
    """Poisoned padding rows change nothing. Modes that pad."""
    GRID = "grid"
    """Every captured or warmed-up size runs in every order. Modes with a grid."""
    RAGGED_HAMMER = "ragged_hammer"
    """Ranks walk through sizes independently and skewed. Groups that step in lock-step."""
    WAVE_STORM = "wave_storm"
    """Waves begin and end as fast as they can. Groups that step in lock-step."""
    ABORT_STORM = "abort_storm"
    """Requests are aborted at every point; nothing stays held."""
    SOAK = "soak"
    """Steady load: no step outside the mode, bounded drift, flat memory."""
    REPEATED_LARGE = "repeated_large"
    """The n-th large request is no slower than the second."""
    OVER_ENVELOPE = "over_envelope"
    """Work outside the envelope is refused, and no step runs for it."""
    ACCURACY = "accuracy"
    """A task scored through the gateway agrees with the aggregated run, item by item."""


SMOKE_CHECKS = frozenset({Check.ORACLE, Check.GRID, Check.ABORT_STORM, Check.OVER_ENVELOPE})
"""What fits into 60 CPU-seconds."""


def required_checks(
    mode: Mode, level: Level, *, ranks: int, steps_together: bool = True
) -> tuple[Check, ...]:
    """The checks that a certificate must hold, in order.

    Left out are those about what the mode or group does not have: padding, a grid, lock-step.
    Ranks of a dense model share nothing, so each steps by itself: `steps_together` is False.
    """
    absent = set()
    if not mode.has_grid:
        absent |= {Check.PADDING_POISON, Check.GRID}
    if ranks < 2 or not steps_together:
        absent |= {Check.WAVE_STORM, Check.RAGGED_HAMMER}
    wanted = SMOKE_CHECKS if level is Level.SMOKE else frozenset(Check)
    return tuple(check for check in Check if check in wanted - absent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A positive control: the check run against a variant that was broken on purpose."""

    broken: str
    """What was broken, in words."""
    was_caught: bool
    """True if the check failed, as it must."""
    figures: Mapping[str, Scalar] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The control as plain values."""
        return {
            "broken": self.broken,
            "was_caught": self.was_caught,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one check found. `control` is None if its control did not run."""

    check: str
    """A name of `Check`."""
    passed: bool
    seconds: float
    """Wall time of the check, its control included."""
    replays: int
    """Steps that ran for it, all ranks together."""
    figures: Mapping[str, Scalar] = field(default_factory=dict)
    """What was measured and the bounds it was held against; names end in their units."""
    control: Control | None = None

    def to_json(self) -> dict[str, object]:
        """The evidence as plain values."""
        return {
            "check": self.check,
            "passed": self.passed,
            "seconds": self.seconds,
            "replays": self.replays,
            "figures": dict(self.figures),
            "control": None if self.control is None else self.control.to_json(),
        }


def read_evidence(value: object, where: str) -> Evidence:
    """The inverse of `to_json`; JsonError names the field that is wrong, missing or unknown."""
    found = Fields(value, where)
    control = found.take("control")
    evidence = Evidence(
        check=found.text("check"),
        passed=found.truth("passed"),
        seconds=found.number("seconds"),
        replays=found.whole("replays"),
        figures=found.scalars("figures"),
        control=None if control is None else _read_control(control, found.name_of("control")),
    )
    found.end()
    if evidence.check not in set(Check):
        raise JsonError(f"{where}.check: {evidence.check!r} is no check of the battery")
    return evidence


def _read_control(value: object, where: str) -> Control:
    found = Fields(value, where)
    control = Control(
        broken=found.text("broken"),
        was_caught=found.truth("was_caught"),
        figures=found.scalars("figures"),
    )
    found.end()
    return control


class Flaw(enum.StrEnum):
    """What is wrong with evidence."""

    CHECK_MISSING = "check_missing"
    CHECK_REPEATED = "check_repeated"
    CHECK_FAILED = "check_failed"
    CHECK_EMPTY = "check_empty"
    CONTROL_MISSING = "control_missing"
    CONTROL_NOT_CAUGHT = "control_not_caught"


def first_flaw(
    evidence: Sequence[Evidence], required: Sequence[Check]
) -> tuple[Flaw, str, str] | None:
    """What keeps evidence from proving anything: the flaw, the check and words; None if nothing.

    Checks beyond the required ones may be there; they count like the others.
    """
    names = [item.check for item in evidence]
    for check in required:
        if check not in names:
            return Flaw.CHECK_MISSING, check, "is required and did not run"
    for item in evidence:
        if (flaw := _flaw_of(item, names)) is not None:
            return flaw[0], item.check, flaw[1]
    return None


def _flaw_of(item: Evidence, names: Sequence[str]) -> tuple[Flaw, str] | None:
    if names.count(item.check) > 1:
        return Flaw.CHECK_REPEATED, "stands there more than once"
    if not item.passed:
        return Flaw.CHECK_FAILED, "failed"
    if item.replays < 1:
        return Flaw.CHECK_EMPTY, "ran no step, so it proves nothing"
    if item.control is None:
        return Flaw.CONTROL_MISSING, "has no positive control: nobody knows whether it can fail"
    if not item.control.was_caught:
        words = f"did not notice its positive control ({item.control.broken})"
        return Flaw.CONTROL_NOT_CAUGHT, words
    return None
