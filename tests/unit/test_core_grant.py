"""The grant table and desk against a naive model, and mutants that the model catches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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

from splitwave.core.errors import Reason
from splitwave.core.grant import Ask, AskRefused, DeskSettings, Grant, GrantDesk, GrantTable, Seat

RANKS, SEATS, BLOCKS = 2, 3, 10
SETTINGS = DeskSettings(ttl_s=5, float_max=2, float_share=0.7, grant_blocks=2, asks_max=4)
sessions = st.sampled_from(["s0", "s1", "s2"])
sizes = st.sampled_from([0, 1, 1, 2, 2, 3, 5, BLOCKS, BLOCKS + 1])
picks = st.integers(0, 99)
"""Which of those that are there; taken modulo their number."""


@dataclass(frozen=True)
class Kinds:
    """The classes under test."""

    table: type[GrantTable] = GrantTable
    desk: type[GrantDesk] = GrantDesk


class GrantMachine(RuleBasedStateMachine):
    """Any order of sessions, asks, takes, returns, spends, ends, crashes and time.

    `live` is what routers hold by what they were told; it follows the contract's words.
    """

    kinds = Kinds()

    @initialize()
    def start(self) -> None:
        table = self.kinds.table(ranks=RANKS, seats_per_rank=SEATS, blocks_per_rank=BLOCKS)
        self.table = table
        self.desk = self.kinds.desk(table, SETTINGS)
        self.now_s = 0
        self.open: set[str] = set()
        self.live: dict[str, Grant] = {}
        self.seated: dict[str, Seat] = {}
        self.waiting: list[Ask] = []
        self.number = 0

    def settle(self) -> None:
        """Hold what the desk hands out against what the contract allows."""
        self.live = {k: g for k, g in self.live.items() if g.expires_at_s > self.now_s}
        for out in list(self.desk.settle(self.now_s)):
            if isinstance(out, AskRefused):
                ask = self.waited(out.session_id, out.ask_id)
                assert ask.waits_until_s <= self.now_s, "refused before its patience ended"
                assert out.reason is Reason.OVERLOADED
                self.waiting.remove(ask)
                continue
            assert out.grant_id not in self.live
            assert out.session_id in self.open
            if out.ask_id:
                ask = self.waited(out.session_id, out.ask_id)
                patient = [a for a in self.waiting if a.waits_until_s > self.now_s]
                assert ask is patient[0], "not in the order of arrival"
                assert out.blocks == ask.blocks
                self.waiting.remove(ask)
            self.live[out.grant_id] = out
        assert not [a for a in self.waiting if a.waits_until_s <= self.now_s]
        self.desk.check(settled=True)

    def waited(self, session_id: str, ask_id: str) -> Ask:
        """The ask that was answered: it must be waiting, so no ask is answered twice."""
        found = [a for a in self.waiting if (a.session_id, a.ask_id) == (session_id, ask_id)]
        assert len(found) == 1, "an answer to an ask that does not wait"
        return found[0]

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        self.settle()

    @rule(session_id=sessions)
    def session_opens(self, session_id: str) -> None:
        self.desk.open(session_id)
        self.open.add(session_id)
        self.settle()

    @rule(session_id=sessions)
    def session_is_lost(self, session_id: str) -> None:
        """A router crashed: what it held comes back; its attempts end in their own time."""
        self.desk.close(session_id)
        self.open.discard(session_id)
        self.live = {k: g for k, g in self.live.items() if g.session_id != session_id}
        self.waiting = [a for a in self.waiting if a.session_id != session_id]
        self.settle()

    @rule(pick=picks, blocks=sizes, patience_s=st.integers(0, 9))
    def ask(self, pick: int, blocks: int, patience_s: int) -> None:
        if not self.open:
            return
        self.number += 1
        session_id = sorted(self.open)[pick % len(self.open)]
        ask = Ask(session_id, f"q{self.number}", blocks, self.now_s + patience_s)
        refused = self.desk.ask(ask, self.now_s)
        if not 0 < blocks <= BLOCKS:
            assert refused is not None
            assert refused.reason is Reason.INVALID_REQUEST
        elif len(self.waiting) >= SETTINGS.asks_max:
            assert refused is not None
            assert refused.reason is Reason.OVERLOADED
        else:
            assert refused is None
            assert self.desk.ask(ask, self.now_s) is None  # A repeat is not a second one.
            self.waiting.append(ask)
        self.settle()

    @rule(session_id=sessions, pick=picks)
    def cancel_ask(self, session_id: str, pick: int) -> None:
        ask_id = f"q{pick % (self.number + 1)}"
        self.desk.cancel_ask(session_id, ask_id)
        key = (session_id, ask_id)
        self.waiting = [a for a in self.waiting if (a.session_id, a.ask_id) != key]
        self.live = {
            k: g for k, g in self.live.items() if g.taken or (g.session_id, g.ask_id) != key
        }
        self.settle()

    def pick(self, pick: int) -> Grant | None:
        ids = sorted(self.live)
        return self.live[ids[pick % len(ids)]] if ids else None

    @rule(pick=picks, blocks=st.integers(0, BLOCKS), keep_s=st.integers(1, 9))
    def take(self, pick: int, blocks: int, keep_s: int) -> None:
        grant = self.pick(pick)
        if grant is None:
            return
        until_s = self.now_s + keep_s
        taken = self.table.take(grant.session_id, grant.grant_id, blocks, until_s)
        assert taken is (0 < blocks <= grant.blocks)
        if taken:
            self.live[grant.grant_id] = replace(
                grant, blocks=blocks, expires_at_s=until_s, taken=True
            )
        self.settle()

    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        grant = self.pick(pick)
        if grant is None:
            return
        assert self.table.give_back(grant.session_id, grant.grant_id)
        assert not self.table.give_back(grant.session_id, grant.grant_id)
        del self.live[grant.grant_id]
        self.settle()

    @rule(pick=picks)
    def spend(self, pick: int) -> None:
        grant = self.pick(pick)
        if grant is None:
            return
        self.number += 1
        held = list(self.table.seats_held)
        attempt_id = f"a{self.number}"
        seat = self.table.spend(grant.session_id, grant.grant_id, attempt_id)
        assert seat is not None
        assert seat.blocks == grant.blocks
        assert held[seat.rank] <= held[grant.rank], "seated where more sit"
        assert self.table.spend(grant.session_id, grant.grant_id, "again") is None
        del self.live[grant.grant_id]
        self.seated[attempt_id] = seat
        self.settle()

    @rule(pick=picks, thief=sessions)
    def another_session_tries(self, pick: int, thief: str) -> None:
        grant = self.pick(pick)
        if grant is None or grant.session_id == thief:
            return
        assert self.table.spend(thief, grant.grant_id, "stolen") is None
        assert not self.table.take(thief, grant.grant_id, 1, self.now_s + 1)
        assert not self.table.give_back(thief, grant.grant_id)

    @rule(pick=picks)
    def attempt_ends(self, pick: int) -> None:
        ids = sorted(self.seated)
        if not ids:
            return
        attempt_id = ids[pick % len(ids)]
        assert self.desk.freed(attempt_id, self.now_s)
        assert not self.desk.freed(attempt_id, self.now_s)
        del self.seated[attempt_id]
        self.settle()

    @invariant()
    def agrees(self) -> None:
        """The account is what the routers and attempts hold: not a seat more or less."""
        self.desk.check()
        claims: list[Grant | Seat] = [*self.live.values(), *self.seated.values()]
        seats, blocks = len(claims), sum(c.blocks for c in claims)
        assert sum(self.table.seats_used) == seats <= RANKS * SEATS
        assert sum(self.table.blocks_used) == blocks <= RANKS * BLOCKS
        held = {g.grant_id: g for s in self.open for g in self.table.grants_of(s)}
        assert held == self.live
        assert self.desk.asks_waiting == len(self.waiting)
        floats = [self.table.floats_of(s) for s in self.open]
        assert all(n <= SETTINGS.float_max for n in floats)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for session_id in list(self.open):
            self.desk.close(session_id)
        for attempt_id in self.seated:
            self.desk.freed(attempt_id, self.now_s)
        assert self.table.seats_used == [0] * RANKS
        assert self.table.blocks_used == [0] * RANKS
        assert self.desk.asks_waiting == 0


def check(kinds: Kinds, examples: int) -> None:
    machine = type("Machine", (GrantMachine,), {"kinds": kinds})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=50, phases=[Phase.generate], database=None
        ),
    )


def test_no_seat_is_ever_given_twice_or_lost() -> None:
    check(Kinds(), examples=80)


class SeatsWithoutEnd(GrantTable):
    """G1: a rank takes more attempts than it has seats."""

    def _least(self, load: list[int], blocks: int) -> int | None:
        fits = [r for r in range(self.ranks) if self.blocks_used[r] + blocks <= BLOCKS]
        return min(fits, key=lambda rank: load[rank], default=None)


class BlocksWithoutEnd(GrantTable):
    """G2: a rank promises more blocks than it has."""

    def _least(self, load: list[int], blocks: int) -> int | None:
        return super()._least(load, 1)


class TakeKeepsTheRest(GrantTable):
    """G3: what a take leaves of its grant is not given back."""

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        before = list(self.blocks_used)
        taken = super().take(session_id, grant_id, blocks, expires_at_s)
        self.blocks_used = before
        return taken


class CountsTakenAsFloat(GrantTable):
    """G4: a session whose grants are all taken gets no new ones."""

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        floats = self._floats.get(session_id, 0)
        taken = super().take(session_id, grant_id, blocks, expires_at_s)
        self._floats[session_id] = floats
        return taken


class TakeForgetsTheTime(GrantTable):
    """G5: a taken grant whose router is gone never comes back."""

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        taken = super().take(session_id, grant_id, blocks, expires_at_s)
        if taken:
            self._due.drop(grant_id)
        return taken


class AnyoneMaySpend(GrantTable):
    """A grant is taken for whoever names it."""

    def _owned(self, session_id: str, grant_id: str) -> Grant | None:
        return self._grants.get(grant_id)


class SeatsWhereMostSit(GrantTable):
    """Fills one rank before the next."""

    def spend(self, session_id: str, grant_id: str, attempt_id: str) -> Seat | None:
        self._load_held = [-load for load in self._load_held]
        seat = super().spend(session_id, grant_id, attempt_id)
        self._load_held = [-load for load in self._load_held]
        return seat


class ForgetsALoad(GrantTable):
    """G6: the load to choose by does not follow the counts."""

    def free(self, attempt_id: str) -> bool:
        load = list(self._load_used)
        freed = super().free(attempt_id)
        self._load_used = load
        return freed


class FloatsBeforeAsks(GrantDesk):
    """D1: the oldest ask waits although it fits."""

    def _answer_asks(self, now_s: float) -> Iterator[Grant | AskRefused]:
        for key in self._patience.pop(now_s):
            yield self._overloaded(self._asks.pop(key), "late", now_s)


class KeepsAsksOfTheLost(GrantDesk):
    """D2: the asks of a lost session stay in the queue."""

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self.table.end_session(session_id)


class AsksWithoutPatience(GrantDesk):
    """D3: an ask may wait for ever."""

    def ask(self, ask: Ask, now_s: float) -> AskRefused | None:
        refused = super().ask(ask, now_s)
        self._patience.drop((ask.session_id, ask.ask_id))
        return refused


class NewestFirst(GrantDesk):
    """Asks are answered in the wrong order."""

    def ask(self, ask: Ask, now_s: float) -> AskRefused | None:
        refused = super().ask(ask, now_s)
        if refused is None:
            self._asks.move_to_end((ask.session_id, ask.ask_id), last=False)
        return refused


class KeepsTheGrantOfACancelledAsk(GrantDesk):
    """The grant that a cancelled ask was answered with stays out until its time is up."""

    def cancel_ask(self, session_id: str, ask_id: str) -> None:
        self._forget((session_id, ask_id))


TABLES = [
    SeatsWithoutEnd,
    BlocksWithoutEnd,
    TakeKeepsTheRest,
    CountsTakenAsFloat,
    TakeForgetsTheTime,
    AnyoneMaySpend,
    SeatsWhereMostSit,
    ForgetsALoad,
]
DESKS = [
    FloatsBeforeAsks,
    KeepsAsksOfTheLost,
    AsksWithoutPatience,
    NewestFirst,
    KeepsTheGrantOfACancelledAsk,
]
MUTANTS = [*(Kinds(table=table) for table in TABLES), *(Kinds(desk=desk) for desk in DESKS)]


@pytest.mark.parametrize("kinds", MUTANTS, ids=[kind.__name__ for kind in [*TABLES, *DESKS]])
def test_a_grant_that_breaks_its_contract_is_caught(kinds: Kinds) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(kinds, examples=100)
