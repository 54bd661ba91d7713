"""Grants hold under crashes and a network that delays, loses and repeats messages."""

from collections import Counter

import pytest

from bench.grants import POLICIES, snapshot
from splitwave.core.grant import Ask, AskRefused, GrantDesk, GrantTable
from tests.sim.grant_router import Cancellation, Submission
from tests.sim.grant_world import Result, World

FAULTS = ("none", "lost", "repeated", "late")
MESSAGES = (
    *("AskGrant", "CancelAsk", "TakeGrant", "ReturnGrants", "Granted", "AskRefused"),
    *(Submission.__name__, Cancellation.__name__),
)


def test_no_seat_is_promised_twice_and_all_come_back(seed: int) -> None:
    World(seed).run()


def test_the_same_seed_gives_the_same_run() -> None:
    assert World(5).run() == World(5).run()
    assert World(5).run() != World(6).run()


def test_the_worlds_meet_every_fault_at_every_message_and_fill_the_group() -> None:
    met: Counter[tuple[str, str]] = Counter()
    results: list[Result] = []
    for seed in range(60):
        results.append(World(seed).run())
        met += results[-1].met

    assert set(met) == {(message, fault) for message in MESSAGES for fault in FAULTS}
    assert sum(result.used_max == 1.0 for result in results) > 20
    assert sum(result.crashes for result in results) > 60
    assert sum(result.seated for result in results) > 1000
    assert sum(result.unknown for result in results) > 0


class SeatsWithoutEnd(GrantTable):
    """Promises a seat as long as there are blocks."""

    def _least(self, load: list[int], blocks: int) -> int | None:
        fits = [
            r for r in range(self.ranks) if self.blocks_used[r] + blocks <= self.blocks_per_rank
        ]
        return min(fits, key=lambda rank: load[rank], default=None)

    def check(self) -> None:
        """Sees nothing: the ledger must."""


class TimeWithoutEnd(GrantTable):
    """Keeps a taken grant for a router that has crashed."""

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        return super().take(session_id, grant_id, blocks, expires_at_s + 1e6)

    def check(self) -> None:
        """Sees nothing: the ledger must."""


class KeepsCrashed(GrantDesk):
    """Leaves a lost session's grants where they are."""

    def close(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def check(self, *, settled: bool = False) -> None:
        """Sees nothing: the ledger must."""


class AnswersTwice(GrantDesk):
    """Answers an ask and leaves it in the queue once in a while."""

    def ask(self, ask: Ask, now_s: float) -> AskRefused | None:
        refused = super().ask(ask, now_s)
        if refused is None and ask.blocks == 4:
            again = Ask(ask.session_id, ask.ask_id, ask.blocks, ask.waits_until_s)
            self._asks[ask.session_id, ask.ask_id + "'"] = again
        return refused

    def check(self, *, settled: bool = False) -> None:
        """Sees nothing: the ledger must."""


def run_many(*, table: type[GrantTable] = GrantTable, desk: type[GrantDesk] = GrantDesk) -> None:
    for seed in range(30):
        World(seed, table=table, desk=desk).run()


@pytest.mark.parametrize("table", [SeatsWithoutEnd, TimeWithoutEnd])
def test_a_table_that_breaks_its_promise_is_caught_by_the_ledger(table: type[GrantTable]) -> None:
    with pytest.raises(AssertionError, match=r"S\d"):
        run_many(table=table)


@pytest.mark.parametrize("desk", [KeepsCrashed, AnswersTwice])
def test_a_desk_that_breaks_its_promise_is_caught_by_the_ledger(desk: type[GrantDesk]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        run_many(desk=desk)


def test_grants_level_a_rank_that_is_ten_below_and_stale_counts_do_not() -> None:
    """64 routers, 32 ranks; the worst of 20 trials each, as highest load over mean load."""
    worst = {
        name: max(snapshot(make, seed)[1] for seed in range(20)) for name, make in POLICIES.items()
    }

    assert worst["grants"] <= 1.05
    assert worst["two_choices_on_stale_counts"] > 1.1
    assert worst["vllm_global_minimum"] > 2.0
