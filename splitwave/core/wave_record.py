"""What is kept of a group's waves for people and metrics. Decides nothing."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.grant_reports import RankLoad
from splitwave.core.wave_message import RankReport, RankWork, StartWave

WAKE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Bounds of the buckets that wake latencies are counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWave:
    """One rank, by its last report."""

    rank: int
    wave: int = 0
    stepping: bool = False
    held: bool = False
    """It discards starts, since an operator has paused it."""
    waiting: int = 0
    running: int = 0
    work: RankWork = field(default_factory=RankWork)
    silence_s: float = 0.0
    """Since its last report; negative if there was none."""
    wake_s: float = 0.0
    """From the last start that woke it to its report that it steps; 0 if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveStatus:
    """The waves of one group, now. `wake_counts` has a bucket more than `WAKE_BOUNDS_S`."""

    state: str
    """Name of a `GroupState`, in small letters."""
    wave: int
    why: str = ""
    """Why the last start was broadcast (`StartReason`); empty before the first."""
    waves: int = 0
    """Waves that were started."""
    starts_by_why: Mapping[str, int] = field(default_factory=dict)
    """Broadcasts, repeated ones included."""
    messages: int = 0
    """That the coordinator has been sent."""
    wake_counts: Sequence[int] = ()
    wake_total_s: float = 0.0
    ranks: Sequence[RankWave] = ()


class WaveRecord:
    """Counts starts and wake latencies, and remembers each rank's last report.

    A rank that said it stepped before the start was not woken by it.
    """

    def __init__(self, ranks: int) -> None:
        self.waves = 0
        self.starts_by_why: Counter[str] = Counter()
        self.messages = 0
        self.wake_counts = [0] * (len(WAKE_BOUNDS_S) + 1)
        self.wake_total_s = 0.0
        self.heard_at_s: list[float | None] = [None] * ranks
        self._reports: list[RankReport | None] = [None] * ranks
        self._wake_s = [0.0] * ranks
        self._wave = -1
        self._began_s = 0.0
        self._asleep: set[int] = set()

    def resize(self, ranks: int) -> None:
        """The group has grown or shrunk."""
        self.heard_at_s = (self.heard_at_s + [None] * ranks)[:ranks]
        self._reports = (self._reports + [None] * ranks)[:ranks]
        self._wake_s = (self._wake_s + [0.0] * ranks)[:ranks]

    def on_start(self, start: StartWave, now_s: float) -> None:
        """A start is broadcast. The latency of a repeated one counts from the first."""
        self.starts_by_why[start.why] += 1
        if start.wave == self._wave:
            return
        self.waves += 1
        self._wave, self._began_s = start.wave, now_s
        self._asleep = {
            rank
            for rank, report in enumerate(self._reports)
            if report is None or not (report.stepping and report.wave >= start.wave)
        }

    def on_report(self, report: RankReport, now_s: float) -> None:
        """A rank has spoken."""
        rank = report.rank
        self.heard_at_s[rank] = now_s
        self._reports[rank] = report
        if report.stepping and report.wave == self._wave and rank in self._asleep:
            self._asleep.remove(rank)
            wake_s = self._wake_s[rank] = now_s - self._began_s
            self.wake_counts[bisect_left(WAKE_BOUNDS_S, wake_s)] += 1
            self.wake_total_s += wake_s

    def loads(self) -> list[tuple[int, int]]:
        """Requests that wait and that run on each rank, by its own word."""
        return [(r.waiting, r.running) if r else (0, 0) for r in self._reports]

    def rank_loads(self, blocks_per_rank: int) -> list[RankLoad]:
        """What each rank holds, by its own word."""
        return [
            RankLoad(
                rank=report.rank,
                requests=report.waiting + report.running,
                blocks=round(report.kv_usage * blocks_per_rank),
                said_s=heard_at_s,
            )
            for report, heard_at_s in zip(self._reports, self.heard_at_s, strict=True)
            if report is not None and heard_at_s is not None
        ]

    def work(self) -> list[RankWork]:
        """What each rank has computed, by its own word."""
        return [r.work if r and r.work else RankWork() for r in self._reports]

    def ranks(self, now_s: float) -> tuple[RankWave, ...]:
        """Every rank as it was last heard of."""
        return tuple(self._rank(rank, now_s) for rank in range(len(self._reports)))

    def _rank(self, rank: int, now_s: float) -> RankWave:
        report, heard_at_s = self._reports[rank], self.heard_at_s[rank]
        if report is None or heard_at_s is None:
            return RankWave(rank=rank, silence_s=-1.0)
        return RankWave(
            rank=rank,
            wave=report.wave,
            stepping=report.stepping,
            held=report.held,
            waiting=report.waiting,
            running=report.running,
            work=report.work or RankWork(),
            silence_s=now_s - heard_at_s,
            wake_s=self._wake_s[rank],
        )
