"""gRPC around a decode worker: proto in, proto out, one status a failure."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc.aio

from services.decode.worker import DecodeWorker
from splitwave.core.errors import ServingError
from splitwave.core.session import Ack, Welcome, WorkerMessage
from splitwave.runtime.watch import watch
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.v1alpha1 import decode_service_pb2_grpc as pb_grpc
from splitwave.v1alpha1 import worker_service_pb2 as worker_pb
from splitwave.v1alpha1 import worker_service_pb2_grpc as worker_pb_grpc
from splitwave.wire.batch import worker_messages_to_proto
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.session import FromRouter, RouterMessages
from splitwave.wire.stream import Writes, emitter
from splitwave.wire.worker import description_to_proto, observation_to_proto

SERVICE_NAMES = ("splitwave.v1alpha1.DecodeService", "splitwave.v1alpha1.WorkerService")


class SessionContext(Aborts, Writes[pb.SessionResponse], Protocol):
    """What is used of a session's context."""


class WatchContext(Aborts, Writes[worker_pb.WatchWorkerResponse], Protocol):
    """What is used of a watch's context."""


class DecodeServicer(pb_grpc.DecodeServiceServicer):
    """DecodeService."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Session(  # type: ignore[override]  # writes rather than yields
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: SessionContext
    ) -> None:
        emit = emitter(context)

        async def write(messages: Sequence[tuple[int, WorkerMessage | Welcome | Ack]]) -> None:
            for response in worker_messages_to_proto(messages):
                await emit(response)

        try:
            await self._worker.session(_messages(request_iterator), write)
        except ServingError as error:
            await abort(context, error)


class WorkerServicer(worker_pb_grpc.WorkerServiceServicer):
    """WorkerService."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def DescribeWorker(
        self, request: worker_pb.DescribeWorkerRequest, context: Aborts
    ) -> worker_pb.DescribeWorkerResponse:
        try:
            return description_to_proto(await self._worker.describe(counters=request.counters))
        except ServingError as error:
            await abort(context, error)

    async def WatchWorker(  # type: ignore[override]  # writes rather than yields
        self, request: worker_pb.WatchWorkerRequest, context: WatchContext
    ) -> None:
        def observe() -> worker_pb.WatchWorkerResponse:
            return observation_to_proto(self._worker.group.epoch, self._worker.load())

        try:
            await watch(observe, emitter(context))
        except ServingError as error:
            await abort(context, error)

    async def DrainWorker(
        self, request: worker_pb.DrainWorkerRequest, context: Aborts
    ) -> worker_pb.DrainWorkerResponse:
        self._worker.refuse()
        return worker_pb.DrainWorkerResponse(outstanding=self._worker.outstanding())


async def _messages(
    requests: AsyncIterator[pb.SessionRequest],
) -> AsyncIterator[tuple[int, FromRouter]]:
    """Whole messages with their numbers, of one connection."""
    reader = RouterMessages()
    async for request in requests:
        for message in reader.read(request):
            yield message


def add_to(server: grpc.aio.Server, worker: DecodeWorker) -> None:
    """Add both services."""
    pb_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
    worker_pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(worker), server)
