"""Health by progress: a worker whose engine stands still while there is work is not healthy."""

import asyncio
from dataclasses import replace

from splitwave.engine.sim import RankPause, SimFaults
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter
from tests.unit.worker_rig import DECODE, DECODE_CONFIG, GREEDY, PREFILL, PREFILL_CONFIG, rig

PROMPT = list(range(40, 60))
PAUSE = SimFaults(pauses=(RankPause(rank=0, at_step=3, pause_s=20.0),))


def test_an_idle_worker_is_healthy_for_ever() -> None:
    async def main() -> None:
        async with rig() as r:
            await asyncio.sleep(1000.0)
            assert r.prefill.healthy()
            assert r.decode.healthy()

    run(main())


def test_a_prefill_worker_that_stands_still_is_unhealthy_until_it_steps_again() -> None:
    async def main() -> None:
        config = replace(PREFILL_CONFIG, health_stall_s=5.0)
        async with rig(replace(PREFILL, faults=PAUSE), prefill_config=config) as r:
            for n in range(2):
                await r.prefill_one(f"h{n}", PROMPT)
            stuck = asyncio.create_task(r.prefill_one("h2", PROMPT))
            await asyncio.sleep(4.9)
            assert r.prefill.healthy()
            await asyncio.sleep(0.5)
            assert not r.prefill.healthy()
            await stuck
            assert r.prefill.healthy()

    run(main())


def test_a_decode_worker_that_stands_still_is_unhealthy_until_it_steps_again() -> None:
    async def main() -> None:
        config = replace(DECODE_CONFIG, health_stall_s=5.0)
        async with rig(PREFILL, replace(DECODE, faults=PAUSE), decode_config=config) as r:
            router = HandRouter()
            r.connect(router)
            await asyncio.sleep(50.0)  # Idle for long: that is no stall.
            heard = await r.start_one(router, "a/0/1", PROMPT, replace(GREEDY, max_tokens=50))
            await asyncio.sleep(4.5)
            assert r.decode.healthy()
            await asyncio.sleep(1.0)
            assert not r.decode.healthy()
            await asyncio.sleep(4.0)
            await heard.over.wait()
            assert heard.error is not None  # Its patience was 10 s.
            await asyncio.sleep(1.0)
            assert r.decode.healthy()

    run(main())
