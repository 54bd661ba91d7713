"""Calls that share one stream: each is served on its own; those that end together are told so."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from services.prefill.worker import PrefillWorker
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillResult
from splitwave.wire.prefill_many import BadOrder, EncodedAnswer, Order, answer_to_proto

Incoming = AsyncIterator[tuple[Sequence[Order | BadOrder], Sequence[int]]]
"""Orders and the numbers of cancelled ones, as the stream brings them."""
Write = Callable[[Sequence[EncodedAnswer]], Awaitable[None]]
"""Sends answers, waiting for the peer's flow control."""

log = logging.getLogger(__name__)


class Calls:
    """The calls of one stream.

    Invariant: a number is in `_tasks` from its order to its answer, or until it is cancelled.
    """

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[EncodedAnswer] = []
        self._answered = asyncio.Event()

    async def serve(self, incoming: Incoming, write: Write) -> None:
        """Serve until the caller ends the stream; what runs then is cancelled.

        Raises INVALID_REQUEST for a stream that cannot go on.
        """
        reading = asyncio.create_task(self._read(incoming), name="prefill stream: in")
        writing = asyncio.create_task(self._write(write), name="prefill stream: out")
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for end in (reading, writing):
                if end.done():
                    end.result()
        finally:
            tasks = [reading, writing, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, incoming: Incoming) -> None:
        async for orders, cancelled in incoming:
            for order in orders:
                self._begin(order)
            for number in cancelled:
                task = self._tasks.pop(number, None)
                if task is not None:
                    task.cancel()

    def _begin(self, order: Order | BadOrder) -> None:
        if order.number in self._tasks:
            message = f"orders.number: {order.number} is in use; count the calls"
            raise ServingError(Reason.INVALID_REQUEST, message)
        if isinstance(order, BadOrder):
            self._answer(answer_to_proto(order.number, order.error))
            return
        task = asyncio.create_task(self._serve(order), name="prefill stream: call")
        self._tasks[order.number] = task

    async def _serve(self, order: Order) -> None:
        try:
            answer = answer_to_proto(order.number, await self._outcome(order))
        except Exception:
            log.exception("our bug", extra={"request_id": order.call.request_id})
            # As a call of its own that ends without a reason: another worker may do better.
            lost = ServingError(Reason.WORKER_LOST, "the prefill worker failed; its log says why")
            answer = answer_to_proto(order.number, lost)
        if self._tasks.pop(order.number, None) is not None:
            self._answer(answer)

    async def _outcome(self, order: Order) -> PrefillResult | ServingError:
        try:
            deadline = Deadline(self._worker.now_s() + order.remaining_s)
            return await self._worker.prefill(order.call, deadline)
        except ServingError as error:
            return error

    def _answer(self, answer: EncodedAnswer) -> None:
        self._answers.append(answer)
        self._answered.set()

    async def _write(self, write: Write) -> None:
        while True:
            await self._answered.wait()
            self._answered.clear()
            answers, self._answers = self._answers, []
            await write(answers)
