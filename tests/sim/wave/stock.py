"""Stock vLLM 0.32's coordinator, as a control: the simulation must catch what it does wrong."""

from collections.abc import Sequence

from splitwave.core.wave_message import (
    Effect,
    EpochEnded,
    GroupState,
    Publish,
    RankReport,
    StartReason,
    StartWave,
)


class StockCoordinator:
    """Statement by statement `DPCoordinatorProc.process_input_socket`, without its sockets.

    It knows no epochs and no paused flags: of a report it takes the counts, which
    stock engines send as scheduler statistics. It is told of a death only so that
    restarts can be simulated.
    """

    def __init__(self, *, ranks: int, epoch: int, now_s: float) -> None:
        self.wave = 0
        self.state = GroupState.PAUSED
        self.epoch = epoch
        self.counts = [(0, 0)] * ranks
        self.stats_changed = False
        self.now_s = now_s
        self.published_at_s = now_s

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.counts)

    @property
    def loads(self) -> list[tuple[int, int, float]]:
        """Counts by rank."""
        return [(waiting, running, 0.0) for waiting, running in self.counts]

    def on_first_request(self, wave: int, now_s: float) -> list[Effect]:
        """Each one is a broadcast while the group is not known to run."""
        self.now_s = now_s
        if self.state is GroupState.RUNNING:
            return []
        return [StartWave(self.wave, StartReason.FIRST_REQUEST)]

    def on_report(self, report: RankReport, now_s: float) -> list[Effect]:
        """Counts, and nothing else; engines send them when they change, and never while held."""
        self.now_s = now_s
        counts = (report.waiting, report.running)
        if report.rank < len(self.counts) and not report.held:
            self.stats_changed |= self.counts[report.rank] != counts
            self.counts[report.rank] = counts
        return self.tick(now_s)

    def on_start_wave(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]:
        """An engine runs: so do the others, once they have the broadcast."""
        self.now_s = now_s
        if wave < self.wave or (wave == self.wave and self.state is GroupState.RUNNING):
            return []
        self.wave = wave
        self.state = GroupState.RUNNING
        return [StartWave(wave, StartReason.START_WAVE, rank), self.publish()]

    def on_wave_complete(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]:
        """The group has paused."""
        self.now_s = now_s
        if wave < self.wave:
            return []
        self.wave = wave + 1
        self.state = GroupState.PAUSED
        return [self.publish()]

    def on_rank_started(self, rank: int, epoch: int, now_s: float) -> list[Effect]:
        """It does not notice."""
        return []

    def on_rank_died(self, rank: int, epoch: int, reason: str, now_s: float) -> list[Effect]:
        """What restarts the group also restarts the coordinator."""
        return [EpochEnded(self.epoch, reason)]

    def on_resized(self, epochs: Sequence[int], now_s: float) -> list[Effect]:
        """SCALE_ELASTIC_EP."""
        self.counts = [*self.counts, *[(0, 0)] * len(epochs)][: len(epochs)]
        return []

    def on_restarted(self, *, ranks: int, epoch: int, now_s: float) -> list[Effect]:
        """A new coordinator."""
        self.epoch = epoch
        self.wave = 0
        self.state = GroupState.PAUSED
        self.counts = [(0, 0)] * ranks
        self.now_s = now_s
        return [self.publish()]

    def tick(self, now_s: float) -> list[Effect]:
        """Publish what has changed, or everything after five seconds."""
        self.now_s = now_s
        return [self.publish()] if self.wait_s() <= 0.0 else []

    def wait_s(self) -> float:
        """Until the next publication."""
        silence_s = 0.1 if self.stats_changed else 5.0
        return max(0.0, self.published_at_s + silence_s - self.now_s)

    def publish(self) -> Publish:
        """Counts, wave and flag."""
        self.published_at_s = self.now_s
        self.stats_changed = False
        return Publish(self.loads, self.wave, self.state is GroupState.RUNNING)

    def check(self) -> None:
        """It promises nothing."""


def stock(ranks: int, epoch: int, now_s: float) -> StockCoordinator:
    """The coordinator of stock vLLM."""
    return StockCoordinator(ranks=ranks, epoch=epoch, now_s=now_s)
