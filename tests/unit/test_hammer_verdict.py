"""What a hammer's run amounts to, from how its ranks ended and where they were."""

import pytest

from splitwave.certify.hammer.verdict import (
    EXIT_CODE,
    Limits,
    Phase,
    Position,
    RankEnd,
    Verdict,
    Watch,
    judge,
    same_place,
)

REPLAYING = Position(Phase.REPLAY, issued=41, finished=40, size=128, marks=("layer 0 entered",))
WARMING = Position(Phase.WARM, size=64)
LIMITS = Limits(setup_s=100.0, stall_s=10.0, replay_s=50.0)


def end(
    rank: int, code: int | None, position: Position = REPLAYING, at_s: float = 0.0, **found: str
) -> RankEnd:
    return RankEnd(rank, code, position, at_s, found)


@pytest.mark.parametrize(
    ("ends", "overdue", "verdict"),
    [
        ([end(0, 0), end(1, 0)], "", Verdict.PASSED),
        ([end(0, 5), end(1, 5)], "", Verdict.SHORT),
        ([end(0, 1), end(1, 1)], "", Verdict.WRONG_ROWS),
        ([end(0, 3), end(1, 3)], "", Verdict.FAULT),
        ([end(0, 3, WARMING), end(1, None, WARMING)], "", Verdict.SETUP),
        ([end(0, None), end(1, None)], "rank 0 stood still", Verdict.HANG),
        ([end(0, None, WARMING), end(1, None, WARMING)], "not ready", Verdict.SETUP),
        # A rank that nobody missed but that never ended, and one that ended without it.
        ([end(0, 0), end(1, None)], "", Verdict.HANG),
        # One broken rank leaves its peer waiting.
        ([end(0, None), end(1, -9)], "", Verdict.FAULT),
        ([end(0, None), end(1, 1)], "", Verdict.WRONG_ROWS),
        # A memory fault outweighs the standstill that it makes.
        ([end(0, -11), end(1, None)], "rank 1 stood still", Verdict.FAULT),
        # Any code that is not in the catalogue is a fault of the program.
        ([end(0, 0), end(1, 77)], "", Verdict.FAULT),
        ([end(0, 2), end(1, 0)], "", Verdict.FAULT),
    ],
)  # fmt: skip
def test_a_run_has_one_verdict(ends: list[RankEnd], overdue: str, verdict: Verdict) -> None:
    assert judge(ends, overdue)[0] is verdict


def test_the_first_to_break_is_the_cause() -> None:
    lost_its_peer = end(0, 3, at_s=5.2, error="connection closed by peer")
    found_wrong_rows = end(1, 1, at_s=5.1, wrong="7 wrong rows")

    verdict, why = judge([lost_its_peer, found_wrong_rows], "")

    assert verdict is Verdict.WRONG_ROWS
    assert why == "rank 1: 7 wrong rows; rank 0: connection closed by peer"


def test_rows_that_turn_wrong_after_a_fault_are_its_consequence() -> None:
    assert judge([end(0, 3, at_s=5.0), end(1, 1, at_s=5.1)], "")[0] is Verdict.FAULT


def test_of_two_that_broke_together_the_one_that_saw_wrong_rows_is_believed() -> None:
    assert judge([end(0, 3, at_s=5.0), end(1, 1, at_s=5.0)], "")[0] is Verdict.WRONG_ROWS


def test_a_signal_is_named() -> None:
    assert judge([end(0, -11)], "")[1] == "rank 0: killed by signal 11"


def test_exit_codes_are_what_the_program_promises() -> None:
    assert {str(verdict): code for verdict, code in EXIT_CODE.items()} == {
        "passed": 0, "wrong_rows": 1, "hang": 2, "fault": 3, "setup": 4, "short": 5,
    }  # fmt: skip


def test_a_rank_that_replays_is_never_overdue() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    for now_s in range(45):
        for rank in (0, 1):
            watch.see(rank, Position(Phase.REPLAY, issued=now_s + 1, finished=now_s), now_s)
        assert watch.overdue(now_s) == ""


def test_a_rank_that_stands_still_while_its_peer_replays_is_named() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    for now_s in range(12):
        watch.see(0, Position(Phase.REPLAY, issued=now_s, finished=now_s), now_s)
        watch.see(1, REPLAYING, now_s)

    assert watch.overdue(10.0) == ""
    assert watch.overdue(10.5) == "rank 1 stood still for 10.5 s"


def test_issuing_without_finishing_is_not_standing_still_until_it_stops() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    watch.see(0, Position(Phase.REPLAY, issued=1), 0.0)
    watch.see(0, Position(Phase.REPLAY, issued=4), 8.0)

    assert watch.overdue(17.0) == ""
    assert "rank 0" in watch.overdue(18.5)


def test_a_rank_that_is_done_may_rest() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    watch.see(0, Position(Phase.REPLAY, issued=1), 0.0)
    watch.see(0, Position(Phase.DONE, issued=1), 1.0)

    assert watch.overdue(40.0) == ""


def test_setting_up_has_its_own_limit() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    watch.see(0, WARMING, 1.0)

    assert watch.overdue(99.0) == ""
    assert watch.overdue(100.0) == "not ready after 100 s"


def test_the_replays_have_their_time_and_one_standstill_more() -> None:
    watch = Watch(LIMITS, began_s=0.0)
    for now_s in range(0, 80, 5):
        watch.see(0, Position(Phase.REPLAY, issued=now_s), now_s)
        assert bool(watch.overdue(now_s)) is (now_s > 60)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (REPLAYING, "the same point of the same replay"),
        (Position(Phase.REPLAY, 41, 40, 128, ("layer 1 entered",)), "different points of the same"),
        (Position(Phase.REPLAY, 42, 41, 128, ("layer 0 entered",)), "different replays"),
    ],
)
def test_ranks_stuck_together_are_told_from_ranks_apart(other: Position, words: str) -> None:
    assert words in same_place([REPLAYING, other])
