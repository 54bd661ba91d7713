"""The wedge watch: a device that fails, ranks that bear witness, ends that nothing prevents."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from splitwave.engine.vllm.worst_token import wedge
from splitwave.engine.vllm.worst_token.collectives import CollectiveLog, diagnose

NOTHING = [0, 0, 0, 0]


def waiting(phase: str = "agree") -> CollectiveLog:
    """Log of a rank that has waited for long."""
    log = CollectiveLog()
    log.enter(phase, -1e6)
    return log


def watch(log: CollectiveLog) -> wedge.WedgeWatch:
    return wedge.WedgeWatch(log, lambda: NOTHING, timeout_s=10.0)


def place(directory: Path, rank: int = 0) -> wedge.Place:
    return wedge.Place(rank=rank, ranks=2, directory=directory)


def never(_seconds: float) -> None:
    """Pass no time."""


def test_a_device_that_fails_is_asked_no_more_and_its_last_counts_stay() -> None:
    answers = iter([[1, 0, 0, 0], [2, 1, 0, 0]])

    def read() -> list[int]:
        try:
            return next(answers)
        except StopIteration:
            raise RuntimeError("an illegal memory access was encountered") from None

    latest = wedge.Latest(read)
    assert latest.counts() == [1, 0, 0, 0]
    latest.run(never)

    assert latest.counts() == [2, 1, 0, 0]
    assert latest.failure == "RuntimeError: an illegal memory access was encountered"


def test_a_call_that_never_returns_keeps_nobody_from_judging() -> None:
    asked, go_on = threading.Event(), threading.Event()
    answers = iter([NOTHING, [9, 9, 9, 9]])

    def read() -> list[int]:
        found = next(answers)
        if found is not NOTHING:
            asked.set()
            go_on.wait(10.0)
            raise RuntimeError("over")
        return found

    log = CollectiveLog()
    log.launched("dispatch")
    latest = wedge.Latest(read)
    thread = threading.Thread(target=latest.run, args=(never,))
    thread.start()
    assert asked.wait(10.0)

    judge = wedge.WedgeWatch(log, latest.counts, timeout_s=10.0)
    assert judge.look(0.0) is None
    assert judge.look(10.0) is not None
    go_on.set()
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_clock_may_begin_at_zero() -> None:
    log = CollectiveLog()
    log.launched("dispatch")
    judge = watch(log)

    assert [judge.look(now_s) is not None for now_s in (0.0, 5.0, 10.0)] == [False, False, True]


def test_device_counts_that_are_switched_off_leave_the_phases_watched() -> None:
    log = CollectiveLog()
    log.launched("dispatch")
    judge = wedge.WedgeWatch(log, lambda: NOTHING, timeout_s=10.0, counts=False)
    assert judge.look(0.0) is None
    assert judge.look(1000.0) is None

    log.enter("vote", 1000.0)
    assert judge.look(1010.0) is not None


@pytest.mark.parametrize("phase", ["idle", "launch"])
def test_a_rank_that_waits_for_nobody_is_left_alone(phase: str) -> None:
    assert watch(waiting(phase)).look(0.0) is None


def test_a_rank_bears_witness_once_another_is_wedged_and_lives_on(tmp_path: Path) -> None:
    log = CollectiveLog()
    log.step("full", 64)
    turns: list[set[int]] = []

    def sleep(_seconds: float) -> None:
        turns.append(set(wedge.read_reports(tmp_path)))
        if len(turns) == 2:
            wedge.write_report(tmp_path, 1, waiting().report({}, 0.0))
        if len(turns) == 5:
            log.enter("agree", -1e6)

    ended: list[int] = []
    wedge.run(watch(log), place(tmp_path), end=ended.append, sleep=sleep)

    assert turns[:5] == [set(), set(), {0, 1}, {0, 1}, {0, 1}]
    assert ended == [wedge.EXIT_CODE]


def test_reports_of_an_earlier_life_are_no_reason_to_bear_witness(tmp_path: Path) -> None:
    for rank in (0, 1):
        wedge.write_report(tmp_path, rank, waiting().report({}, 0.0))
    log = CollectiveLog()
    turns: list[set[int]] = []

    def sleep(_seconds: float) -> None:
        turns.append(set(wedge.read_reports(tmp_path)))
        if len(turns) == 3:
            log.enter("agree", -1e6)

    wedge.run(watch(log), place(tmp_path), end=lambda _code: None, sleep=sleep)

    assert turns[:3] == [{1}, {1}, {1}]


def test_the_first_to_notice_waits_for_the_others_only_until_they_have_reported(
    tmp_path: Path,
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            wedge.write_report(tmp_path, 1, CollectiveLog().report({}, 0.0))

    wedge.run(watch(waiting()), place(tmp_path), end=lambda _code: None, sleep=sleep)
    assert len(slept) == 3

    wedge.clear(tmp_path)
    alone: list[float] = []
    wedge.run(watch(waiting()), place(tmp_path), end=lambda _code: None, sleep=alone.append)
    assert sum(alone) == wedge.LOOK_S + wedge.GATHER_S


def full_disk(_directory: Path, _rank: int, _report: object) -> None:
    raise OSError(28, "No space left on device")


def not_a_sink(_text: str) -> int:
    raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("splitwave.engine.vllm.worst_token.wedge.write_report", full_disk),
        ("sys.stderr.write", not_a_sink),
    ],
)
def test_a_rank_ends_though_it_cannot_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(name, broken)
    ended: list[int] = []

    with pytest.raises((OSError, ValueError)):
        wedge.run(watch(waiting()), place(tmp_path), end=ended.append, sleep=never)

    assert ended == [wedge.EXIT_CODE]


def test_a_broken_report_does_not_silence_the_others(tmp_path: Path) -> None:
    wedge.write_report(tmp_path, 1, waiting().report({}, 0.0))
    (tmp_path / "wedge-rank-0.json").write_text('{"steps": 1')

    reports = wedge.read_reports(tmp_path)

    assert set(reports) == {1}
    assert diagnose(reports, range(2)).endswith("no report from rank 0")


def test_reports_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    wedge.write_report(tmp_path, 3, {})

    wedge.clear(tmp_path)
    wedge.clear(tmp_path / "absent")

    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
