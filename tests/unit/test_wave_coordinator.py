"""The wave coordinator, message by message."""

import math

import pytest

from splitwave.core.wave import WaveCoordinator
from splitwave.core.wave_message import (
    Effect,
    EpochEnded,
    GroupState,
    Publish,
    RankReport,
    StartReason,
    StartWave,
    WaveSettings,
)

PATIENCE_S = WaveSettings().patience_s


class Group:
    """A coordinator of three ranks, and the numbers of their reports."""

    def __init__(self) -> None:
        self.core = WaveCoordinator(ranks=3, epoch=1, now_s=0.0)
        self.numbers = [0, 0, 0]
        for rank in range(3):
            self.say(rank, 0, 0.0)

    def say(
        self, rank: int, wave: int, now_s: float, *, stepping: bool = False, held: bool = False
    ) -> list[Effect]:
        self.numbers[rank] += 1
        report = RankReport(rank, 1, self.numbers[rank], wave, stepping, held)
        effects = self.core.on_report(report, now_s)
        self.core.check()
        return effects

    def run(self, wave: int, now_s: float) -> None:
        self.core.on_first_request(wave, now_s)
        for rank in range(3):
            self.say(rank, wave, now_s, stepping=True)
        assert self.core.state is GroupState.RUNNING


def starts(effects: list[Effect]) -> list[StartWave]:
    return [effect for effect in effects if isinstance(effect, StartWave)]


def test_the_first_request_of_a_paused_group_is_broadcast_at_once() -> None:
    group = Group()

    effects = group.core.on_first_request(0, 1.0)

    assert effects[0] == StartWave(0, StartReason.FIRST_REQUEST)
    assert group.core.state is GroupState.STARTING


def test_63_more_requests_within_5_ms_are_broadcast_no_more() -> None:
    group = Group()
    group.core.on_first_request(0, 1.0)

    for i in range(63):
        assert starts(group.core.on_first_request(0, 1.0 + i * 8e-5)) == []

    assert group.core.starts == 1


def test_a_start_is_repeated_until_every_rank_has_said_that_it_steps() -> None:
    group = Group()
    group.core.on_first_request(0, 1.0)
    group.say(0, 0, 1.001, stepping=True)
    group.say(1, 0, 1.001, stepping=True)
    assert group.core.wait_s() <= PATIENCE_S

    assert starts(group.core.tick(1.0 + PATIENCE_S - 0.001)) == []
    assert starts(group.core.tick(1.0 + PATIENCE_S)) == [StartWave(0, StartReason.WATCHDOG)]
    group.say(2, 0, 1.2, stepping=True)

    assert group.core.state is GroupState.RUNNING
    assert starts(group.core.tick(1.22)) == []


def test_a_report_alone_starts_the_others() -> None:
    group = Group()

    assert starts(group.say(1, 0, 1.0, stepping=True)) == [StartWave(0, StartReason.REPORT)]


def test_a_rank_that_runs_in_a_wave_beyond_the_known_one_takes_the_group_there() -> None:
    group = Group()

    effects = group.core.on_start_wave(2, 1, 4, 1.0)

    assert starts(effects) == [StartWave(4, StartReason.START_WAVE)]


def test_the_end_of_a_wave_is_published_at_once_and_told_only_once() -> None:
    group = Group()
    group.run(0, 1.0)

    first = group.core.on_wave_complete(0, 1, 0, 1.1)
    again = group.core.on_wave_complete(0, 1, 0, 1.11)

    assert first == [Publish([(0, 0, 0.0)] * 3, 1, False)]
    assert again == []
    assert group.core.state is GroupState.PAUSING


def test_a_silent_rank_is_doubted_and_the_wave_started_again() -> None:
    group = Group()
    group.run(0, 1.0)
    group.say(0, 0, 1.2, stepping=True)
    group.say(1, 0, 1.2, stepping=True)

    effects = group.core.tick(1.0 + WaveSettings().silence_s)

    assert starts(effects) == [StartWave(0, StartReason.WATCHDOG)]
    assert group.core.state is GroupState.STARTING


