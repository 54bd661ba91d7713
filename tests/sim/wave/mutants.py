"""Coordinators with one thing wrong each. The simulation must find every one of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from splitwave.core import wave
from splitwave.core.wave import WaveCoordinator
from splitwave.core.wave_message import (
    Effect,
    GroupState,
    Publish,
    RankReport,
    StartReason,
    StartWave,
    WaveSettings,
)
from tests.sim.wave.host import Coordinator
from tests.sim.wave.world import Make

Rank = wave._Rank  # noqa: SLF001  # mutants are at home there


class NoWatchdog(WaveCoordinator):
    """A start is broadcast once a wave, however many are lost."""

    def _watch(self, effects: list[Effect]) -> None:
        if self._started_wave != self.wave:
            super()._watch(effects)
        self._due_s = self._clock_s + self._patience_s


class PausedFlagIgnored(WaveCoordinator):
    """Whoever has ever been heard is taken to run once a start was sent."""

    def _pass(self, now_s: float) -> None:
        super()._pass(now_s)
        self._silence_s = 1e6

    def _is_awake(self, rank: Rank) -> bool:
        return self._started_wave == self.wave

    def _derive(self) -> GroupState:
        if self._started_wave == self.wave and all(rank.number for rank in self._ranks):
            return GroupState.RUNNING
        return super()._derive()

    def check(self) -> None:
        """It holds nothing."""


class AnyWordOfSteppingCounts(WaveCoordinator):
    """A report of stepping in an earlier wave passes for one of this wave."""

    def _is_awake(self, rank: Rank) -> bool:
        return self._clock_s < rank.heard_at_s + self._silence_s


class SilenceIsConsent(WaveCoordinator):
    """The word that a rank steps holds for ever."""

    def _pass(self, now_s: float) -> None:
        super()._pass(now_s)
        self._silence_s = 1e6


class EpochUnchecked(WaveCoordinator):
    """The words of a dead rank count."""

    def _known(self, index: int, epoch: int) -> Rank | None:
        if index < len(self._ranks) and epoch < self._ranks[index].epoch:
            return self._ranks[index]
        return super()._known(index, epoch)


class NewEpochUnnoticed(WaveCoordinator):
    """What was known of the old process is held of the new one."""

    def _known(self, index: int, epoch: int) -> Rank | None:
        if index >= len(self._ranks) or epoch < self._ranks[index].epoch:
            return None
        self._ranks[index].epoch = epoch
        return self._ranks[index]


class CopiesCount(WaveCoordinator):
    """Reports that were overtaken, or arrive twice, count as new."""

    def _is_new(self, rank: Rank, report: RankReport) -> bool:
        return True


class NoCoalescing(WaveCoordinator):
    """Every first request is a broadcast, as in stock."""

    def on_first_request(self, wave: int, now_s: float) -> list[Effect]:
        effects = super().on_first_request(wave, now_s)
        started = any(type(effect) is StartWave for effect in effects)
        if self.state is GroupState.STARTING and not started:
            effects.append(StartWave(self.wave, StartReason.FIRST_REQUEST))
        return effects


class LateFirstStart(WaveCoordinator):
    """Starts are gathered for a patience before the first is broadcast."""

    def _watch(self, effects: list[Effect]) -> None:
        if self._started_wave != self.wave and self._due_s is None:
            self._due_s = self._clock_s + self._patience_s
        elif self._due_s is None or self._due_s <= self._clock_s:
            super()._watch(effects)

    def check(self) -> None:
        """It holds nothing."""


class StartsUnheard(WaveCoordinator):
    """A rank's own notice that it runs in a new wave, and its reports of it, start nothing."""

    def _derive(self) -> GroupState:
        state = super()._derive()
        if state is GroupState.STARTING and self._announced is not StartReason.FIRST_REQUEST:
            return GroupState.PAUSED
        return state

    def check(self) -> None:
        """It holds nothing."""


class WaveFromRankZeroOnly(WaveCoordinator):
    """A wave that a report shows is not taken up; only wave_complete moves it."""

    def on_report(self, report: RankReport, now_s: float) -> list[Effect]:
        return super().on_report(report._replace(wave=min(report.wave, self.wave)), now_s)


class OldWaveAgain(WaveCoordinator):
    """wave_complete of an earlier wave sets the group back."""

    def on_wave_complete(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]:
        self.wave = min(self.wave, wave + 1)
        return super().on_wave_complete(rank, epoch, wave, now_s)

    def check(self) -> None:
        """It holds nothing."""


