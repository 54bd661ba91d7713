"""gRPC around a decode worker: proto in, proto out, one status a failure."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc.aio

from services.decode.worker import DecodeWorker
from services.worker.servicer import SERVICE_NAME as WORKER_SERVICE
from services.worker.servicer import add_to as add_worker_service
from splitwave.core.errors import ServingError
from splitwave.core.session import Ack, Welcome, WorkerMessage
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.v1alpha1 import decode_service_pb2_grpc as pb_grpc
from splitwave.wire.batch import worker_messages_to_proto
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.session import FromRouter, RouterMessages
from splitwave.wire.stream import Writes, emitter

SERVICE_NAMES = ("splitwave.v1alpha1.DecodeService", WORKER_SERVICE)


class SessionContext(Aborts, Writes[pb.SessionResponse], Protocol):
    """What is used of a session's context."""


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
    add_worker_service(server, worker)
