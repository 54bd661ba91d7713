"""Sessions over real gRPC: streams that are reset, routers that vanish, submissions too large."""

import asyncio
import contextlib
from dataclasses import replace

import grpc.aio

from splitwave.core.errors import Reason
from splitwave.core.session import AskGrant, Cancel
from splitwave.engine.sim import SimFaults
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.stubs import decode_stub
from tests.integration.worker_stack import (
    DECODE,
    DECODE_CONFIG,
    GREEDY,
    PREFILL,
    eventually,
    stack,
)
from tests.unit.hand_router import HandRouter, submission
from tests.unit.worker_rig import right_answer

PROMPT = list(range(40, 60))
LONG_LEASE = replace(PREFILL, lease_ttl_s=600.0)
SLOW_STEPS = replace(DECODE, step_fixed_s=0.01)


async def test_a_reset_under_64_streams_loses_and_repeats_nothing() -> None:
    config = replace(DECODE_CONFIG, grant_float_max=0)
    async with stack(PREFILL, SLOW_STEPS, decode_config=config) as s:
        router = HandRouter()
        session = s.connect(router)
        sampling = replace(GREEDY, max_tokens=150)
        prompts = {f"a{n}/0/1": [n + 1] * 20 for n in range(64)}
        heard = {x: await s.start_one(router, x, p, sampling) for x, p in prompts.items()}
        for _ in range(3):
            await asyncio.sleep(0.2)
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
            await asyncio.sleep(0.1)
            session = s.connect(router, reattach=True)
            await router.welcomed.wait()
            assert router.welcome is not None
            assert router.welcome.reattached
        for name, prompt in prompts.items():
            await heard[name].over.wait()
            assert heard[name].token_ids == right_answer(prompt, sampling)
            assert heard[name].offsets == list(range(150))
        assert s.prefill_worker.lease_counts().started == 64
        await eventually(s.is_empty)


async def test_a_cancel_frees_both_pools_within_two_seconds() -> None:
    slow_pull = SimFaults(pull_delay_rate=0.5, pull_delay_s=0.5)
    async with stack(LONG_LEASE, replace(SLOW_STEPS, faults=slow_pull)) as s:
        router = HandRouter()
        s.connect(router)
        sampling = replace(GREEDY, max_tokens=1000)
        for n in range(12):
            name = f"a{n}/0/1"
            await s.start_one(router, name, PROMPT, sampling)
            await asyncio.sleep(0.005 * n)
            router.send(Cancel((name,)))
        await eventually(s.is_empty, within_s=2.0)
        assert sum(s.decode_worker.room.table.seats_held) == 0
        assert s.prefill_worker.lease_counts().expired == 0


async def test_grants_and_work_come_back_when_a_router_vanishes() -> None:
    async with stack(LONG_LEASE, SLOW_STEPS) as s:
        router = HandRouter()
        session = s.connect(router)
        for n in range(4):
            await s.start_one(router, f"a{n}/0/1", PROMPT, replace(GREEDY, max_tokens=2000))
        router.send(AskGrant("whole", 1024, 60.0))
        await eventually(lambda: sum(s.decode_worker.room.table.seats_held) == 4)
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert sum(s.decode_worker.room.table.seats_held) == 4  # It may yet come back.

        await eventually(lambda: not s.decode_worker.sessions.by_id, within_s=2.0)
        await eventually(s.is_empty, within_s=2.0)
        assert s.decode_worker.room.table.seats_used == [0, 0]
        assert s.decode_worker.room.table.blocks_used == [0, 0]


async def test_a_submission_over_the_limit_ends_alone() -> None:
    async with stack() as s:
        router = HandRouter()
        s.connect(router)
        good = await s.start_one(router, "good/0/1", PROMPT)
        granted = await router.grant()
        result = await s.prefill_one("big/0/1", PROMPT)
        assert result.handoff is not None
        submit = submission("big/0/1", granted, result.handoff, PROMPT, GREEDY)
        big = router.submit(replace(submit, token_ids=[200] * 6_000_000))
        async with asyncio.timeout(20.0):
            await big.over.wait()
            await good.over.wait()

        assert big.refused is not None
        assert big.refused.reason is Reason.INVALID_REQUEST
        assert good.token_ids == right_answer(PROMPT, GREEDY)
        after = await s.start_one(router, "after/0/1", PROMPT)
        await after.over.wait()
        assert after.token_ids == right_answer(PROMPT, GREEDY)
        assert await s.release("big/0/1")  # It stayed with its router.
        await eventually(s.is_empty)


async def test_every_router_that_breaks_the_contract_hears_of_its_end() -> None:
    """A status that meets a write under way was lost, for one router in ten."""

    async def break_it(channel: grpc.aio.Channel, name: str) -> grpc.StatusCode:
        call = decode_stub(channel).Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(router_id=name, session_id=name)))
        await call.write(pb.SessionRequest(number=2, ask=pb.AskGrant(ask_id="a", blocks=1)))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()

    async with stack() as s:
        async with asyncio.timeout(20.0):
            calls = [break_it(s.decode.channel, f"s{number}") for number in range(200)]
            codes = await asyncio.gather(*calls)

        assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
