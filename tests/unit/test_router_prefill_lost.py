"""Prompts that come when a prefill worker has gone and its router has not noticed yet."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.router.attempts import Unreached
from services.router.grants import POOL_WAIT_LOST_S
from services.router.held import Owner
from services.router.prefill_client import LOOK_AGAIN_S
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role, WorkerDescription, WorkerLoad
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.sim.network import PrefillNode
from tests.sim.router_world import EMPTY, Plan, Served, World, world
from tests.unit.test_router_prefill_pool import Pool, play

LOST = ServingError(Reason.WORKER_LOST, "reset")
PROMPT = tuple(range(40, 60))
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


async def lose(pool: Pool, *, reached: bool = True) -> None:
    """Lose the first worker's next call; nothing else is heard of it."""
    pool.workers[0].answers = [LOST if reached else Unreached("refused")]
    if reached:
        with pytest.raises(ServingError, match="reset"):
            await pool.start("lost")
    else:
        await pool.start("lost")


@pytest.mark.parametrize("reached", [True, False])
def test_a_worker_that_lost_a_call_gets_none_until_it_has_answered_anew(reached: bool) -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 50)
        asked = asyncio.Event()

        async def describe(timeout_s: float) -> WorkerDescription:
            await asked.wait()
            return pool.workers[0].description

        pool.workers[0].describe = describe  # type: ignore[method-assign]  # none comes yet
        await lose(pool, reached=reached)
        for n in range(3):
            await pool.start(f"other {n}")
        assert pool.called() == [1, 3 + (not reached)]
        asked.set()
        await asyncio.sleep(1.0)
        await pool.report(0, 50)
        await pool.start("again")
        assert pool.called()[0] == 2

    play(2, scenario)


def test_news_that_were_on_their_way_when_a_call_was_lost_are_no_sign_of_life() -> None:
    async def scenario(pool: Pool) -> None:
        worker = pool.workers[0]
        await pool.report(0)

        async def prefill(call: PrefillCall, timeout_s: float) -> PrefillResult:
            worker.calls.append(call)
            worker.loads.put_nowait((1, WorkerLoad(queued_tokens=(0, 0), ready=True)))
            raise LOST

        worker.prefill = prefill  # type: ignore[method-assign]  # its last news come with the end
        with pytest.raises(ServingError, match="reset"):
            await pool.start("lost")
        with pytest.raises(ServingError, match="no prefill worker is reachable"):
            await pool.start("next")
        assert pool.called() == [1]

    play(1, scenario)


def test_a_call_that_did_not_reach_its_worker_goes_to_the_next_and_never_back() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 0)
        pool.workers[0].answers = [Unreached("refused")]
        await pool.start()
        assert (pool.called(), pool.lost) == ([1, 1], {"p0"})
        assert (pool.held.worker_id, pool.held.owner) == ("p1", Owner.ROUTER)
        assert pool.released == []

    play(2, scenario)


def test_who_lost_a_worker_waits_for_a_full_one_rather_than_go_back() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 390)
        asked = pool.start(avoid=frozenset({"p0"}))
        await asyncio.sleep(10 * LOOK_AGAIN_S)
        assert pool.called() == [0, 0]
        await pool.start("of another")
        assert pool.called() == [1, 0], "others need not wait behind it"

        await pool.report(0, 0)
        await asked
        assert pool.called() == [1, 1]

    play(2, scenario)


def test_it_goes_back_once_there_is_no_other() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 390)
        asked = pool.start(avoid=frozenset({"p0"}))
        await asyncio.sleep(1.25 * LOOK_AGAIN_S)
        pool.workers[1].loads.put_nowait(None)
        async with asyncio.timeout(2 * LOOK_AGAIN_S):
            await asked
        assert pool.called() == [1, 0]

    play(2, scenario)


def test_a_call_of_an_earlier_life_says_nothing_of_the_present_one() -> None:
    async def scenario(pool: Pool) -> None:
        worker, told = pool.workers[0], asyncio.Event()

        async def prefill(call: PrefillCall, timeout_s: float) -> PrefillResult:
            await told.wait()
            raise LOST

        worker.prefill = prefill  # type: ignore[method-assign]  # slow to fail
        await pool.report(0)
        early = pool.start("early")
        await asyncio.sleep(0.01)
        worker.loads.put_nowait(None)
        await asyncio.sleep(1.0)
        await pool.report(0)
        told.set()
        with pytest.raises(ServingError, match="reset"):
            await early
        assert pool.peers[0].usable

    play(1, scenario)


# The same through the whole path: hosts that vanish without a word to who watches them.


async def vanish(node: PrefillNode) -> None:
    """The host is gone; its watches hang on, as when no reset can come."""
    node.watches.clear()
    await node.kill()


def simulated(nodes: int, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with world(Plan(prefill_nodes=nodes)) as made:
            await made.ready()
            await scenario(made)
            await asyncio.sleep(5.0)
            assert await made.held() == EMPTY

    virtual_loop.run(main())


async def served_right(made: World, name: str) -> Served:
    served = made.ask(name, PROMPT, GREEDY)
    await made.serve(served)
    assert served.sink.token_ids == made.right_tokens(served)
    return served


@pytest.mark.parametrize("gone", [1, 2, 5])
def test_prompts_find_the_worker_that_is_left_and_try_the_others_once(gone: int) -> None:
    """However many have gone: none of them had the request, so it is no suspect either."""

    async def scenario(made: World) -> None:
        for address in list(made.network.prefill)[:gone]:
            await vanish(made.network.prefill[address])
        first = await served_right(made, "first")
        assert (first.trail.attempts, first.trail.deaths) == (1, 0)
        assert len(first.trail.avoid_prefill) == gone
        assert made.fleet.usable()[Role.PREFILL] == 1
        second = await served_right(made, "second")
        assert second.trail.avoid_prefill == set()

    simulated(gone + 1, scenario)


def test_where_the_only_worker_has_gone_it_is_said_soon_and_no_attempt_is_wasted() -> None:
    async def scenario(made: World) -> None:
        await vanish(made.network.prefill["p0:1"])
        served, began_s = made.ask("r", PROMPT, GREEDY), now_s()
        with pytest.raises(ServingError, match="no prefill worker is reachable") as told:
            await made.serve(served)
        assert told.value.reason is Reason.POOL_UNAVAILABLE
        assert (served.trail.attempts, served.trail.deaths) == (1, 0)
        assert now_s() - began_s < POOL_WAIT_LOST_S + 0.5

    simulated(1, scenario)


def test_a_worker_that_is_started_again_in_time_serves_who_found_it_gone() -> None:
    async def scenario(made: World) -> None:
        node = made.network.prefill["p0:1"]
        await vanish(node)
        serving = asyncio.create_task(served_right(made, "r"))
        await asyncio.sleep(POOL_WAIT_LOST_S / 4)
        await node.start()
        served = await serving
        assert served.trail.deaths == 0

    simulated(1, scenario)
