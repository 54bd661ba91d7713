"""gRPC around a prefill worker: proto in, proto out, one status a failure."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc.aio

from services.prefill.many import Calls
from services.prefill.worker import PrefillWorker
from services.worker.servicer import SERVICE_NAME as WORKER_SERVICE
from services.worker.servicer import add_to as add_worker_service
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.runtime.tracing import Metadata, traceparent_in
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.v1alpha1 import prefill_service_pb2_grpc as pb_grpc
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.prefill import prefill_call_from_proto, prefill_result_to_proto
from splitwave.wire.prefill_many import (
    BadOrder,
    EncodedAnswer,
    Order,
    answers_to_proto,
    orders_from_proto,
)
from splitwave.wire.stream import Writes, emitter
from splitwave.wire.time import duration_to_proto

SERVICE_NAMES = ("splitwave.v1alpha1.PrefillService", WORKER_SERVICE)


class Context(Aborts, Protocol):
    """What is used of a call's context."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if it set none."""

    def invocation_metadata(self) -> Metadata:
        """The caller's headers."""


class ManyContext(Aborts, Writes[pb.PrefillManyResponse], Protocol):
    """What is used of the context of a stream of calls."""


class PrefillServicer(pb_grpc.PrefillServiceServicer):
    """PrefillService.

    A client that leaves while its response is on the way is not seen here; it releases
    the handoff by its id, or the lease runs out.
    """

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        try:
            deadline = _deadline(context.time_remaining(), self._worker.now_s())
            call = prefill_call_from_proto(request, _traceparent(context))
            result = await self._worker.prefill(call, deadline)
        except ServingError as error:
            await abort(context, error)
        return prefill_result_to_proto(result)

    async def PrefillMany(  # type: ignore[override]  # writes rather than yields
        self, request_iterator: AsyncIterator[pb.PrefillManyRequest], context: ManyContext
    ) -> None:
        emit = emitter(context)

        async def write(answers: Sequence[EncodedAnswer]) -> None:
            for response in answers_to_proto(answers):
                await emit(response)

        try:
            await Calls(self._worker).serve(_orders(request_iterator), write)
        except ServingError as error:
            await abort(context, error)

    async def ReleaseHandoff(
        self,
        request: pb.ReleaseHandoffRequest,
        context: Context,
    ) -> pb.ReleaseHandoffResponse:
        released = self._worker.release(request.handoff_id, _traceparent(context))
        return pb.ReleaseHandoffResponse(released=released)

    async def ConfirmHandoff(
        self,
        request: pb.ConfirmHandoffRequest,
        context: Context,
    ) -> pb.ConfirmHandoffResponse:
        try:
            traceparent = _traceparent(context)
            left_s = self._worker.confirm(request.handoff_id, request.epoch, traceparent)
        except ServingError as error:
            await abort(context, error)
        return pb.ConfirmHandoffResponse(lease_remaining=duration_to_proto(left_s))


async def _orders(
    requests: AsyncIterator[pb.PrefillManyRequest],
) -> AsyncIterator[tuple[Sequence[Order | BadOrder], Sequence[int]]]:
    async for request in requests:
        yield orders_from_proto(request), request.cancelled_numbers


def add_to(server: grpc.aio.Server, worker: PrefillWorker) -> None:
    """Add both services."""
    pb_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)
    add_worker_service(server, worker)


def _traceparent(context: Context) -> str:
    return traceparent_in(context.invocation_metadata())


def _deadline(remaining_s: float | None, now_s: float) -> Deadline:
    if remaining_s is None:
        raise ServingError(Reason.DEADLINE_REQUIRED, "deadline: the call has none; set a timeout")
    return Deadline(now_s + remaining_s)
