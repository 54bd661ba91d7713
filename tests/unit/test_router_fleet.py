"""Workers join and leave a running router; a stop finishes its releases."""

import asyncio

from services.router.held import Held
from splitwave.core.generation import Sampling
from splitwave.core.worker import Role
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
