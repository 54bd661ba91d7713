"""How a router calls a prefill worker that another version takes the place of."""

import asyncio
from types import SimpleNamespace
from typing import Any  # a stub's methods are untyped

import grpc.aio
import pytest

from services.router import transport
from services.router.transport import GrpcPrefill
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.v1alpha1 import worker_service_pb2 as worker_pb
from splitwave.wire.prefill import prefill_result_to_proto
from splitwave.wire.prefill_many import answer_to_proto
from splitwave.wire.worker import description_to_proto
from tests.contract.golden_messages import CALL, DESCRIPTION, HELD


class Many:
    """A stream to a worker, which knows no such method if it is old."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._answers: list[pb.PrefillManyResponse] = []
        self._worker.streams += 1

    async def write(self, request: pb.PrefillManyRequest) -> None:
        self._fail_if_old()
        answers = [answer_to_proto(order.number, HELD) for order in request.orders]
        self._answers.append(pb.PrefillManyResponse(answers=answers))

    async def read(self) -> object:
        self._fail_if_old()
        await self._worker.turn()
        return self._answers.pop(0) if self._answers else grpc.aio.EOF

    def _fail_if_old(self) -> None:
        if self._worker.old:
            empty = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, empty, empty)

    def cancel(self) -> None: ...


class Worker:
    """Both services of a worker, as a router's stubs; counts the calls of each kind."""

    def __init__(self) -> None:
        self.old = True
        self.streams = self.alone = 0

    async def turn(self) -> None:
        """Let the other side of a stream write first."""
        for _ in range(3):
            await asyncio.sleep(0)

    def PrefillMany(self) -> Many:  # gRPC's name
        return Many(self)

    async def Prefill(self, request: object, **_: Any) -> pb.PrefillResponse:  # gRPC's name
        self.alone += 1
        return prefill_result_to_proto(HELD)

    async def DescribeWorker(  # gRPC's name
        self, request: object, **_: Any
    ) -> worker_pb.DescribeWorkerResponse:
        return description_to_proto(DESCRIPTION)


async def test_a_worker_that_is_described_anew_is_asked_anew_whether_calls_may_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    for name in ("prefill_stub", "worker_stub"):
        monkeypatch.setattr(transport, name, lambda _: worker)
    channel = SimpleNamespace()
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: channel)
    way = GrpcPrefill("p0:1")

    for _ in range(3):
        assert await way.prefill(CALL, 5.0) == HELD
    assert (worker.streams, worker.alone) == (1, 3), "it has said that it is old"

    worker.old = False
    await way.describe(1.0)
    assert await way.prefill(CALL, 5.0) == HELD
    assert (worker.streams, worker.alone) == (2, 3)
