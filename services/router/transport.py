"""How workers are reached in production: gRPC, with every failure as a ServingError."""

import asyncio
import contextlib
import functools
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any  # gRPC's types of requests and responses are generated, and stay in the wire

import grpc.aio

from services.router import tracing
from services.router.fleet import Network
from services.router.peer import Gone, Received
from services.router.prefill_stream import NoSuchStream, PrefillStream
from services.router.standings import CALL_TIMEOUT_S
from splitwave.core.errors import Reason, ServingError
from splitwave.core.mode_guard import Action, Standing
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Ack, Hello, RouterMessage
from splitwave.core.worker import WorkerDescription, WorkerLoad
from splitwave.runtime.tracing import as_metadata
from splitwave.wire.batch import responses_in, router_messages_to_proto
from splitwave.wire.certification import judge_request
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.errors import from_rpc_error
from splitwave.wire.prefill import (
    prefill_call_to_proto,
    prefill_result_from_proto,
    release_request,
)
from splitwave.wire.prefill_many import (
    Answer,
    Outgoing,
    answers_from_proto,
    may_share,
    orders_to_proto,
)
from splitwave.wire.session import worker_message_from_proto
from splitwave.wire.stubs import decode_stub, prefill_stub, worker_stub
from splitwave.wire.worker import (
    describe_request,
    description_from_proto,
    observation_from_proto,
    watch_request,
)

LISTENS_WAIT_S = 0.5
"""How long a look may take whether anybody listens."""


class GrpcSession:
    """One call of DecodeService.Session."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call
        self._came: deque[Any] = deque()
        """Messages of the last read that were not asked for yet."""

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None:
        """Send messages, in pieces if one is large."""
        for request in router_messages_to_proto(messages):
            with _failures():
                await self._call.write(request)

    async def receive(self) -> Received | None:
        """The next message, or None once the worker has ended the session."""
        if not self._came:
            with _failures():
                response: Any = await self._call.read()  # raises the status of a call that failed
            if response is grpc.aio.EOF:
                return None
            self._came.extend(responses_in(response))
            if not self._came:
                raise ServingError(Reason.INTERNAL, "batch: empty: a worker broke the contract")
        came = self._came.popleft()
        return Received(came.number, functools.partial(worker_message_from_proto, came))


@contextlib.asynccontextmanager
async def dial_decode(address: str) -> AsyncIterator[GrpcSession]:
    """Open a session's connection; leaving the block breaks it."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = decode_stub(channel).Session()
        try:
            yield GrpcSession(call)
        except ServingError as error:
            if error.reason is Reason.WORKER_LOST and await nobody_listens(address):
                raise Gone(f"nobody listens at {address}: {error.message}") from error
            raise
        finally:
            call.cancel()


async def nobody_listens(address: str) -> bool:
    """True if every host that the address names refuses a connection: what listened has ended."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LISTENS_WAIT_S):
            hosts = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            for family, kind, number, _, where in hosts:
                with socket.socket(family, kind, number) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, where)
                    except ConnectionRefusedError:
                        continue
                    return False
    except (OSError, TimeoutError, ValueError):
        return False  # Whether it lives is not known.
    return bool(hosts)


class GrpcPrefillMany:
    """One call of PrefillService.PrefillMany."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        self._call = call

    async def send(
        self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
    ) -> None:
        """Send calls that begin and those that nobody waits for any more."""
        for request in orders_to_proto(orders, cancelled, now_s):
            with _failures(), _known():
                await self._call.write(request)

    async def receive(self) -> Sequence[Answer] | None:
        """The next answers, or None once the worker has ended the stream."""
        with _failures(), _known():
            response: Any = await self._call.read()  # raises the status of a call that failed
        return None if response is grpc.aio.EOF else answers_from_proto(response)


class GrpcPrefill:
    """A prefill worker's services on one channel."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._prefill = prefill_stub(self._channel)
        self._worker = worker_stub(self._channel)
        self._stream = PrefillStream(self._dial_many)
        self._streams = True
        """False once the worker has said that it serves each call by itself only, until it is
        described again: another version may have taken its place."""

    @contextlib.asynccontextmanager
    async def _dial_many(self) -> AsyncIterator[GrpcPrefillMany]:
        call = self._prefill.PrefillMany()
        try:
            yield GrpcPrefillMany(call)
        finally:
            call.cancel()

    async def describe(self, timeout_s: float) -> WorkerDescription:
        """What the worker is."""
        with _failures():
            answer = await self._worker.DescribeWorker(describe_request(), timeout=timeout_s)
        self._streams = True
        return description_from_proto(answer)

    async def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
        """The group's epoch and its load, at once and then on change."""
        call = self._worker.WatchWorker(watch_request(router_id))
        try:
            while True:
                with _failures():
                    observation: Any = await call.read()
                if observation is grpc.aio.EOF:
                    return
                yield observation_from_proto(observation)
        finally:
            call.cancel()

    async def prefill(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        """Compute one prompt. Cancelling it cancels the call."""
        if self._streams and may_share(call):
            try:
                return await self._stream.prefill(call, timeout_s)
            except NoSuchStream:
                self._streams = False
        return await self._prefill_alone(call, timeout_s)

    async def _prefill_alone(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        metadata = as_metadata(call.traceparent)
        request = prefill_call_to_proto(call)
        with _failures():
            answer = await self._prefill.Prefill(request, timeout=timeout_s, metadata=metadata)
        return prefill_result_from_proto(answer, call.token_ids)

    async def release(self, handoff_id: str, timeout_s: float) -> None:
        """End a handoff that nobody will pull."""
        request, metadata = release_request(handoff_id), as_metadata(tracing.traceparent())
        with _failures():
            await self._prefill.ReleaseHandoff(request, timeout=timeout_s, metadata=metadata)

    async def close(self) -> None:
        """Drop the connection."""
        await self._stream.close()
        await self._channel.close()


class GrpcWorker:
    """A worker's WorkerService on a channel of its own."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._worker = worker_stub(self._channel)

    async def describe(self, timeout_s: float) -> WorkerDescription:
        """What the worker is."""
        with _failures():
            answer = await self._worker.DescribeWorker(describe_request(), timeout=timeout_s)
        return description_from_proto(answer)

    async def standings(self, router_id: str) -> AsyncIterator[tuple[int, Standing]]:
        """The group's epoch and how it stands, at once and then on change."""
        call = self._worker.WatchWorker(watch_request(router_id, standing_only=True))
        try:
            while True:
                with _failures():
                    observation: Any = await call.read()
                if observation is grpc.aio.EOF:
                    return
                epoch, load = observation_from_proto(observation)
                yield epoch, load.standing
        finally:
            call.cancel()

    async def judge(self, epoch: int, action: Action, why: str) -> None:
        """Say what becomes of a decertified group."""
        request = judge_request(epoch, action, why)
        with _failures():
            await self._worker.JudgeWorker(request, timeout=CALL_TIMEOUT_S)

    async def close(self) -> None:
        """Drop the connection."""
        await self._channel.close()


def grpc_network() -> Network:
    """The network of a deployment."""
    return Network(dial_decode=dial_decode, connect_prefill=GrpcPrefill, connect_worker=GrpcWorker)


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Tell a worker that has no such method from one that fails."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NoSuchStream from error
        raise


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn what gRPC raises into a ServingError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.InvalidStateError as error:
        # A write on a call that has ended meanwhile.
        raise ServingError(Reason.WORKER_LOST, "the call has ended") from error
