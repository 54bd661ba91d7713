"""The lease table against a naive model of its contract, and mutants that the model catches."""

import time
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from splitwave.core.handoff import ENDED_MAX, Lease, LeaseEnd, LeaseTable, ReleaseOutcome

RANKS, BLOCKS, MEMORY_S = 2, 12, 20
ids = st.sampled_from([f"h{i}" for i in range(3)])


class LeaseMachine(RuleBasedStateMachine):
    """Any order of holds, confirms, releases, sweeps and time."""

    make: Callable[..., LeaseTable] = LeaseTable

    @initialize()
    def start(self) -> None:
        self.table = self.make(ranks=RANKS, blocks_per_rank=BLOCKS, memory_s=MEMORY_S)
        self.now_s = 0
        self.swept_at_s = -1
        self.live: dict[str, Lease] = {}
        self.ended: dict[str, tuple[LeaseEnd, int]] = {}  # How, and when it is forgotten.
        self.counts = dict.fromkeys(LeaseEnd, 0)
        self.started = 0

    @rule(seconds=st.integers(1, 12))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(handoff_id=ids, rank=st.integers(0, RANKS - 1), blocks=st.integers(1, 5))
    def hold(self, handoff_id: str, rank: int, blocks: int) -> None:
        used = sum(x.block_count for x in self.live.values() if x.rank == rank)
        if used + blocks > BLOCKS:
            return  # The engine could not have computed this prompt.
        lease = Lease(handoff_id, rank, blocks, self.now_s + 10)
        known = handoff_id in self.live or handoff_id in self.ended

        assert self.table.hold(lease) is not known

        if not known:
            self.live[handoff_id] = lease
            self.started += 1

    @rule(handoff_id=ids)
    def hold_too_late(self, handoff_id: str) -> None:
        if self.swept_at_s >= 0:
            assert not self.table.hold(Lease(handoff_id, 0, 1, self.swept_at_s))

    @rule(handoff_id=ids)
    def confirm(self, handoff_id: str) -> None:
        left_s = self.table.confirm(handoff_id, self.now_s)

        lease = self.live.get(handoff_id)
        if lease is None:
            assert left_s is None
        elif lease.expires_at_s <= self.now_s:
            assert left_s is None
            self.end(lease, LeaseEnd.EXPIRED)
        else:
            assert left_s == lease.expires_at_s - self.now_s
            self.end(lease, LeaseEnd.PULLED)

    @rule(handoff_id=ids)
    def release(self, handoff_id: str) -> None:
        outcome = self.table.release(handoff_id, self.now_s)

        if handoff_id in self.live:
            assert outcome is ReleaseOutcome.ENDED_NOW
            self.end(self.live[handoff_id], LeaseEnd.RELEASED)
        elif handoff_id in self.ended:
            assert outcome is ReleaseOutcome.ENDED_BEFORE
        else:
            assert outcome is ReleaseOutcome.REMEMBERED
            self.ended[handoff_id] = (LeaseEnd.RELEASED, self.now_s + MEMORY_S)
        early = self.ended[handoff_id][0] is LeaseEnd.RELEASED
        assert self.table.released_early(handoff_id) is early

    @rule()
    def sweep(self) -> None:
        expired = self.table.sweep(self.now_s)

        due = [x for x in self.live.values() if x.expires_at_s <= self.now_s]
        assert {x.handoff_id for x in expired} == {x.handoff_id for x in due}
        for lease in due:
            self.end(lease, LeaseEnd.EXPIRED)
        self.ended = {k: end for k, end in self.ended.items() if end[1] > self.now_s}
        self.swept_at_s = self.now_s

    def end(self, lease: Lease, how: LeaseEnd) -> None:
        del self.live[lease.handoff_id]
        self.ended[lease.handoff_id] = (how, self.now_s + MEMORY_S)
        self.counts[how] += 1

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        held = [0] * RANKS
        for lease in self.live.values():
            held[lease.rank] += lease.block_count
        assert self.table.blocks_held == held
        assert self.table.live == len(self.live)
        assert (self.table.started, self.table.ends) == (self.started, self.counts)
        assert {i for i in self.ended if self.table.get(i)} == set()


