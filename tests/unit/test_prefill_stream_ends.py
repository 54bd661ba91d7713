"""How a stream of prefill calls ends, and what becomes of calls that come then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from services.router.attempts import Unreached
from services.router.first_end import STATUS_WAIT_S
from services.router.prefill_stream import NoSuchStream, PrefillStream
from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillResult
from splitwave.wire.prefill_many import Answer, Outgoing
from tests.sim import virtual_loop
from tests.unit.test_prefill_stream import call, result

ENDED = ServingError(Reason.WORKER_LOST, "the call has ended")
DECERTIFIED = ServingError(Reason.GROUP_DECERTIFIED, "a step outside its mode")


class Wire:
    """A stream that is ended at a write, and told so to its reader later; or one that serves."""

    def __init__(self, status: Exception | None = None, told_after_s: float = 0.0) -> None:
        self.status, self.told_after_s = status, told_after_s
        self.came: list[str] = []
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._ended = asyncio.Event()

    async def send(
        self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
    ) -> None:
        if self.status is not None:
            self._ended.set()
            raise ENDED
        for order in orders:
            self.came.append(order.request.request_id)
            self._answers.put_nowait((order.number, result(7)))

    async def receive(self) -> Sequence[Answer] | None:
        if self.status is None:
            return [await self._answers.get()]
        await self._ended.wait()
        await asyncio.sleep(self.told_after_s)
        raise self.status


def over(wires: list[Wire]) -> PrefillStream:
    """A router's stream over one wire after the other."""

    @contextlib.asynccontextmanager
    async def dial() -> AsyncIterator[Wire]:
        yield wires.pop(0)

    return PrefillStream(dial)


@pytest.mark.parametrize("after_s", [0.0, 0.5 * STATUS_WAIT_S])
@pytest.mark.parametrize("status", [DECERTIFIED, NoSuchStream()], ids=["decertified", "old"])
def test_why_a_stream_ended_is_told_also_where_a_write_meets_its_end(
    status: Exception, after_s: float
) -> None:
    async def scenario() -> None:
        stream = over([Wire(status, after_s)])
        with pytest.raises(type(status)) as caught:
            await stream.prefill(call("a"), 5.0)
        assert caught.value is status

    virtual_loop.run(scenario())


def test_a_status_that_does_not_come_is_not_waited_for_long() -> None:
    async def scenario() -> None:
        stream = over([Wire(DECERTIFIED, 3600.0)])
        async with asyncio.timeout(2 * STATUS_WAIT_S):
            with pytest.raises(ServingError) as caught:
                await stream.prefill(call("a"), 5.0)
        assert caught.value.message == ENDED.message

    virtual_loop.run(scenario())


@pytest.mark.parametrize("status", [ENDED, ServingError(Reason.WORKER_LOST, "reset")])
def test_a_call_that_could_not_be_written_has_reached_nobody(status: ServingError) -> None:
    async def scenario() -> None:
        stream = over([Wire(status)])
        with pytest.raises(Unreached) as caught:
            await stream.prefill(call("a"), 5.0)
        assert caught.value.message == status.message

    virtual_loop.run(scenario())


def test_a_call_that_was_written_may_have_been_there_and_one_behind_it_was_not() -> None:
    class Broken(Wire):
        """Takes one write, and is ended at the next."""

        async def send(
            self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
        ) -> None:
            self.came += [order.request.request_id for order in orders]
            if len(self.came) > 1:
                await super().send(orders, cancelled, now_s)

    async def scenario() -> None:
        stream = over([Broken(ENDED)])
        written = asyncio.create_task(stream.prefill(call("a"), 5.0))
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(stream.prefill(call("b"), 5.0))
        first, second = await asyncio.gather(written, behind, return_exceptions=True)

        assert first is ENDED, "it may be why the worker is lost"
        assert isinstance(second, Unreached)

    virtual_loop.run(scenario())


def test_a_call_that_comes_while_a_stream_ends_goes_by_the_next_one() -> None:
    async def scenario() -> None:
        good = Wire()
        stream = over([Wire(DECERTIFIED, 0.5 * STATUS_WAIT_S), good])

        async def second() -> PrefillResult:
            await asyncio.sleep(0.25 * STATUS_WAIT_S)  # The first has met the end of its stream.
            return await stream.prefill(call("b"), 5.0)

        first, answer = await asyncio.gather(
            stream.prefill(call("a"), 5.0), second(), return_exceptions=True
        )

        assert first is DECERTIFIED
        assert answer == result(7)
        assert good.came == ["b"]
        await stream.close()

    virtual_loop.run(scenario())


def test_closing_ends_a_stream_that_is_ending_too() -> None:
    async def scenario() -> None:
        left: set[Wire] = set()

        @contextlib.asynccontextmanager
        async def dial() -> AsyncIterator[Wire]:
            wire = wires.pop(0)
            try:
                yield wire
            finally:
                left.add(wire)

        ending, good = Wire(DECERTIFIED, 3600.0), Wire()
        wires = [ending, good]
        stream = PrefillStream(dial)
        first = asyncio.create_task(stream.prefill(call("a"), 5.0))
        await asyncio.sleep(0.25 * STATUS_WAIT_S)
        await stream.prefill(call("b"), 5.0)
        await stream.close()

        assert left == {ending, good}
        with pytest.raises(ServingError):
            await first

    virtual_loop.run(scenario())
