"""Handoffs over real gRPC: who releases, who confirms, and what an expired lease leads to."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.engine.sim import SimFaults
from splitwave.wire.errors import from_rpc_error
from tests.integration.worker_stack import (
    DECODE,
    GREEDY,
    PREFILL,
    PREFILL_CONFIG,
    Stack,
    eventually,
    stack,
)
from tests.unit.hand_router import HandRouter, Heard
from tests.unit.worker_rig import right_answer

PROMPT = list(range(40, 60))
LONG_LEASE = replace(PREFILL, lease_ttl_s=600.0)
SHORT_LEASE = replace(PREFILL, lease_ttl_s=0.5)
SHORT_MARGIN = replace(PREFILL_CONFIG, lease_margin_s=0.2)
SLOW_PULL = replace(DECODE, faults=SimFaults(pull_delay_rate=1.0, pull_delay_s=1.0))


async def refused(call: Awaitable[object]) -> ServingError:
    """The error that a call must end with, as its caller reads it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_a_call_without_a_deadline_is_refused() -> None:
    async with stack() as s:
        call = asyncio.ensure_future(s.prefill_one("h1", PROMPT, timeout_s=None))
        assert (await refused(call)).reason is Reason.DEADLINE_REQUIRED


async def test_a_release_may_come_before_its_prefill() -> None:
    async with stack(LONG_LEASE) as s:
        assert await s.release("h1")
        call = asyncio.ensure_future(s.prefill_one("h1", PROMPT))
        assert (await refused(call)).reason is Reason.CANCELLED
        assert s.is_empty()


async def test_a_client_that_leaves_frees_what_was_computed_for_it() -> None:
    async with stack(replace(LONG_LEASE, step_fixed_s=0.05)) as s:
        for n in range(12):
            call = asyncio.ensure_future(s.prefill_one(f"h{n}", PROMPT))
            await asyncio.sleep(0.005 * n)
            call.cancel()
        await eventually(s.is_empty, within_s=2.0)


async def late_pull(s: Stack) -> Heard:
    """An attempt whose lease ends during its pull."""
    router = HandRouter()
    s.connect(router)
    heard = await s.start_one(router, "a/0/1", PROMPT)
    async with asyncio.timeout(5.0):
        await heard.over.wait()
    return heard


async def test_a_lease_that_ends_during_the_pull_shows_no_token() -> None:
    async with stack(SHORT_LEASE, SLOW_PULL, prefill_config=SHORT_MARGIN) as s:
        heard = await late_pull(s)

        assert heard.error is not None
        assert heard.error.reason is Reason.HANDOFF_EXPIRED
        assert heard.token_ids == right_answer(PROMPT, GREEDY)[:1]
        await eventually(s.is_empty)
        assert s.prefill_worker.lease_counts().expired == 1


async def test_without_the_fence_the_wrong_text_appears() -> None:
    async with stack(SHORT_LEASE, SLOW_PULL, prefill_config=SHORT_MARGIN) as s:
        s.decode_worker.decoding.is_fenced = False
        heard = await late_pull(s)

        assert heard.error is None
        assert heard.token_ids != right_answer(PROMPT, GREEDY)


async def test_a_confirmation_after_the_lease_is_refused() -> None:
    async with stack(SHORT_LEASE, prefill_config=SHORT_MARGIN) as s:
        handoff = (await s.prefill_one("h1", PROMPT)).handoff
        assert handoff is not None
        await s.confirm(handoff)
        again = await refused(asyncio.ensure_future(s.confirm(handoff)))
        assert again.reason is Reason.HANDOFF_EXPIRED

        late = (await s.prefill_one("h2", PROMPT)).handoff
        assert late is not None
        await asyncio.sleep(0.4)
        error = await refused(asyncio.ensure_future(s.confirm(late)))
        assert error.reason is Reason.HANDOFF_EXPIRED
        other = replace(handoff, epoch=handoff.epoch + 1)
        error = await refused(asyncio.ensure_future(s.confirm(other)))
        assert error.reason is Reason.EPOCH_MISMATCH


async def test_a_prefill_worker_that_is_gone_costs_its_attempts_only() -> None:
    async with stack(LONG_LEASE, SLOW_PULL) as s:
        router = HandRouter()
        s.connect(router)
        heard = await s.start_one(router, "a/0/1", PROMPT)
        s.prefill.stop.set()
        s.prefill_worker.release("a/0/1")  # So that its drain ends.
        await s.prefill.task
        async with asyncio.timeout(10.0):
            await heard.over.wait()

        assert heard.error is not None
        assert heard.error.reason is Reason.HANDOFF_EXPIRED
        await eventually(lambda: s.decode_worker.outstanding() == 0, within_s=10.0)
        assert s.decode_worker.holdings.releases.failed == 1