def check(kind: type[LeaseTable], examples: int) -> None:
    machine = type("Machine", (LeaseMachine,), {"make": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, phases=[Phase.generate], database=None
        ),
    )


def test_a_lease_ends_exactly_once_in_any_order_of_events() -> None:
    check(LeaseTable, examples=80)


class HoldsPastCapacity(LeaseTable):
    """L1: counts blocks twice."""

    def hold(self, lease: Lease) -> bool:
        held = super().hold(lease)
        self.blocks_held[lease.rank] += lease.block_count if held else 0
        return held


class KeepsBlocks(LeaseTable):
    """L2: a release does not return the blocks."""

    def release(self, handoff_id: str, now_s: float) -> ReleaseOutcome:
        lease = self.get(handoff_id)
        outcome = super().release(handoff_id, now_s)
        if lease is not None:
            self.blocks_held[lease.rank] += lease.block_count
        return outcome


class EndsTwice(LeaseTable):
    """L3: a confirm after the end counts again."""

    def confirm(self, handoff_id: str, now_s: float) -> float | None:
        pulled = self.ended(handoff_id) is LeaseEnd.PULLED
        left_s = super().confirm(handoff_id, now_s)
        self.ends[LeaseEnd.PULLED] += pulled
        return left_s


class Revives(LeaseTable):
    """L4: an id that has ended can be held again."""

    def hold(self, lease: Lease) -> bool:
        if super().hold(lease):
            return True
        self._live[lease.handoff_id] = lease
        self.blocks_held[lease.rank] += lease.block_count
        self.started += 1
        return True


class NeverExpires(LeaseTable):
    """L5: the sweep forgets old ends, and ends nothing."""

    def sweep(self, now_s: float) -> list[Lease]:
        kept, self._live = self._live, {}
        super().sweep(now_s)
        self._live = kept
        return []


class ConfirmsExpired(LeaseTable):
    """The fence lets through what may have been reused."""

    def confirm(self, handoff_id: str, now_s: float) -> float | None:
        lease = self.get(handoff_id)
        return super().confirm(handoff_id, min(now_s, lease.expires_at_s - 1) if lease else now_s)


class ForgetsEarlyReleases(LeaseTable):
    """A release that overtakes its prefill is lost, and the blocks stay for the whole lease."""

    def release(self, handoff_id: str, now_s: float) -> ReleaseOutcome:
        outcome = super().release(handoff_id, now_s)
        if outcome is ReleaseOutcome.REMEMBERED:
            del self._ended[handoff_id]
        return outcome


MUTANTS = [
    HoldsPastCapacity,
    KeepsBlocks,
    EndsTwice,
    Revives,
    NeverExpires,
    ConfirmsExpired,
    ForgetsEarlyReleases,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_table_that_breaks_its_contract_is_caught(mutant: type[LeaseTable]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(mutant, examples=100)


def test_to_forget_many_ends_costs_little() -> None:
    """A plain dict, which searches for its first entry after each removal, took 6 s here."""
    table = LeaseTable(ranks=1, blocks_per_rank=1, memory_s=1.0)
    for i in range(100_000):
        table.release(f"h{i}", 0.0)

    began_s = time.process_time()
    table.sweep(2.0)

    assert not table.released_early("h0")
    assert time.process_time() - began_s < 2.0


def test_releases_of_ids_that_never_come_are_remembered_up_to_a_limit() -> None:
    table = LeaseTable(ranks=1, blocks_per_rank=9, memory_s=600.0)
    for number in range(ENDED_MAX + 10):
        table.release(f"h{number}", now_s=1.0)

    table.check()
    assert not table.released_early("h0")
    assert table.released_early(f"h{ENDED_MAX + 9}")
