"""What a hammer's run amounts to: where each rank was, who is stuck, and the one verdict."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Verdict(enum.StrEnum):
    """How a run ended."""

    PASSED = enum.auto()
    WRONG_ROWS = enum.auto()
    HANG = enum.auto()
    FAULT = enum.auto()
    SETUP = enum.auto()
    SHORT = enum.auto()


EXIT_CODE = {
    Verdict.PASSED: 0,
    Verdict.WRONG_ROWS: 1,
    Verdict.HANG: 2,
    Verdict.FAULT: 3,
    Verdict.SETUP: 4,
    Verdict.SHORT: 5,
}
"""Of the hammer's program, and of each of its ranks. SHORT: nothing wrong in too few replays."""


class Phase(enum.StrEnum):
    """What a rank is doing."""

    START = enum.auto()
    BUFFERS = enum.auto()
    WARM = enum.auto()
    CAPTURE = enum.auto()
    REPLAY = enum.auto()
    DONE = enum.auto()


SETUP_PHASES = {Phase.START, Phase.BUFFERS, Phase.WARM, Phase.CAPTURE}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank was when it last said so.

    `issued` replays were given to the GPU and it finished `finished` of them; `size` is the rows
    of the graph issued last, or of the one being warmed or captured. `marks` are the last points
    that the GPU passed in a graph, one a microbatch, such as "layer 2 dispatched".
    """

    phase: Phase = Phase.START
    issued: int = 0
    finished: int = 0
    size: int = 0
    marks: tuple[str, ...] = ()

    def progress(self) -> tuple[object, ...]:
        """Return what changes while a rank is alive in the sense that counts."""
        return (self.phase, self.issued, self.finished, self.size)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in seconds: of setting up, of a standstill while replaying, of the replays."""

    setup_s: float
    stall_s: float
    replay_s: float


@dataclass(slots=True)
class Watch:
    """Tells from the ranks' positions whether one stands still.

    The replays' own time is kept by the ranks, who agree on when to stop; the watch allows them
    one more standstill to do so.
    """

    limits: Limits
    began_s: float
    _changed_s: dict[int, float] = field(default_factory=dict)
    _progress: dict[int, tuple[object, ...]] = field(default_factory=dict)
    _replaying_s: float | None = None

    def see(self, rank: int, position: Position, now_s: float) -> None:
        """Take a rank's position; repeats change nothing."""
        if self._progress.get(rank) != position.progress():
            self._progress[rank] = position.progress()
            self._changed_s[rank] = now_s
        if position.phase is Phase.REPLAY and self._replaying_s is None:
            self._replaying_s = now_s

    def overdue(self, now_s: float) -> str:
        """Return why the run must be ended now, or an empty text."""
        if self._replaying_s is None:
            late_s = now_s - self.began_s - self.limits.setup_s
            return "" if late_s < 0 else f"not ready after {self.limits.setup_s:.0f} s"
        if now_s - self._replaying_s > self.limits.replay_s + self.limits.stall_s:
            return f"still replaying {self.limits.stall_s:.0f} s after the time for it"
        still = {
            rank: now_s - since_s
            for rank, since_s in self._changed_s.items()
            if self._progress[rank][0] is not Phase.DONE and now_s - since_s > self.limits.stall_s
        }
        return ", ".join(f"rank {r} stood still for {s:.1f} s" for r, s in sorted(still.items()))


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank's process ended, and when; `code` is None for one that had to be killed."""

    rank: int
    code: int | None
    position: Position
    ended_s: float = 0.0
    found: Mapping[str, object] = field(default_factory=dict)
    """What the rank reported: `error` of a fault, `wrong` of wrong rows, figures."""
    log: Sequence[str] = ()


GRAVEST = (Verdict.WRONG_ROWS, Verdict.FAULT, Verdict.SETUP)
"""Of ranks that broke at the same moment: a peer's loss shows as a fault, never as wrong rows."""


def judge(ends: Sequence[RankEnd], overdue: str) -> tuple[Verdict, str]:
    """Return the verdict and the sentence that says why.

    One broken rank leaves the others waiting or takes them along, so that the first to break is
    the cause, and what a rank did outweighs a standstill.
    """
    broken = sorted(
        (end for end in ends if _of_rank(end) in GRAVEST),
        key=lambda end: (end.ended_s, GRAVEST.index(_of_rank(end))),
    )
    if broken:
        return _of_rank(broken[0]), "; ".join(f"rank {end.rank}: {_why(end)}" for end in broken)
    if overdue or any(end.code is None for end in ends):
        replaying = any(end.position.phase not in SETUP_PHASES for end in ends)
        why = overdue or "a rank did not end by itself"
        return (Verdict.HANG if replaying else Verdict.SETUP), why
    if any(_of_rank(end) is Verdict.SHORT for end in ends):
        return Verdict.SHORT, "the time was over before the replays were"
    return Verdict.PASSED, "every replay ran and every row was right"


def _of_rank(end: RankEnd) -> Verdict:
    """Return what a rank's own end says; HANG for one that had to be killed."""
    if end.code is None:
        return Verdict.HANG
    own = {EXIT_CODE[v]: v for v in (Verdict.PASSED, Verdict.WRONG_ROWS, Verdict.SHORT)}
    if end.code in own:
        return own[end.code]
    return Verdict.SETUP if end.position.phase in SETUP_PHASES else Verdict.FAULT


def _why(end: RankEnd) -> str:
    if end.code is not None and end.code < 0:
        return f"killed by signal {-end.code}"
    said = end.found.get("error") or end.found.get("wrong")
    return str(said or f"ended with code {end.code}")


def same_place(positions: Sequence[Position]) -> str:
    """Say whether the ranks are stuck in the same replay or in different ones."""
    places = {(p.finished, p.marks) for p in positions}
    if len(places) == 1:
        return "all ranks stopped at the same point of the same replay"
    if len({p.finished for p in positions}) == 1:
        return "the ranks stopped at different points of the same replay"
    return "the ranks stopped in different replays"
