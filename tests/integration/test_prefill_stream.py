"""A router's calls to a prefill worker over real gRPC: on one stream, or each by itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from services.prefill.servicer import PrefillServicer
from services.router.attempts import Unreached
from services.router.transport import GrpcPrefill
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.v1alpha1 import prefill_service_pb2_grpc as pb_grpc

CALL = PrefillCall(
    request_id="r",
    handoff_id="h",
    token_ids=[1, 2, 3],
    sampling=Sampling(max_tokens=1),
    keep_first_token=True,
    kv_layout="",
)
RESULT = PrefillResult(token_id=7, finish_reason=FinishReason.LENGTH)


class Worker:
    """Answers every call."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def prefill(self, call: PrefillCall, deadline: object) -> PrefillResult:
        if call.handoff_id == "full":
            raise ServingError(Reason.OVERLOADED, "full", retry_after_s=0.5)
        if call.handoff_id == "slow":
            self.began.set()
            try:
                await asyncio.sleep(60.0)
            finally:
                self.cancelled.set()
        return RESULT


class Counting(PrefillServicer):
    """Counts calls by their kind."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)  # type: ignore[arg-type]  # workers have more than it uses
        self.alone = self.streams = 0
        self.server: grpc.aio.Server | None = None

    async def stop(self, grace_s: float) -> None:
        """End the server, and with it what runs there."""
        assert self.server is not None
        await self.server.stop(grace_s)

    async def Prefill(self, request, context):  # type: ignore[no-untyped-def]  # untyped like the class above it
        self.alone += 1
        return await super().Prefill(request, context)

    async def PrefillMany(self, request_iterator, context):  # type: ignore[no-untyped-def,override]  # untyped like the class above it
        self.streams += 1
        await super().PrefillMany(request_iterator, context)


@contextlib.asynccontextmanager
async def connected(*, old: bool = False) -> AsyncIterator[tuple[Worker, Counting, GrpcPrefill]]:
    """A router's way to a worker; `old`: one of a version without the stream."""
    worker = Worker()
    servicer = Counting(worker)
    server = servicer.server = grpc.aio.server()
    if old:
        method = grpc.unary_unary_rpc_method_handler(
            servicer.Prefill,
            request_deserializer=pb.PrefillRequest.FromString,
            response_serializer=pb.PrefillResponse.SerializeToString,
        )
        name = "splitwave.v1alpha1.PrefillService"
        handler = grpc.method_handlers_generic_handler(name, {"Prefill": method})
        server.add_generic_rpc_handlers((handler,))
    else:
        pb_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    transport = GrpcPrefill(f"127.0.0.1:{port}")
    try:
        yield worker, servicer, transport
    finally:
        await transport.close()
        await server.stop(0)


def named(name: str) -> PrefillCall:
    return replace(CALL, handoff_id=name)


async def test_calls_share_one_stream() -> None:
    async with connected() as (_, servicer, transport):
        calls = (transport.prefill(named(f"h{i}"), 10.0) for i in range(20))

        assert await asyncio.gather(*calls) == [RESULT] * 20
        assert (servicer.streams, servicer.alone) == (1, 0)


async def test_a_failure_of_one_call_leaves_the_stream() -> None:
    async with connected() as (_, servicer, transport):
        with pytest.raises(ServingError) as caught:
            await transport.prefill(named("full"), 10.0)

        assert (caught.value.reason, caught.value.retry_after_s) == (Reason.OVERLOADED, 0.5)
        assert await transport.prefill(CALL, 10.0) == RESULT
        assert servicer.streams == 1


async def test_a_call_that_is_cancelled_stops_at_the_worker() -> None:
    async with connected() as (worker, _, transport):
        task = asyncio.create_task(transport.prefill(named("slow"), 10.0))
        await worker.began.wait()
        task.cancel()

        async with asyncio.timeout(10.0):
            await worker.cancelled.wait()
        assert await transport.prefill(CALL, 10.0) == RESULT


async def test_a_router_that_goes_away_takes_its_calls_with_it() -> None:
    async with connected() as (worker, _, transport):
        task = asyncio.create_task(transport.prefill(named("slow"), 10.0))
        await worker.began.wait()
        await transport.close()

        async with asyncio.timeout(10.0):
            await worker.cancelled.wait()
        with pytest.raises(ServingError):
            await task


async def test_an_old_worker_serves_each_call_by_itself() -> None:
    async with connected(old=True) as (_, servicer, transport):
        calls = (transport.prefill(named(f"h{i}"), 10.0) for i in range(3))

        assert await asyncio.gather(*calls) == [RESULT] * 3
        assert await transport.prefill(CALL, 10.0) == RESULT
        assert (servicer.streams, servicer.alone) == (0, 4)


async def test_a_call_whose_answer_may_be_large_goes_by_itself() -> None:
    async with connected() as (_, servicer, transport):
        await transport.prefill(replace(CALL, prompt_logprobs=1), 10.0)

        assert (servicer.streams, servicer.alone) == (0, 1)


async def test_a_worker_that_is_not_there_was_not_reached_by_the_call() -> None:
    gone = GrpcPrefill("127.0.0.1:1")
    for _ in range(3):
        with pytest.raises(Unreached):
            await gone.prefill(CALL, 10.0)
    await gone.close()


async def test_a_worker_that_ends_with_a_call_had_it_and_is_not_reached_by_the_next() -> None:
    async with connected() as (worker, server, transport):
        running = asyncio.create_task(transport.prefill(named("slow"), 10.0))
        await worker.began.wait()
        await server.stop(0)

        with pytest.raises(ServingError) as caught:
            await running
        assert caught.value.reason is Reason.WORKER_LOST
        assert not isinstance(caught.value, Unreached), "it may be why the worker has ended"
        with pytest.raises(Unreached):
            await transport.prefill(CALL, 10.0)
