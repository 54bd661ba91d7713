"""The order of a stop: unready, refuse, finish, close. And what DrainWorker does."""

import asyncio
from dataclasses import replace
from typing import Any  # the published stubs lack Health's methods

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitwave.core.errors import Reason
from splitwave.core.session import Granted
from splitwave.wire.client import describe_worker, drain_worker
from splitwave.wire.errors import from_rpc_error
from splitwave.wire.stubs import worker_stub
from splitwave.wire.worker import observation_from_proto, watch_request
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
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    """Ask for the health of one service."""
    request = health_pb2.HealthCheckRequest(service=service)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(request, timeout=5.0)).status)


async def test_each_service_has_its_health() -> None:
    async with stack() as s:
        for channel, name in ((s.prefill.channel, "Prefill"), (s.decode.channel, "Decode")):
            for service in ("", f"splitwave.v1alpha1.{name}Service"):
                for _ in range(100):
                    if await health(channel, service) == SERVING:
                        break
                    await asyncio.sleep(0.02)
                assert await health(channel, service) == SERVING


async def test_a_stop_is_unready_first_then_refuses_finishes_and_closes_the_engine() -> None:
    slow = replace(DECODE, step_fixed_s=0.01)
    config = replace(DECODE_CONFIG, drain_unready_s=0.3, drain_grace_s=10.0)
    async with stack(PREFILL, slow, decode_config=config) as s:
        router = HandRouter()
        session = s.connect(router)
        sampling = replace(GREEDY, max_tokens=100)
        heard = await s.start_one(router, "a/0/1", PROMPT, sampling)
        s.decode.stop.set()
        await asyncio.sleep(0.1)
        assert await health(s.decode.channel) == NOT_SERVING
        late = await s.start_one(router, "b/0/1", PROMPT)  # Not refused yet.
        await asyncio.sleep(0.3)
        granted = Granted("whatever", 0, 4, 1.0)
        result = await s.prefill_one("c/0/1", PROMPT)
        assert result.handoff is not None
        refused = router.submit(submission("c/0/1", granted, result.handoff, PROMPT, GREEDY))
        await refused.over.wait()
        assert refused.refused is not None
        assert refused.refused.reason is Reason.WORKER_DRAINING
        assert (await s.decode.engine.counters())[0] is not None  # It is not closed yet.
        await heard.over.wait()
        await late.over.wait()
        assert heard.token_ids == right_answer(PROMPT, sampling)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await session
        assert from_rpc_error(ended.value).reason is Reason.WORKER_DRAINING
        assert await s.decode.task == 0


async def test_a_drain_that_takes_too_long_is_cut_short() -> None:
    config = replace(DECODE_CONFIG, drain_grace_s=0.3)
    async with stack(PREFILL, replace(DECODE, step_fixed_s=0.05), decode_config=config) as s:
        router = HandRouter()
        session = s.connect(router)
        heard = await s.start_one(router, "a/0/1", PROMPT, replace(GREEDY, max_tokens=3000))
        await eventually(lambda: heard.accepted is not None)
        began_s = asyncio.get_running_loop().time()
        s.decode.stop.set()
        assert await s.decode.task == 0
        assert asyncio.get_running_loop().time() - began_s < 4.0
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await session
        assert from_rpc_error(ended.value).reason is Reason.WORKER_DRAINING
        await eventually(lambda: s.prefill_worker.outstanding() == 0)


async def test_a_prefill_worker_waits_until_its_handoffs_have_ended() -> None:
    async with stack() as s:
        handoff = (await s.prefill_one("h1", PROMPT)).handoff
        assert handoff is not None
        assert await drain_worker(s.prefill.channel, "test", 5.0) == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await s.prefill_one("h2", PROMPT)
        assert from_rpc_error(refused.value).reason is Reason.WORKER_DRAINING
        s.prefill.stop.set()
        await asyncio.sleep(0.3)
        assert not s.prefill.task.done()

        await s.confirm(handoff)
        assert await s.prefill.task == 0


async def test_a_worker_describes_itself_and_says_how_it_is() -> None:
    async with stack() as s:
        router = HandRouter()
        s.connect(router)
        heard = await s.start_one(router, "a/0/1", PROMPT)
        await heard.over.wait()
        await eventually(s.is_empty)
        prefill = await describe_worker(s.prefill.channel, 5.0, counters=True)
        decode = await describe_worker(s.decode.channel, 5.0, counters=True)

        assert (prefill.role.value, decode.role.value) == ("prefill", "decode")
        assert prefill.kv_layout == decode.kv_layout
        assert prefill.leases.pulled == 1
        assert prefill.lease_ttl_s == pytest.approx(PREFILL.lease_ttl_s - 1.0)
        assert sum(x.pulls for x in decode.rank_counters) == 1
        assert [x.prefill_tokens_computed for x in decode.rank_counters] == [0, 0]
        assert prefill.load.ready
        assert decode.load.ready


async def test_a_watch_tells_the_load_at_once_and_when_it_changes() -> None:
    async with stack() as s:
        told: list[tuple[int, bool]] = []

        async def follow() -> None:
            watch = worker_stub(s.prefill.channel).WatchWorker(watch_request("r"))
            async for message in watch:
                _, load = observation_from_proto(message)
                told.append((sum(load.blocks_used), load.draining))

        following = asyncio.create_task(follow())
        await eventually(lambda: told == [(0, False)])
        await s.prefill_one("h1", PROMPT)
        await eventually(lambda: told[-1] == (2, False))
        await s.release("h1")
        await drain_worker(s.prefill.channel, "test", 5.0)
        await eventually(lambda: told[-1] == (0, True))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
