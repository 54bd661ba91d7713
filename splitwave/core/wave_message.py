"""The words of the wave protocol: what ranks report, and what the coordinator does about it."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class GroupState(enum.IntEnum):
    """What the coordinator holds of its group, from the last word of every rank."""

    PAUSED = 0
    """No work is known, and no rank has last said that it steps."""
    PAUSING = 1
    """A wave has ended, but some rank's last word, from before, is that it steps in it."""
    STARTING = 2
    """There is work, and not every rank has lately said that it steps in this wave."""
    RUNNING = 3
    """Every rank has said, and lately, that it steps in this wave."""
    HELD = 4
    """Every rank is paused by an operator and would discard a start."""
    ENDED = 5
    """A rank has died: nothing more comes of this epoch."""


class StartReason(enum.StrEnum):
    """Why a start was broadcast."""

    FIRST_REQUEST = "first_request"
    """A front-end sent a request to a group that it believed paused."""
    START_WAVE = "start_wave"
    """A rank was given a request of a wave that had already ended."""
    REPORT = "report"
    """A rank reported that it steps while others sleep."""
    WATCHDOG = "watchdog"
    """An earlier start, or some other message, must have been lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank has done since its start: counts that only grow."""

    steps_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Executed steps by step kind (`splitwave.core.mode.StepKind`), dummy steps included."""
    steps_by_size: Mapping[int, int] = field(default_factory=dict)
    """Those of captured or warmed-up sizes by their rows; empty where steps have any size."""
    dummy_steps: int = 0
    votes: int = 0
    """All-reduces on whether any rank still has work."""
    tokens: int = 0
    """Tokens computed for requests."""
    padded_tokens: int = 0
    """Tokens computed with padding to the largest rank's batch, dummy steps included."""


class RankReport(NamedTuple):
    """A rank's word on itself, sent at each change and as a heartbeat (`WaveSettings`)."""

    rank: int
    epoch: int
    """The rank's own: larger with every start of its process."""
    number: int
    """1, 2, 3, ... in the order of sending within the epoch; copies and late ones are dropped."""
    wave: int
    """The engine's `current_wave`: for a sleeping rank, the wave that would come next."""
    stepping: bool
    """True while it takes part in lock-steps, or would but for sleeping peers."""
    held: bool = False
    """True while it discards starts (`ignore_start_dp_wave`)."""
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """0.0 to 1.0."""
    work: RankWork | None = None


@dataclass(frozen=True, slots=True)
class StartWave:
    """Broadcast START_DP_WAVE with this wave and this excluded rank."""

    wave: int
    why: StartReason
    exclude: int | None = None
    """A rank that, by its own word, steps in a wave that has ended for the others.

    The start would reach it after that step, match its new wave and wake it alone,
    again and again. No other is excluded, as stock does with the rank that has the
    request: if that was aborted at once, it would sleep while its peers wait for it.
    """


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell every front-end the loads, the wave and whether the group runs."""

    counts: Sequence[tuple[int, int, float]]
    """(waiting, running, KV usage) of each rank."""
    wave: int
    running: bool


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The group is lost; whoever started it starts it again, with a larger epoch."""

    epoch: int
    reason: str


Effect = StartWave | Publish | EpochEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSettings:
    """Times of the protocol.

    The watchdog's bound holds whichever message is lost, counted from the last loss:
    the coordinator's own patience is shorter by the busy report interval, which may
    have to pass before it knows what it waits for.
    """

    watchdog_s: float = 0.25
    """How long work may wait on a paused rank, beside the network's delay."""
    report_busy_s: float = 0.1
    """Ranks: longest silence while stepping."""
    report_idle_s: float = 1.0
    """Ranks: time between two reports while asleep with nothing changed."""
    publish_min_s: float = 0.1
    """Shortest time between two publications of counts alone."""
    publish_max_s: float = 5.0
    """Longest time between two publications."""

    def __post_init__(self) -> None:
        """Refuse times that cannot hold the bound."""
        if not 0 < 2 * self.report_busy_s < self.watchdog_s:
            raise ValueError(
                f"report_busy_s: {self.report_busy_s} must be above 0 and below half of"
                f" watchdog_s, which is {self.watchdog_s}"
            )
        if not 0 < self.publish_min_s <= self.publish_max_s:
            raise ValueError(
                f"publish_min_s: {self.publish_min_s} must be above 0 and at most"
                f" publish_max_s, which is {self.publish_max_s}"
            )

    @property
    def doubt_s(self) -> float:
        """A report heard this long after a wave's end was sent after it."""
        return self.report_busy_s / 5

    @property
    def patience_s(self) -> float:
        """How long the coordinator waits before it broadcasts a start of one wave again."""
        return self.watchdog_s - self.report_busy_s - self.doubt_s

    @property
    def silence_s(self) -> float:
        """How long a rank's word that it steps holds: longer than one lost report."""
        return (2 * self.report_busy_s + self.watchdog_s) / 2
