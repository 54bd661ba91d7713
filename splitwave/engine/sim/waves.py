"""Waves of a simulated group: it needs no coordinator, so a wave is just its work."""

from collections.abc import Sequence

from splitwave.core.wave_message import GroupState, RankReport, RankWork, StartReason, StartWave
from splitwave.core.wave_record import WAKE_BOUNDS_S, RankWave, WaveStatus
from splitwave.core.wave_segment import SEGMENT_MAX_S, WaveSegment, WaveSegments
from splitwave.core.worker import RankCounters


class SimWaves:
    """Told when the group begins and ends to step; cuts segments as a real group's do."""

    def __init__(self, epoch: int) -> None:
        self.segments = WaveSegments(epoch)
        self.ended: list[WaveSegment] = []
        self._epoch = epoch
        self._wave = 0
        self._number = 0
        self._cut_s = 0.0
        self._begun = 0

    def begin(self, counters: Sequence[RankCounters], now_s: float) -> None:
        """Some rank has work: all step from now on."""
        self._begun += 1
        self._report(counters, now_s, stepping=False)
        self.segments.on_start(StartWave(self._wave, StartReason.FIRST_REQUEST), now_s)
        self._report(counters, now_s, stepping=True)
        self._settle(GroupState.RUNNING, now_s)
        self._cut_s = now_s + SEGMENT_MAX_S

    def is_due(self, now_s: float) -> bool:
        """True if the segment has become so long that it is cut."""
        return now_s >= self._cut_s

    def cut(self, counters: Sequence[RankCounters], now_s: float) -> None:
        """A long segment ends, the wave goes on."""
        self._report(counters, now_s, stepping=True)
        self._settle(GroupState.RUNNING, now_s)
        self._cut_s = now_s + SEGMENT_MAX_S

    def end(self, counters: Sequence[RankCounters], now_s: float) -> None:
        """No rank has work any more."""
        self._wave += 1
        self._report(counters, now_s, stepping=False)
        self._settle(GroupState.PAUSED, now_s)

    def status(self, ranks: Sequence[tuple[RankCounters, int, int]]) -> WaveStatus:
        """The waves now; of each rank what it has counted, its requests, and those that wait."""
        stepping = self.segments.current is not None
        state = GroupState.RUNNING if stepping else GroupState.PAUSED
        why = StartReason.FIRST_REQUEST.value if self._begun else ""
        return WaveStatus(
            state=state.name.lower(),
            wave=self._wave,
            why=why,
            waves=self._begun,
            starts_by_why={why: self._begun} if why else {},
            wake_counts=[0] * (len(WAKE_BOUNDS_S) + 1),
            ranks=[
                RankWave(
                    rank=counted.rank,
                    wave=self._wave,
                    stepping=stepping,
                    waiting=waiting,
                    running=requests - waiting,
                    work=_work(counted),
                )
                for counted, requests, waiting in ranks
            ],
        )

    def close(self, now_s: float) -> None:
        """The group is gone."""
        self.ended += self.segments.end_epoch(self._epoch, now_s)

    def _settle(self, state: GroupState, now_s: float) -> None:
        self.ended += self.segments.settle(state, self._wave, now_s)

    def _report(self, counters: Sequence[RankCounters], now_s: float, *, stepping: bool) -> None:
        self._number += 1
        for rank in counters:
            report = RankReport(
                rank.rank, self._epoch, self._number, self._wave, stepping, work=_work(rank)
            )
            self.segments.on_report(report, now_s)


def _work(rank: RankCounters) -> RankWork:
    return RankWork(
        steps_by_kind=dict(rank.steps_by_kind),
        dummy_steps=rank.dummy_steps,
        tokens=rank.prefill_tokens_computed,
        padded_tokens=rank.prefill_tokens_computed,
    )
