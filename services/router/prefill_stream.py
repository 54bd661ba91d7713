"""Prefill calls of this router to one worker, on one stream as long as it lasts."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from services.router.attempts import Unreached
from services.router.first_end import first_end
from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.wire.prefill_many import Answer, Outgoing, outgoing


class NoSuchStream(Exception):
    """The worker is of a version that serves each call by itself only; nothing was begun."""


class Connection(Protocol):
    """One call of PrefillService.PrefillMany. Methods raise ServingError, or NoSuchStream."""

    async def send(
        self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
    ) -> None:
        """Send calls that begin and the numbers of those that nobody waits for any more."""

    async def receive(self) -> Sequence[Answer] | None:
        """The next answers, or None once the worker has ended the stream."""


Dial = Callable[[], AbstractAsyncContextManager[Connection]]
"""Opens a stream; leaving the context ends it, and with it all its calls."""

Outcome = PrefillResult | ServingError | NoSuchStream


class PrefillStream:
    """Calls share a stream, which the first one opens; when it breaks, the next one opens another.

    A broken stream fails the calls that wait, as a broken connection fails calls of their own.
    Those that it never carried fail as Unreached.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._numbers = itertools.count(1)
        self._life: _Life | None = None
        self._lives: set[_Life] = set()
        """That one, and those before it that are still ending."""

    async def prefill(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        """Compute one prompt. Cancelling it cancels the call. Raises ServingError, NoSuchStream."""
        loop = asyncio.get_running_loop()
        number, until_s = next(self._numbers), loop.time() + timeout_s
        life = self._life
        if life is None or life.over:
            life = self._life = _Life(self._dial)
            self._lives = {life, *(x for x in self._lives if not x.ended)}
        answer = life.order(number, call, until_s)
        try:
            async with asyncio.timeout_at(until_s):
                outcome = await answer
        except TimeoutError:
            message = f"no answer came within the call's {timeout_s:.3f} s"
            raise ServingError(Reason.DEADLINE_EXCEEDED, message) from None
        finally:
            life.leave(number)
        if isinstance(outcome, PrefillResult):
            return outcome
        raise outcome

    async def close(self) -> None:
        """End the stream."""
        await asyncio.gather(*(life.close() for life in self._lives))


class _Life:
    """One stream, from its opening to its end.

    Invariant: a call is in `_waiting` until it is answered, left, or lost with the stream.
    """

    def __init__(self, dial: Dial) -> None:
        self.over = False
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._orders: list[Outgoing] = []
        """Calls that were not given to the connection, or that it could not send."""
        self._cancelled: list[int] = []
        self._filled = asyncio.Event()
        self._task = asyncio.create_task(self._run(dial), name="prefill stream")

    @property
    def ended(self) -> bool:
        """True once nothing of it is left; `over` is so from the moment it takes no more calls."""
        return self._task.done()

    def order(self, number: int, call: PrefillCall, until_s: float) -> "asyncio.Future[Outcome]":
        """Send a call with the next write; its end is the future's result, errors included.

        Raises ValueError for a call that cannot be encoded.
        """
        self._orders.append(outgoing(number, call, until_s))
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._filled.set()
        return answer

    def leave(self, number: int) -> None:
        """Nobody waits for a call any more; if it is still out, the worker is told."""
        if self._waiting.pop(number, None) is None:
            return
        for index, order in enumerate(self._orders):
            if order.number == number:
                del self._orders[index]
                return
        self._cancelled.append(number)
        self._filled.set()

    async def _run(self, dial: Dial) -> None:
        outcome: Outcome = ServingError(Reason.WORKER_LOST, "the prefill stream was closed")
        try:
            async with dial() as connection:
                await self._talk(connection)
        except (ServingError, NoSuchStream) as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  # What one worker sends must not cost us it.
            outcome = ServingError(Reason.INTERNAL, f"prefill stream: {type(error).__name__}")
        finally:
            self.over = True
            self._lose_waiting(outcome)

    def _lose_waiting(self, outcome: Outcome) -> None:
        """Fail the calls that wait as the stream failed, and say so of those it never carried."""
        lost = isinstance(outcome, ServingError) and outcome.reason is Reason.WORKER_LOST
        unsent = {order.number for order in self._orders} if lost else ()
        for number, answer in self._waiting.items():
            if not answer.done():
                answer.set_result(Unreached(str(outcome)) if number in unsent else outcome)
        self._waiting.clear()

    async def _talk(self, connection: Connection) -> None:
        """Read and write until one of the two ends, and raise how."""
        await first_end(self._read(connection), self._write(connection), ended=self._ended)

    def _ended(self) -> bool:
        """What is ordered from now on would never be sent."""
        self.over = True
        return True

    async def _write(self, connection: Connection) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            await self._filled.wait()
            self._filled.clear()
            orders, self._orders = self._orders, []
            cancelled, self._cancelled = self._cancelled, []
            try:
                await connection.send(orders, cancelled, now_s())
            except ServingError:
                self._orders = [*orders, *self._orders]
                raise

    async def _read(self, connection: Connection) -> None:
        while (answers := await connection.receive()) is not None:
            for number, outcome in answers:
                answer = self._waiting.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(outcome)
        raise ServingError(Reason.WORKER_LOST, "the worker ended the prefill stream")

    async def close(self) -> None:
        """End it, and with it the calls that wait."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
