"""What is kept of waves for people and metrics."""

from splitwave.core.wave_message import RankReport, RankWork, StartReason, StartWave
from splitwave.core.wave_record import WAKE_BOUNDS_S, WaveRecord


def report(rank: int, wave: int, *, stepping: bool) -> RankReport:
    work = RankWork(steps_by_kind={"eager": 3}, dummy_steps=1, tokens=5, padded_tokens=9)
    return RankReport(rank, 1, 1, wave, stepping, waiting=2, running=3, work=work)


def test_a_wake_is_timed_from_the_start_to_the_rank_s_word_that_it_steps() -> None:
    record = WaveRecord(2)

    record.on_start(StartWave(4, StartReason.FIRST_REQUEST), 10.0)
    record.on_report(report(0, 4, stepping=True), 10.02)
    record.on_start(StartWave(4, StartReason.WATCHDOG), 10.15)
    record.on_report(report(1, 4, stepping=True), 10.2)
    record.on_report(report(1, 4, stepping=True), 10.3)

    assert [round(rank.wake_s, 6) for rank in record.ranks(11.0)] == [0.02, 0.2]
    assert dict(zip((*WAKE_BOUNDS_S, 9.9), record.wake_counts, strict=True))[0.025] == 1
    assert sum(record.wake_counts) == 2
    assert record.waves == 1
    assert record.starts_by_why == {StartReason.FIRST_REQUEST: 1, StartReason.WATCHDOG: 1}


def test_a_rank_that_stepped_before_the_start_was_not_woken_by_it() -> None:
    record = WaveRecord(2)

    record.on_report(report(0, 4, stepping=True), 9.9)
    record.on_report(report(1, 3, stepping=True), 9.9)  # Of the wave before.
    record.on_start(StartWave(4, StartReason.REPORT), 10.0)
    record.on_report(report(0, 4, stepping=True), 10.01)
    record.on_report(report(1, 4, stepping=False), 10.01)

    assert record.wake_counts == [0] * (len(WAKE_BOUNDS_S) + 1)


def test_ranks_are_as_they_were_last_heard_of() -> None:
    record = WaveRecord(1)
    record.on_report(report(0, 4, stepping=False), 9.0)
    record.resize(2)

    first, second = record.ranks(9.5)

    assert (first.wave, first.waiting, first.running, first.silence_s) == (4, 2, 3, 0.5)
    assert first.work.padded_tokens - first.work.tokens == 4
    assert second.silence_s < 0
    assert record.loads() == [(2, 3), (0, 0)]
    assert record.work()[1] == RankWork()
