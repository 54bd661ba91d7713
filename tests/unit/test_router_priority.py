"""Where requests wait in a router, smaller priorities go first and equal ones as they came."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any  # fields of a need, by name

import pytest

from services.router.grants import TakenRoom
from services.router.line import Line, Turn
from splitwave.core.deadline import Deadline
from splitwave.core.session import AskGrant, CancelAsk
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.unit.test_router_grants import LOAD, Pool, need, waiting
from tests.unit.test_router_prefill_pool import Pool as PrefillPoolRig
from tests.unit.test_router_prefill_pool import play


def test_a_line_is_in_order_of_priority_then_of_arrival_and_anybody_may_leave() -> None:
    line: Line[str] = Line()
    for waiter, priority in (("a", 0), ("b", 7), ("c", -3), ("d", 0), ("e", -3), ("f", 7)):
        line.join(waiter, priority)
    assert list(line) == ["c", "e", "a", "d", "b", "f"]

    for waiter in ("e", "b"):
        line.leave(waiter)
    line.join("e", 0)

    assert list(line) == ["c", "a", "d", "e", "f"]
    assert len(line) == 5


# Room in decode.


class Waiting:
    """Requests that wait for room at one worker, each with its ask."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.tasks: dict[str, asyncio.Task[TakenRoom]] = {}
        self.open: list[str] = []
        """Asks that the worker has not answered, as they came."""

    async def come(self, name: str, priority: int, **changes: Any) -> None:
        take = self.pool.rooms.take(replace(need(20, priority=priority), **changes))
        self.tasks[name] = await waiting(take)
        self.listen()

    def listen(self) -> None:
        """Read what the router wrote."""
        for message in self.pool.sent(0):
            if isinstance(message, AskGrant):
                self.open.append(message.ask_id)
            elif isinstance(message, CancelAsk):
                self.open.remove(message.ask_id)

    async def grant_oldest(self, blocks: int = 2) -> str:
        """Answer the oldest ask; returns who got the room."""
        before = {name for name, task in self.tasks.items() if task.done()}
        self.pool.grant(0, blocks, grant_id=self.open[0], ask_id=self.open.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.listen()
        (served,) = {name for name, task in self.tasks.items() if task.done()} - before
        return served


async def test_a_grant_goes_to_the_smallest_priority_and_the_ask_of_that_one_is_passed_on() -> None:
    them = Waiting(Pool(LOAD))
    for name, priority in (("low0", 100), ("low1", 100), ("mid", 0), ("low2", 100), ("high", -100)):
        await them.come(name, priority)
    asks = list(them.open)

    served = [await them.grant_oldest() for _ in range(5)]

    assert served == ["high", "mid", "low0", "low1", "low2"]
    assert len(asks) == 5
    assert them.open == [], "each ask was made and answered once, and none was taken back"


async def test_a_grant_that_is_too_small_for_the_first_goes_to_whoever_asked() -> None:
    them = Waiting(Pool(LOAD))
    await them.come("low", 5)
    await them.come("large", -5, tokens=900)

    assert await them.grant_oldest(blocks=2) == "low"
    them.tasks["large"].cancel()


@pytest.mark.parametrize(
    "unfit",
    [lambda: {"waits_until": Deadline(now_s() + 1)}, lambda: {"tokens": 10}],
    ids=["its patience ends sooner", "it is for less"],
)
async def test_an_ask_that_does_not_do_for_the_other_is_taken_back_and_made_anew(
    unfit: Callable[[], dict[str, object]],
) -> None:
    them = Waiting(Pool(LOAD))
    await them.come("low", 5, tokens=40)
    await them.come("high", -5, **unfit())
    _, of_high = them.open

    assert await them.grant_oldest(blocks=3) == "high"

    assert of_high not in them.open
    assert len(them.open) == 1
    assert await them.grant_oldest(blocks=3) == "low"


async def test_a_grant_that_comes_unasked_goes_to_the_smallest_priority() -> None:
    them = Waiting(Pool(LOAD))
    await them.come("low", 5)
    await them.come("high", -5)

    them.pool.grant(0, 4)
    await asyncio.sleep(0)

    assert (await them.tasks["high"]).grant_id == "g"
    assert not them.tasks["low"].done()
    them.tasks["low"].cancel()


# A place in prefill.


def test_a_place_in_prefill_goes_to_the_smallest_priority() -> None:
    async def scenario(pool: PrefillPoolRig) -> None:
        await pool.report(390)
        tasks = [
            pool.start(name, priority=priority)
            for name, priority in (("low0", 9), ("mid", 0), ("low1", 9), ("high", -9))
        ]
        await asyncio.sleep(1.0)
        await pool.report(0)
        await asyncio.gather(*tasks)
        served = [call.handoff_id for call in pool.workers[0].calls]
        assert served == ["high", "mid", "low0", "low1"]

    play(1, scenario)


def test_a_newcomer_of_a_smaller_priority_takes_a_place_that_others_wait_for() -> None:
    """One that is too long for what is left of the queue holds up its equals, and no others."""

    async def scenario(pool: PrefillPoolRig) -> None:
        await pool.report(330)
        long = pool.start("long", tokens=80)
        equal = pool.start("equal", tokens=5)
        await asyncio.sleep(0.1)
        await pool.start("high", tokens=5, priority=-1)
        assert not long.done()
        assert not equal.done()
        for task in (long, equal):
            task.cancel()

    play(1, scenario)


# The turn of requests for several completions.


def test_a_turn_goes_to_the_smallest_priority_and_survives_who_leaves() -> None:
    async def scenario() -> None:
        turn, order = Turn(), list[str]()

        async def hold(name: str, priority: int) -> None:
            async with turn.mine(priority):
                order.append(name)
                await asyncio.sleep(1.0)

        names = (("first", 0), ("low", 5), ("gone", -7), ("late", -5), ("high", -6))
        tasks = {name: asyncio.ensure_future(hold(name, x)) for name, x in names}
        await asyncio.sleep(0.5)
        tasks["gone"].cancel()
        await asyncio.sleep(0.5)
        tasks["high"].cancel()  # In the moment in which its turn comes.
        await asyncio.gather(*tasks.values(), return_exceptions=True)

        assert order in (["first", "late", "low"], ["first", "high", "late", "low"])
        await asyncio.wait_for(hold("after", 0), 2.0)

    virtual_loop.run(scenario())