def test_a_rank_that_goes_on_in_an_ended_wave_is_excluded_from_the_start_that_it_needs() -> None:
    group = Group()
    group.run(0, 1.0)
    group.say(0, 1, 1.1)
    group.say(1, 1, 1.1)

    in_flight = group.say(2, 0, 1.11, stepping=True)
    proof = group.say(2, 0, 1.2, stepping=True)

    assert starts(in_flight) == []
    assert starts(proof) == [StartWave(1, StartReason.WATCHDOG, exclude=2)]


def test_held_ranks_are_not_woken_and_front_ends_are_told() -> None:
    group = Group()
    for rank in range(3):
        group.say(rank, 1, 1.0, held=True)
    assert group.core.state is GroupState.HELD

    effects = group.core.on_first_request(1, 2.0)

    assert effects == [Publish([(0, 0, 0.0)] * 3, 1, False)]


def test_words_of_a_dead_process_change_nothing() -> None:
    group = Group()
    group.core.on_rank_started(1, 2, 1.0)

    effects = group.core.on_report(RankReport(1, 1, 99, 7, stepping=True), 1.01)

    assert starts(effects) == []
    assert group.core.wave == 0


def test_copies_and_overtaken_reports_change_nothing() -> None:
    group = Group()
    group.run(0, 1.0)
    old = RankReport(0, 1, 1, 0, stepping=False)

    group.core.on_report(old, 1.01)

    assert group.core.state is GroupState.RUNNING


def test_a_death_ends_the_epoch_with_its_reason_once() -> None:
    group = Group()

    effects = group.core.on_rank_died(2, 1, "killed by SIGKILL", 1.0)

    assert effects[0] == EpochEnded(1, "rank 2: killed by SIGKILL")
    assert group.core.on_rank_died(1, 1, "exited", 1.0) == []
    assert group.core.wait_s() == math.inf
    assert group.core.on_first_request(0, 1.1) == []


def test_a_restarted_group_goes_on_with_the_next_wave() -> None:
    group = Group()
    group.run(3, 1.0)
    group.core.on_rank_died(0, 1, "exited", 1.1)

    group.core.on_restarted(ranks=2, epoch=2, now_s=2.0)

    assert (group.core.wave, group.core.state, group.core.ranks) == (4, GroupState.PAUSED, 2)
    assert starts(group.core.on_first_request(0, 2.1)) == [StartWave(4, StartReason.FIRST_REQUEST)]


def test_a_rank_that_joins_a_running_group_is_started_too() -> None:
    group = Group()
    group.run(0, 1.0)

    grown = group.core.on_resized([1, 1, 1, 2], 1.2)

    assert starts(grown) == [StartWave(0, StartReason.WATCHDOG)]
    group.core.on_resized([1, 1], 1.21)
    assert group.core.ranks == 2


def test_a_clock_that_is_set_back_does_not_stop_the_watchdog() -> None:
    group = Group()
    group.core.on_first_request(0, 1_000.0)

    group.core.tick(1.0)

    assert starts(group.core.tick(1.0 + PATIENCE_S)) == [StartWave(0, StartReason.WATCHDOG)]


def test_an_idle_group_publishes_every_five_seconds_and_starts_nothing() -> None:
    group = Group()
    group.core.tick(1.0)

    assert group.core.wait_s() == pytest.approx(4.0)
    assert group.core.tick(4.9) == []
    assert group.core.tick(5.0) == [Publish([(0, 0, 0.0)] * 3, 0, False)]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"report_busy_s": 0.2}, "report_busy_s"),
        ({"report_busy_s": 0.0}, "report_busy_s"),
        ({"publish_min_s": 9.0}, "publish_min_s"),
    ],
)
def test_times_that_cannot_hold_the_bound_are_refused(wrong: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WaveSettings(**wrong)
