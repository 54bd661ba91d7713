"""Workers join and leave a running router; a stop finishes its releases."""

import asyncio
from dataclasses import replace

from services.router.fleet import PREFILL_LINGER_S
from services.router.held import Held
from splitwave.core.generation import Sampling
from splitwave.core.worker import Role
from splitwave.engine.sim import SimSettings
from tests.sim import virtual_loop
from tests.sim.router_world import EMPTY, Plan, world
from tests.sim.weather import now_s

GREEDY = Sampling(max_tokens=40, temperature=0.0)
PROMPT = tuple(range(40, 80))


def test_a_decode_worker_that_leaves_the_list_finishes_what_runs_there() -> None:
    async def scenario() -> None:
        async with world(Plan(decode_nodes=2)) as w:
            await w.ready()
            asked = [w.ask(f"r{i}", (*PROMPT, i), GREEDY) for i in range(8)]
            streams = [asyncio.create_task(w.serve(served)) for served in asked]
            await asyncio.sleep(0.3)

            w.fleet.list_decode(["d1:1"])
            late = w.ask("late", PROMPT, GREEDY)
            await w.serve(late)
            await asyncio.gather(*streams)
            await asyncio.sleep(5.0)

            assert w.network.prefills == 9, "nothing had to be tried again"
            assert not w.network.decode["d0:1"].connections
            assert w.fleet.usable() == {Role.PREFILL: 1, Role.DECODE: 1}

    virtual_loop.run(scenario())


def test_workers_that_are_listed_later_get_work() -> None:
    async def scenario() -> None:
        async with world(Plan(prefill_nodes=2, decode_nodes=2)) as w:
            await w.ready()
            w.fleet.list_decode(["d0:1"])
            w.fleet.list_prefill(["p0:1"])
            await asyncio.sleep(70.0)
            assert w.fleet.usable() == {Role.PREFILL: 1, Role.DECODE: 1}

            w.fleet.list_decode(["d1:1"])
            w.fleet.list_prefill(["p1:1"])
            await asyncio.sleep(5.0)
            served = w.ask("r", PROMPT, GREEDY)
            await w.serve(served)

            assert served.sink.token_ids == w.right_tokens(served)
            assert w.fleet.sessions()[0].welcome.worker_id == "d1:1"  # type: ignore[union-attr]  # open by now

    virtual_loop.run(scenario())


def test_a_stop_waits_for_releases_that_are_under_way() -> None:
    async def scenario() -> None:
        plan = Plan()
        async with world(plan) as w:
            await w.ready()
            stopping = w.network.prefill["p0:1"]
            held = Held("h", w.fleet.releases.start)
            with held:
                held.asked("p0:1")
            assert stopping.worker is not None
            leases = stopping.worker.floor.leases
            assert not leases.released_early("h")
            await w.fleet._stop()  # noqa: SLF001  # what leaving `running` does
            assert leases.released_early("h")

    virtual_loop.run(scenario())


def test_a_release_that_nobody_answers_is_given_up_and_counted() -> None:
    async def scenario() -> None:
        async with world(Plan()) as w:
            await w.ready()
            await w.network.prefill["p0:1"].kill()
            with w.fleet.hold("h") as held:
                held.asked("p0:1")
            began_s = now_s()
            await w.fleet.releases.drained()

            assert w.fleet.releases.left_to_expiry == 1
            assert now_s() - began_s < 5.0
            assert (await w.held())["leases"] == EMPTY["leases"]

    virtual_loop.run(scenario())


def test_a_decode_worker_that_is_listed_again_while_it_leaves_gets_a_session() -> None:
    async def scenario() -> None:
        async with world(Plan(decode_nodes=2)) as w:
            await w.ready()
            served = w.ask("r", PROMPT, replace(GREEDY, max_tokens=200))
            stream = asyncio.create_task(w.serve(served))
            while not any(peer.session.running for peer in w.fleet.decode_peers()):  # noqa: ASYNC110  # nothing says so
                await asyncio.sleep(0.01)
            (busy,) = [peer for peer in w.fleet.decode_peers() if peer.session.running]
            others = [x.address for x in w.fleet.decode_peers() if x is not busy]
            w.fleet.list_decode(others)
            await asyncio.sleep(0.5)

            node = w.network.decode[busy.address]
            await node.kill()  # Its session ends, and with that whoever kept it.
            await node.start()
            while not busy.session.over:  # noqa: ASYNC110  # nothing says so
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            w.fleet.list_decode([*others, busy.address])
            await stream
            await asyncio.sleep(5.0)

            assert w.fleet.usable() == {Role.PREFILL: 1, Role.DECODE: 2}

    virtual_loop.run(scenario())


def test_a_prefill_worker_whose_name_comes_and_goes_is_not_lost() -> None:
    async def scenario() -> None:
        async with world(Plan()) as w:
            await w.ready()
            for _ in range(12):
                w.fleet.list_prefill([])
                await asyncio.sleep(PREFILL_LINGER_S / 4)
                w.fleet.list_prefill(["p0:1"])
                await asyncio.sleep(PREFILL_LINGER_S / 8)
                assert w.fleet.usable()[Role.PREFILL] == 1

    virtual_loop.run(scenario())


def test_a_leave_that_began_before_the_last_one_does_not_shorten_it() -> None:
    async def scenario() -> None:
        async with world(Plan()) as w:
            await w.ready()
            w.fleet.list_prefill([])
            await asyncio.sleep(PREFILL_LINGER_S - 10.0)
            w.fleet.list_prefill(["p0:1"])
            w.fleet.list_prefill([])
            await asyncio.sleep(15.0)

            assert w.fleet.prefill_pool.by_worker("p0:1") is not None, "releases go there yet"

    virtual_loop.run(scenario())


def test_a_prefill_worker_stays_reachable_while_a_prompt_is_computed_there() -> None:
    async def scenario() -> None:
        slow = SimSettings(role=Role.PREFILL, step_fixed_s=2 * PREFILL_LINGER_S, lease_ttl_s=600)
        async with world(Plan(prefill=slow)) as w:
            await w.ready()
            closed: list[bool] = []
            (peer,) = w.fleet.prefill_peers()

            async def close() -> None:
                closed.append(True)

            peer.transport.close = close  # type: ignore[method-assign]  # looks whether it happens
            stream = asyncio.create_task(w.serve(w.ask("r", PROMPT, GREEDY)))
            await asyncio.sleep(1.0)
            w.fleet.list_prefill([])
            await asyncio.sleep(1.5 * PREFILL_LINGER_S)
            assert not closed
            await stream
            await asyncio.sleep(2.0)
            assert closed

    virtual_loop.run(scenario())


def test_what_a_pool_holds_is_unknown_while_one_of_its_workers_has_not_said() -> None:
    """A worker that is away may have room for any number: nothing is refused for ever."""

    async def scenario() -> None:
        async with world(Plan(decode_nodes=2)) as w:
            await w.ready()
            sessions = w.fleet.sessions()
            of_each = [x.welcome.completions_max(64) for x in sessions if x.welcome is not None]
            assert w.fleet.completions_max(64) == sum(count or 0 for count in of_each) > 0

            w.fleet.list_decode(["d0:1", "d1:1", "nobody:1"])
            assert w.fleet.completions_max(64) is None

            w.fleet.list_decode(["d0:1"])
            assert w.fleet.completions_max(64) == of_each[0]

    virtual_loop.run(scenario())
