"""The mode guard's decisions: one group's standing, and the cap over a pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitwave.core.mode_guard import (
    PLACE_KEPT_S,
    VIOLATIONS_KEPT_MAX,
    Action,
    ModeGuard,
    PoolGuard,
    Standing,
    StepViolation,
    decertified_max,
)

PATIENCE_S = 2.0
NOW_S = 50.0


def guard(standing: Standing = Standing.CERTIFIED) -> ModeGuard:
    return ModeGuard({"full", "ubatched_full"}, standing, PATIENCE_S)


def violation(kind: str = "eager", rank: int = 0, step: int = 7) -> StepViolation:
    return StepViolation(rank=rank, step=step, kind=kind, tokens=3)


@pytest.mark.parametrize("standing", [Standing.CERTIFIED, Standing.UNCERTIFIED])
def test_one_step_outside_the_mode_decertifies_whatever_the_group_was(standing: Standing) -> None:
    guarded = guard(standing)

    assert guarded.on_violation(violation(), 1.0) is Action.HOLD
    assert guarded.standing is Standing.DECERTIFIED
    assert not guarded.takes_work
    assert guarded.violations == [violation()]


def test_steps_of_the_modes_own_kinds_change_nothing() -> None:
    guarded = guard()

    assert guarded.on_counts(0, {"full": 10, "ubatched_full": 5}, 1.0) is None
    assert (guarded.standing, guarded.violating_steps) == (Standing.CERTIFIED, 0)


def test_counts_tell_of_a_step_that_was_not_recorded_and_never_twice_of_one_that_was() -> None:
    guarded = guard()

    guarded.on_violation(violation(rank=1), 1.0)
    assert guarded.on_counts(1, {"full": 9, "eager": 1}, 1.1) is None
    assert guarded.violating_steps == 1
    guarded.on_counts(1, {"full": 9, "eager": 3}, 1.2)
    guarded.on_counts(0, {"full": 9, "eager": 1}, 1.2)
    assert guarded.violating_steps == 4
    assert guarded.violations[1] == StepViolation(rank=1, step=12, kind="eager", tokens=0)


def test_a_record_that_comes_after_the_count_takes_its_place() -> None:
    guarded = guard()

    assert guarded.on_counts(0, {"full": 9, "eager": 1}, 1.0) is Action.HOLD
    assert guarded.on_violation(violation(), 1.1) is None
    assert (guarded.violations, guarded.violating_steps) == ([violation()], 1)
    guarded.on_violation(violation(step=8), 1.2)
    assert (guarded.violations[1:], guarded.violating_steps) == ([violation(step=8)], 2)


def test_counts_alone_decertify_too() -> None:
    assert guard().on_counts(0, {"unseen": 1}, 1.0) is Action.HOLD


def test_a_group_that_nobody_speaks_to_drains_when_its_patience_is_over() -> None:
    guarded = guard()

    assert guarded.tick(100.0) is None
    guarded.on_violation(violation(), 100.0)
    assert guarded.tick(101.9) is None
    assert guarded.tick(102.0) is Action.DRAIN
    assert guarded.tick(103.0) is None
    assert guarded.on_told_to_serve_on() is None
    assert guarded.standing is Standing.DECERTIFIED


def test_a_group_that_cannot_be_spared_serves_on_and_stays_marked() -> None:
    guarded = guard()

    assert guarded.on_told_to_serve_on() is None
    guarded.on_violation(violation(), 1.0)
    assert guarded.on_told_to_serve_on() is Action.SERVE_ON
    assert (guarded.standing, guarded.takes_work) == (Standing.DEGRADED, True)
    assert guarded.on_violation(violation(), 2.0) is None
    assert guarded.on_told_to_drain() is None
    assert guarded.tick(99.0) is None
    assert guarded.violating_steps == 2


def test_of_many_violations_the_first_are_kept_and_all_are_counted() -> None:
    guarded = guard()

    for step in range(100):
        guarded.on_violation(violation(step=step), 1.0)
    assert [x.step for x in guarded.violations] == list(range(VIOLATIONS_KEPT_MAX))
    assert guarded.violating_steps == 100


@pytest.mark.parametrize(
    ("groups", "share", "most"),
    [(1, 0.25, 0), (1, 1.0, 1), (2, 0.25, 1), (4, 0.25, 1), (8, 0.25, 2), (1000, 0.25, 250),
     (8, 0.0, 0)],
)  # fmt: skip
def test_a_quarter_of_a_pool_may_be_out_and_of_several_groups_always_one(
    groups: int, share: float, most: int
) -> None:
    assert decertified_max(groups, share) == most


@given(st.integers(1, 2000), st.floats(0, 0.5))
def test_a_pool_is_never_emptied_by_steps_outside_the_mode(groups: int, share: float) -> None:
    assert decertified_max(groups, share) < groups


def test_beyond_the_cap_groups_serve_on_until_one_has_come_back() -> None:
    pool = PoolGuard(0.25)
    for name in "abcdefgh":
        assert pool.observe(name, 1, Standing.CERTIFIED, NOW_S) is None

    told = [pool.observe(name, 1, Standing.DECERTIFIED, NOW_S) for name in "abcd"]
    assert told == [Action.DRAIN, Action.DRAIN, Action.SERVE_ON, Action.SERVE_ON]
    assert pool.observe("a", 1, Standing.DECERTIFIED, NOW_S) is None
    assert pool.observe("a", 2, Standing.CERTIFIED, NOW_S) is None
    assert pool.out == 1
    assert pool.observe("e", 1, Standing.DECERTIFIED, NOW_S) is Action.DRAIN


def test_a_word_that_was_lost_is_said_again() -> None:
    pool = PoolGuard(0.25)
    for name in "ab":
        pool.observe(name, 1, Standing.CERTIFIED, NOW_S)

    assert pool.observe("a", 1, Standing.DECERTIFIED, NOW_S) is Action.DRAIN
    pool.untold("a")
    assert pool.out == 0
    assert pool.observe("a", 1, Standing.DECERTIFIED, NOW_S) is Action.DRAIN


def test_an_old_word_of_an_earlier_epoch_does_not_count() -> None:
    pool = PoolGuard(1.0)
    pool.observe("a", 2, Standing.CERTIFIED, NOW_S)

    assert pool.observe("a", 1, Standing.DECERTIFIED, NOW_S) is None


def drained_pool() -> PoolGuard:
    """Three groups, of which one was told to drain and is no longer listed."""
    pool = PoolGuard(0.25)
    for name in "abc":
        pool.observe(name, 5, Standing.CERTIFIED, NOW_S)
    assert pool.observe("a", 5, Standing.DECERTIFIED, NOW_S) is Action.DRAIN
    pool.forget("a", NOW_S)
    return pool


def test_a_group_that_is_no_longer_listed_while_it_starts_over_keeps_its_place() -> None:
    pool = drained_pool()

    assert pool.out == 1
    later_s = NOW_S + PLACE_KEPT_S - 1
    assert pool.observe("b", 5, Standing.DECERTIFIED, later_s) is Action.SERVE_ON


@pytest.mark.parametrize("epoch", [6, 4])
def test_a_group_that_is_listed_again_gives_up_its_place_in_another_epoch(epoch: int) -> None:
    pool = drained_pool()

    assert pool.observe("a", 5, Standing.DECERTIFIED, NOW_S) is None
    assert pool.out == 1, "it still finishes what runs"
    pool.forget("a", NOW_S)
    assert pool.observe("a", epoch, Standing.CERTIFIED, NOW_S) is None
    assert (pool.out, pool.out_max) == (0, 1)
    assert pool.observe("b", 5, Standing.DECERTIFIED, NOW_S) is Action.DRAIN


def test_the_place_of_a_group_that_never_comes_back_is_free_in_the_end() -> None:
    pool = drained_pool()

    later_s = NOW_S + PLACE_KEPT_S
    assert pool.observe("b", 5, Standing.DECERTIFIED, later_s) is Action.DRAIN
    assert pool.out == 1


def test_a_group_that_was_not_out_leaves_no_place_behind() -> None:
    pool = PoolGuard(0.25)
    for name in "ab":
        pool.observe(name, 1, Standing.CERTIFIED, NOW_S)

    pool.forget("a", NOW_S)

    assert (pool.out, pool.out_max) == (0, 0)


def test_a_group_that_another_router_told_to_serve_on_is_not_out() -> None:
    pool = PoolGuard(0.25)
    for name in "ab":
        pool.observe(name, 1, Standing.CERTIFIED, NOW_S)
    pool.observe("a", 1, Standing.DECERTIFIED, NOW_S)

    assert pool.observe("a", 1, Standing.DEGRADED, NOW_S) is None
    assert pool.out == 0


class Pool(RuleBasedStateMachine):
    """Eight real guards and two routers that see all of them, in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epochs = [1] * 8
        self.guards = [guard() for _ in range(8)]
        self.routers = [PoolGuard(0.25), PoolGuard(0.25)]
        for router in self.routers:
            for index in range(8):
                router.observe(str(index), 1, Standing.CERTIFIED, self.now_s)

    @rule(index=st.integers(0, 7))
    def violate(self, index: int) -> None:
        guarded = self.guards[index]
        fresh = guarded.standing is Standing.CERTIFIED
        action = guarded.on_violation(violation(), self.now_s)
        assert (action is Action.HOLD) == fresh
        assert guarded.standing is not Standing.CERTIFIED

    @rule(index=st.integers(0, 7), router=st.integers(0, 1), reaches=st.booleans())
    def look(self, index: int, router: int, reaches: bool) -> None:
        guarded, name = self.guards[index], str(index)
        action = self.routers[router].observe(
            name, self.epochs[index], guarded.standing, self.now_s
        )
        if action is not None and not reaches:
            self.routers[router].untold(name)
        elif action is Action.DRAIN:
            guarded.on_told_to_drain()
        elif action is Action.SERVE_ON:
            guarded.on_told_to_serve_on()

    @rule(index=st.integers(0, 7))
    def come_back(self, index: int) -> None:
        if self.guards[index].draining:
            self.guards[index] = guard()
            self.epochs[index] += 1

    @invariant()
    def holds(self) -> None:
        for router in self.routers:
            router.check()
        for guarded in self.guards:
            assert guarded.takes_work == (guarded.standing is not Standing.DECERTIFIED)
            assert not guarded.draining or guarded.standing is Standing.DECERTIFIED
        draining = sum(guarded.draining for guarded in self.guards)
        assert draining <= 2 * len(self.routers)


TestPool = Pool.TestCase
