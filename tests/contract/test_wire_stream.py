"""Streams and connections over real gRPC: a client that leaves, a server that stops, limits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from splitwave.core.errors import Reason
from splitwave.wire import channel, stubs
from splitwave.wire.errors import from_rpc_error
from splitwave.wire.stream import emitter

Context = grpc.aio.ServicerContext[bytes, bytes]
Handler = Callable[[bytes, Context], Awaitable[None]]
Stream = grpc.aio.UnaryStreamCall[bytes, bytes]


@asynccontextmanager
async def calling(handler: Handler) -> AsyncIterator[tuple[grpc.aio.Server, Stream]]:
    """A server with one streaming method, and a call of it, with the options that we use."""
    server = grpc.aio.server(options=channel.SERVER_OPTIONS)
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Stream", {"Call": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(target, options=channel.CHANNEL_OPTIONS) as opened:
            method_of: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = opened.unary_stream(
                "/test.Stream/Call"
            )
            yield server, method_of(b"")
    finally:
        await server.stop(0)


class Flood:
    """Writes until it cannot; `ended` is what stopped it."""

    def __init__(self, *, translated: bool) -> None:
        self.translated = translated
        self.written = 0
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def run(self, _: bytes, context: Context) -> None:
        emit = emitter(context) if self.translated else context.write
        try:
            while True:
                await emit(b"x" * 60_000)
                self.written += 1
        except BaseException as error:
            self.ended.set_result(error)
            raise

    async def blocked(self) -> None:
        """Return once flow control has held a write up for a while."""
        before = -1
        while self.written != before:
            before = self.written
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("translated", "seen"),
    [(True, asyncio.CancelledError), (False, grpc.aio.InternalError)],
    ids=["with the emitter", "without it"],
)
async def test_a_client_that_leaves_under_back_pressure_is_a_cancellation(
    translated: bool, seen: type[BaseException]
) -> None:
    flood = Flood(translated=translated)
    async with calling(flood.run) as (_, call):
        await flood.blocked()
        call.cancel()

        error = await asyncio.wait_for(flood.ended, 10)

    assert isinstance(error, seen)


async def test_the_emitter_sends_in_order() -> None:
    async def count(_: bytes, context: Context) -> None:
        emit = emitter(context)
        for i in range(3):
            await emit(bytes([i]))

    async with calling(count) as (_, call):
        assert [message async for message in call] == [b"\0", b"\1", b"\2"]


async def test_a_server_that_goes_away_in_a_call_is_a_lost_worker() -> None:
    started = asyncio.Event()

    async def hang(_: bytes, context: Context) -> None:
        await context.write(b"on")
        started.set()
        await asyncio.Event().wait()

    async with calling(hang) as (server, call):
        await asyncio.wait_for(started.wait(), 10)
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in call]

    assert from_rpc_error(caught.value).reason is Reason.WORKER_LOST


async def test_a_handler_that_breaks_without_a_reason_is_a_lost_worker() -> None:
    async def fail(_: bytes, context: Context) -> None:
        raise ZeroDivisionError

    async with calling(fail) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in call]

    assert from_rpc_error(caught.value).reason is Reason.WORKER_LOST


async def test_a_message_above_the_limit_is_our_bug_and_not_a_lost_worker() -> None:
    async def exceed(_: bytes, context: Context) -> None:
        await context.write(b"x" * (channel.MESSAGE_BYTES_MAX + 1))

    async with calling(exceed) as (_, call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in call]

    assert from_rpc_error(caught.value).reason is Reason.INTERNAL


async def test_a_taken_port_is_an_error() -> None:
    first = grpc.aio.server(options=channel.SERVER_OPTIONS)
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    second = grpc.aio.server(options=channel.SERVER_OPTIONS)

    try:
        with pytest.raises(RuntimeError, match="bind"):
            second.add_insecure_port(f"127.0.0.1:{port}")
    finally:
        await first.stop(0)
        await second.stop(0)


def test_a_client_pings_less_often_than_its_server_permits() -> None:
    ours = dict(channel.CHANNEL_OPTIONS)
    theirs = dict(channel.SERVER_OPTIONS)

    for permitted in (
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.min_recv_ping_interval_without_data_ms",
    ):
        assert ours["grpc.keepalive_time_ms"] > theirs[permitted]
        assert theirs["grpc.keepalive_time_ms"] > theirs[permitted]
    assert ours["grpc.max_receive_message_length"] == theirs["grpc.max_send_message_length"]
    assert ours["grpc.enable_retries"] == 0


async def test_each_service_has_a_stub() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as opened:
        assert callable(stubs.generate_stub(opened).Generate)
        assert callable(stubs.prefill_stub(opened).Prefill)
        assert callable(stubs.decode_stub(opened).Session)
        assert callable(stubs.worker_stub(opened).DescribeWorker)
