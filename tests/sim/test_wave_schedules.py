"""The production coordinator under seeded faults, and the table of what has been tried."""

import pytest

from tests.conftest import SEEDS
from tests.sim.wave.coverage import REACHABLE, rows
from tests.sim.wave.draw import draw
from tests.sim.wave.runner import Tally, broken_by, run, run_in_processes, shrink
from tests.sim.wave.stock import stock

SCHEDULES = max(2_000, SEEDS)
ONE_PROCESS_MAX = 5_000
HITS_MIN = 100

# Whichever test comes first runs all schedules: 8 ms of CPU each, on a machine that may be busy.
pytestmark = pytest.mark.timeout(60 + SCHEDULES // 5)


@pytest.fixture(scope="module")
def tally() -> Tally:
    """Every schedule, run once."""
    seeds = range(SCHEDULES)
    if SCHEDULES <= ONE_PROCESS_MAX:
        return run(seeds)
    parts = list(run_in_processes(seeds, processes=2))
    return parts[-1]


def test_no_schedule_breaks_an_invariant(tally: Tally) -> None:
    assert tally.schedules == SCHEDULES
    assert [str(failure) for failure in tally.failures[:5]] == []


def test_each_schedule_has_events_and_kinds_of_fault_enough(tally: Tally) -> None:
    schedules = [draw(seed) for seed in range(200)]

    assert min(schedule.ranks for schedule in schedules) >= 3
    assert min(schedule.fronts for schedule in schedules) >= 2
    assert tally.events_min >= 200
    assert tally.fault_kinds_min >= 3


def test_each_reachable_triple_of_state_message_and_fault_was_tried_often(tally: Tally) -> None:
    seldom = {triple: hits for triple, hits in rows(tally.coverage) if triple in REACHABLE}
    seldom = {triple: hits for triple, hits in seldom.items() if hits < HITS_MIN}

    assert {" ".join(part.name for part in triple): hits for triple, hits in seldom.items()} == {}


def test_no_triple_came_about_that_is_held_to_be_unreachable(tally: Tally) -> None:
    strays = [triple for triple, hits in rows(tally.coverage) if hits and triple not in REACHABLE]

    assert [" ".join(part.name for part in triple) for triple in strays] == []


def test_the_same_seed_runs_the_same() -> None:
    def trace() -> list[str]:
        log: list[str] = []
        broken_by(draw(11), log=log)
        return log

    assert trace() == trace()
    assert len(trace()) > 200


def test_a_failing_schedule_shrinks_to_what_fails() -> None:
    seed = next(seed for seed in range(100) if broken_by(draw(seed), stock).startswith("W1"))

    small = shrink(draw(seed), stock)

    assert broken_by(small, stock).startswith("W1")
    assert len(small.actions) < 12
