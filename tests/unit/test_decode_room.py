"""Grants at a decode worker: pushed, asked for, taken, returned, refused."""

import asyncio
from dataclasses import replace

from splitwave.core.errors import Reason
from splitwave.core.session import AskGrant, ReturnGrants, TakeGrant
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter
from tests.unit.worker_rig import DECODE, PREFILL, rig


def test_grants_are_pushed_taken_returned_and_come_back_by_time() -> None:
    async def main() -> None:
        async with rig(PREFILL, DECODE) as r:
            router = HandRouter()
            r.connect(router)
            pushed = [await router.grants.get() for _ in range(4)]
            assert {g.ask_id for g in pushed} == {""}
            assert all(1.0 < g.ttl_s <= 1.5 for g in pushed)
            assert r.decode.load().seats_used == (4,)

            router.send(TakeGrant(pushed[0].grant_id, 2, 60.0))
            router.send(ReturnGrants((pushed[1].grant_id,)))
            await asyncio.sleep(10.0)
            grants = r.decode.room.table.grants_of("s1")
            assert [(g.grant_id, g.blocks) for g in grants if g.taken] == [("g1", 2)]
            assert len(grants) == 5
            assert router.load is not None
            assert router.load.seats_free == 64 - 5

    run(main())


def test_an_ask_that_no_room_comes_free_for_is_refused_with_a_time() -> None:
    async def main() -> None:
        async with rig(PREFILL, replace(DECODE, seats_per_rank=1)) as r:
            router = HandRouter()
            r.connect(router)
            await router.grant()
            router.send(AskGrant("late", 4, 0.5))
            router.send(AskGrant("huge", 5000, 0.5))
            await asyncio.sleep(1.0)

            assert router.ask_refusals["late"].reason is Reason.OVERLOADED
            assert router.ask_refusals["late"].retry_after_s is not None
            assert router.ask_refusals["huge"].reason is Reason.INVALID_REQUEST

    run(main())


def test_every_ask_has_one_answer_and_rooms_never_exceed_the_ranks() -> None:
    async def main() -> None:
        few = replace(DECODE, ranks=2, seats_per_rank=3, blocks_per_rank=400)
        async with rig(PREFILL, few) as r:
            routers = [HandRouter(f"s{n}") for n in range(6)]
            for router in routers:
                r.connect(router)
            for n in range(20):
                for router in routers:
                    router.send(AskGrant(f"x{n}", 1 + n * 7, 0.5 + n * 0.1))
                await asyncio.sleep(0.05)
                r.decode.room.check()
            await asyncio.sleep(30.0)

            for router in routers:
                granted = []
                while not router.grants.empty():
                    granted.append(router.grants.get_nowait().ask_id)
                answers = sorted([x for x in granted if x] + list(router.ask_refusals))
                assert answers == sorted(f"x{n}" for n in range(20))
            assert r.decode.room.load().asks_waiting == 0

    run(main())


def test_rooms_of_a_load_that_changed_are_told_to_every_router() -> None:
    async def main() -> None:
        async with rig(PREFILL, DECODE) as r:
            first, second = HandRouter("s1"), HandRouter("s2")
            r.connect(first)
            r.connect(second)
            await first.grant(100)
            await asyncio.sleep(0.3)

            assert first.load is not None
            assert first.load == second.load
            assert first.load.blocks_free == 1024 - sum(r.decode.room.table.blocks_used)

    run(main())