class ClockHeldBack(WaveCoordinator):
    """A clock that was set back stands still until it has caught up."""

    def _pass(self, now_s: float) -> None:
        if now_s > self._seen_s:
            self._clock_s += now_s - self._seen_s
            self._seen_s = now_s


class ExcludesTheRequester(WaveCoordinator):
    """Starts exclude a rank that was not left behind, as stock means to."""

    def _left_behind(self) -> int | None:
        return super()._left_behind() if self._due_s is None else 1


class ExcludesNobody(WaveCoordinator):
    """A rank left behind in an ended wave is sent the same start as all others."""

    def _watch(self, effects: list[Effect]) -> None:
        super()._watch(effects)
        effects[:] = [
            replace(effect, exclude=None) if isinstance(effect, StartWave) else effect
            for effect in effects
        ]


class HoldIgnored(WaveCoordinator):
    """Ranks that an operator holds are woken all the same."""

    def _derive(self) -> GroupState:
        state = super()._derive()
        return GroupState.STARTING if state is GroupState.HELD else state

    def check(self) -> None:
        """It holds nothing."""


class SizeForgotten(WaveCoordinator):
    """A group that shrinks is waited for as if it had not."""

    def on_resized(self, epochs: Sequence[int], now_s: float) -> list[Effect]:
        kept = [rank.epoch for rank in self._ranks[len(epochs) :]]
        return super().on_resized([*epochs, *kept], now_s)


class DeathUnnoticed(WaveCoordinator):
    """A rank's death changes nothing."""

    def on_rank_died(self, rank: int, epoch: int, reason: str, now_s: float) -> list[Effect]:
        return self.tick(now_s)


class PublishesOnce(WaveCoordinator):
    """A lost publication is never made good."""

    def _tell(self, effects: list[Effect]) -> None:
        super()._tell(effects)
        self._published_at_s = self._clock_s

    def wait_s(self) -> float:
        return max(0.0, self._due_s - self._clock_s) if self._due_s is not None else 5.0


class CountsKept(WaveCoordinator):
    """The loads of a rank that has gone are published on."""

    def _publish(self) -> Publish:
        publish = super()._publish()
        was = [*self.most, *[(0, 0, 0.0)] * self.ranks]
        self.most = [max(a, b) for a, b in zip(publish.counts, was, strict=False)]
        return replace(publish, counts=self.most or publish.counts)

    most: list[tuple[int, int, float]] = []  # noqa: RUF012  # replaced, never changed


class Mutant(NamedTuple):
    """A wrong coordinator, the first seed that shows it, and what it breaks then."""

    make: Make
    seed: int
    breaks: str


def _mutant(kind: type[WaveCoordinator], seed: int, breaks: str) -> Mutant:
    def make(ranks: int, epoch: int, now_s: float) -> Coordinator:
        return kind(ranks=ranks, epoch=epoch, now_s=now_s, settings=WaveSettings())

    return Mutant(make, seed, breaks)


MUTANTS = {
    "no_watchdog": _mutant(NoWatchdog, 3, "W1"),
    "paused_flag_ignored": _mutant(PausedFlagIgnored, 3, "W1"),
    "any_word_of_stepping_counts": _mutant(AnyWordOfSteppingCounts, 1, "W1"),
    "silence_is_consent": _mutant(SilenceIsConsent, 71, "W1"),
    "epoch_unchecked": _mutant(EpochUnchecked, 0, "W8"),
    "new_epoch_unnoticed": _mutant(NewEpochUnnoticed, 127, "W1"),
    "copies_count": _mutant(CopiesCount, 0, "W8"),
    "no_coalescing": _mutant(NoCoalescing, 0, "W6"),
    "late_first_start": _mutant(LateFirstStart, 0, "W7"),
    "starts_unheard": _mutant(StartsUnheard, 40, "W1"),
    "wave_from_rank_zero_only": _mutant(WaveFromRankZeroOnly, 3, "W1"),
    "old_wave_again": _mutant(OldWaveAgain, 410, "W2"),
    "clock_held_back": _mutant(ClockHeldBack, 2, "W3"),
    "excludes_the_requester": _mutant(ExcludesTheRequester, 1, "W1"),
    "excludes_nobody": _mutant(ExcludesNobody, 382, "W2"),
    "hold_ignored": _mutant(HoldIgnored, 59, "W6"),
    "size_forgotten": _mutant(SizeForgotten, 3, "W3"),
    "death_unnoticed": _mutant(DeathUnnoticed, 0, "W5"),
    "publishes_once": _mutant(PublishesOnce, 187, "W3"),
    "counts_kept": _mutant(CountsKept, 0, "W3"),
}
