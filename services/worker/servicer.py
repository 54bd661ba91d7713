"""WorkerService around a worker of either role: proto in, proto out, one status a failure."""

from typing import Protocol

import grpc.aio

from services.worker.group_guard import GroupGuard
from splitwave.core.errors import ServingError
from splitwave.core.worker import WorkerDescription, WorkerLoad
from splitwave.engine.port import GroupDescription
from splitwave.runtime.watch import watch
from splitwave.v1alpha1 import worker_service_pb2 as pb
from splitwave.v1alpha1 import worker_service_pb2_grpc as pb_grpc
from splitwave.wire.certification import judge_response, judgement_from_proto
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.stream import Writes, emitter
from splitwave.wire.worker import description_to_proto, observation_to_proto

SERVICE_NAME = "splitwave.v1alpha1.WorkerService"


class WatchContext(Aborts, Writes[pb.WatchWorkerResponse], Protocol):
    """What is used of a watch's context."""


class Worker(Protocol):
    """What the service needs of a worker."""

    @property
    def group(self) -> GroupDescription:
        """Its group."""

    @property
    def guard(self) -> GroupGuard:
        """How the group stands."""

    async def describe(self, *, counters: bool) -> WorkerDescription:
        """What it is. Raises WORKER_LOST."""

    def load(self) -> WorkerLoad:
        """The present state. Raises WORKER_LOST."""

    def refuse(self) -> None:
        """Take no new work."""

    def outstanding(self) -> int:
        """What is still to finish."""


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """WorkerService."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def DescribeWorker(
        self, request: pb.DescribeWorkerRequest, context: Aborts
    ) -> pb.DescribeWorkerResponse:
        try:
            return description_to_proto(await self._worker.describe(counters=request.counters))
        except ServingError as error:
            await abort(context, error)

    async def WatchWorker(  # type: ignore[override]  # writes rather than yields
        self, request: pb.WatchWorkerRequest, context: WatchContext
    ) -> None:
        worker = self._worker

        def observe() -> pb.WatchWorkerResponse:
            return observation_to_proto(
                worker.group.epoch, worker.load(), standing_only=request.standing_only
            )

        try:
            await watch(observe, emitter(context))
        except ServingError as error:
            await abort(context, error)

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Aborts
    ) -> pb.DrainWorkerResponse:
        self._worker.refuse()
        return pb.DrainWorkerResponse(outstanding=self._worker.outstanding())

    async def JudgeWorker(
        self, request: pb.JudgeWorkerRequest, context: Aborts
    ) -> pb.JudgeWorkerResponse:
        try:
            action = judgement_from_proto(request)
            return judge_response(self._worker.guard.judge(request.epoch, action, request.why))
        except ServingError as error:
            await abort(context, error)


def add_to(server: grpc.aio.Server, worker: Worker) -> None:
    """Add the service."""
    pb_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(worker), server)
