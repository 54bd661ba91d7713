"""Prefill calls that share a stream: both ends of it, in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.prefill.many import Calls
from services.router.prefill_stream import NoSuchStream, PrefillStream
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.wire.prefill_many import (
    Answer,
    BadOrder,
    EncodedAnswer,
    Order,
    Outgoing,
    answer_to_proto,
    answers_from_proto,
    answers_to_proto,
    orders_from_proto,
    orders_to_proto,
)
from tests.fakes import now_s
from tests.sim import virtual_loop

WAY_S = 0.001
"""How long a message takes."""


def call(name: str) -> PrefillCall:
    return PrefillCall(
        request_id=name,
        handoff_id=name,
        token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=1),
        keep_first_token=True,
        kv_layout="",
        traceparent=f"trace of {name}",
    )


def result(token_id: int) -> PrefillResult:
    return PrefillResult(token_id=token_id, finish_reason=FinishReason.LENGTH)


@dataclass
class Worker:
    """Serves a call when the test says so; notes what came and what was cancelled."""

    came: list[str] = field(default_factory=list)
    deadlines: dict[str, float] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    answers: "dict[str, asyncio.Future[PrefillResult]]" = field(default_factory=dict)

    def now_s(self) -> float:
        return now_s()

    async def prefill(self, call: PrefillCall, deadline: Deadline) -> PrefillResult:
        assert call.traceparent == f"trace of {call.request_id}"
        self.came.append(call.request_id)
        self.deadlines[call.request_id] = deadline.at_s
        self.answers[call.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.answers[call.request_id]
        except asyncio.CancelledError:
            self.cancelled.append(call.request_id)
            raise


class Wire:
    """A stream with its worker's end, through proto; each way takes a millisecond."""

    def __init__(self, worker: Worker) -> None:
        self.writes: list[list[str]] = []
        self.answer_writes: list[int] = []
        self.broke = asyncio.Event()
        self._up: asyncio.Queue[object] = asyncio.Queue()
        self._down: asyncio.Queue[Sequence[Answer] | None] = asyncio.Queue()
        calls = Calls(worker)  # type: ignore[arg-type]  # what it uses of a worker
        self.serving = asyncio.create_task(calls.serve(self._incoming(), self._write))

    async def _incoming(self) -> AsyncIterator[tuple[Sequence[Order | BadOrder], Sequence[int]]]:
        while True:
            message = await self._up.get()
            yield orders_from_proto(message), message.cancelled_numbers  # type: ignore[arg-type,attr-defined]  # what `send` put there

    async def _write(self, answers: Sequence[EncodedAnswer]) -> None:
        self.answer_writes.append(len(answers))
        await asyncio.sleep(WAY_S)
        for response in answers_to_proto(answers):
            self._down.put_nowait(answers_from_proto(response))

    async def send(
        self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
    ) -> None:
        self.writes.append([*(x.request.request_id for x in orders), *(f"-{x}" for x in cancelled)])
        await asyncio.sleep(WAY_S)
        for request in orders_to_proto(orders, cancelled, now_s):
            self._up.put_nowait(request)

    async def receive(self) -> Sequence[Answer] | None:
        getting = asyncio.create_task(self._down.get())
        breaking = asyncio.create_task(self.broke.wait())
        done, _ = await asyncio.wait({getting, breaking}, return_when=asyncio.FIRST_COMPLETED)
        breaking.cancel()
        if getting in done:
            return getting.result()
        getting.cancel()
        raise ServingError(Reason.WORKER_LOST, "connection reset")

    def end(self) -> None:
        """The worker ends the stream well."""
        self._down.put_nowait(None)


@dataclass
class World:
    """A worker and a router's stream to it."""

    worker: Worker = field(default_factory=Worker)
    wires: list[Wire] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = PrefillStream(self._dial)

    @contextlib.asynccontextmanager
    async def _dial(self) -> AsyncIterator[Wire]:
        wire = Wire(self.worker)
        self.wires.append(wire)
        try:
            yield wire
        finally:
            wire.serving.cancel()
            await asyncio.gather(wire.serving, return_exceptions=True)

    def begin(self, name: str, timeout_s: float = 60.0) -> "asyncio.Task[PrefillResult]":
        return asyncio.create_task(self.stream.prefill(call(name), timeout_s))


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        await scenario(world)
        await world.stream.close()
        assert all(wire.serving.done() for wire in world.wires)

    virtual_loop.run(run())


async def failure(task: "asyncio.Task[PrefillResult]") -> ServingError:
    with pytest.raises(ServingError) as caught:
        await task
    return caught.value


def test_calls_that_begin_together_share_a_write_and_each_gets_its_answer() -> None:
    async def scenario(world: World) -> None:
        tasks = [world.begin(name) for name in "abc"]
        await asyncio.sleep(0.01)
        for token_id, name in enumerate("cab"):
            world.worker.answers[name].set_result(result(token_id))

        assert [task.token_id for task in await asyncio.gather(*tasks)] == [1, 2, 0]
        (wire,) = world.wires
        assert wire.writes == [["a", "b", "c"]]
        assert wire.answer_writes == [3]

    in_world(scenario)


def test_a_deadline_travels_as_what_is_left_of_it() -> None:
    async def scenario(world: World) -> None:
        task = world.begin("a", timeout_s=5.0)
        await asyncio.sleep(0.01)

        assert world.worker.deadlines["a"] == pytest.approx(now_s() + 5.0 - 0.01 + WAY_S)
        world.worker.answers["a"].set_result(result(1))
        await task

    in_world(scenario)


def test_a_failure_is_its_calls_alone_and_keeps_its_reason() -> None:
    async def scenario(world: World) -> None:
        a, b = world.begin("a"), world.begin("b")
        await asyncio.sleep(0.01)
        full = ServingError(Reason.OVERLOADED, "the queue is full", retry_after_s=0.25)
        world.worker.answers["a"].set_exception(full)
        error = await failure(a)
        world.worker.answers["b"].set_result(result(7))

        assert (error.reason, error.message, error.retry_after_s) == (
            Reason.OVERLOADED, "the queue is full", 0.25,
        )  # fmt: skip
        assert (await b).token_id == 7

    in_world(scenario)


def test_what_a_worker_fails_with_by_a_bug_is_that_calls_own() -> None:
    async def scenario(world: World) -> None:
        a, b = world.begin("a"), world.begin("b")
        await asyncio.sleep(0.01)
        world.worker.answers["a"].set_exception(ValueError("a bug"))
        error = await failure(a)
        world.worker.answers["b"].set_result(result(7))

        assert error.reason is Reason.WORKER_LOST, "as if it had been a call of its own"
        assert (await b).token_id == 7

    in_world(scenario)


def test_an_answer_that_no_message_can_hold_fails_its_call_alone() -> None:
    async def scenario(world: World) -> None:
        a, b = world.begin("a"), world.begin("b")
        await asyncio.sleep(0.01)
        world.worker.answers["a"].set_result(result(-1))
        error = await failure(a)
        world.worker.answers["b"].set_result(result(7))

        assert error.reason is Reason.WORKER_LOST
        assert (await b).token_id == 7
        assert len(world.wires) == 1, "the stream goes on"

    in_world(scenario)


@pytest.mark.parametrize("after_s", [0.0, 0.5 * WAY_S, 1.5 * WAY_S, 10 * WAY_S])
def test_a_call_that_is_cancelled_stops_at_the_worker_whenever_that_is(after_s: float) -> None:
    async def scenario(world: World) -> None:
        a, b = world.begin("a"), world.begin("b")
        await asyncio.sleep(after_s)
        a.cancel()
        await asyncio.sleep(0.05)

        assert a.cancelled()
        assert world.worker.cancelled == [x for x in world.worker.came if x == "a"]
        world.worker.answers["b"].set_result(result(7))
        assert (await b).token_id == 7

    in_world(scenario)


def test_a_call_that_was_never_sent_costs_no_word() -> None:
    async def scenario(world: World) -> None:
        first = world.begin("a")
        await asyncio.sleep(0.5 * WAY_S)  # A write is under way.
        second = world.begin("b")
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0.05)
        world.worker.answers["a"].set_result(result(1))
        await first

        (wire,) = world.wires
        assert [names for names in wire.writes if names] == [["a"]]

    in_world(scenario)


def test_a_call_without_an_answer_ends_at_its_time_and_the_worker_is_told() -> None:
    async def scenario(world: World) -> None:
        began_s = now_s()
        error = await failure(world.begin("a", timeout_s=2.0))
        took_s = now_s() - began_s
        await asyncio.sleep(0.01)

        assert error.reason is Reason.DEADLINE_EXCEEDED
        assert took_s == pytest.approx(2.0)
        assert world.worker.cancelled == ["a"]

    in_world(scenario)


def test_a_call_that_no_message_can_hold_fails_alone() -> None:
    async def scenario(world: World) -> None:
        good = world.begin("a")
        bad = asyncio.create_task(world.stream.prefill(replace(call("b"), priority=2**40), 5.0))
        also_good = world.begin("c")
        await asyncio.sleep(0.01)
        for name in "ac":
            world.worker.answers[name].set_result(result(1))

        with pytest.raises(ValueError, match="range"):
            await bad
        assert [(await task).token_id for task in (good, also_good)] == [1, 1]
        assert world.worker.came == ["a", "c"]

    in_world(scenario)


@pytest.mark.parametrize("how", ["break", "end"])
def test_a_stream_that_ends_fails_its_calls_and_the_next_opens_another(how: str) -> None:
    async def scenario(world: World) -> None:
        lost = [world.begin(name) for name in "ab"]
        await asyncio.sleep(0.01)
        (wire,) = world.wires
        wire.broke.set() if how == "break" else wire.end()
        errors = [await failure(task) for task in lost]
        after = world.begin("c")
        await asyncio.sleep(0.01)

        assert [error.reason for error in errors] == [Reason.WORKER_LOST] * 2
        assert sorted(world.worker.cancelled) == ["a", "b"]
        world.worker.answers["c"].set_result(result(3))
        assert (await after).token_id == 3
        assert len(world.wires) == 2

    in_world(scenario)


def test_a_worker_that_has_no_such_stream_says_so_to_every_call() -> None:
    class Old:
        async def send(
            self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
        ) -> None: ...

        async def receive(self) -> Sequence[Answer] | None:
            await asyncio.sleep(WAY_S)
            raise NoSuchStream

    @contextlib.asynccontextmanager
    async def dial() -> AsyncIterator[Old]:
        yield Old()

    async def scenario() -> None:
        stream = PrefillStream(dial)
        outcomes = await asyncio.gather(
            *(stream.prefill(call(name), 5.0) for name in "ab"), return_exceptions=True
        )

        assert [type(outcome) for outcome in outcomes] == [NoSuchStream] * 2

    virtual_loop.run(scenario())


def test_what_a_worker_sends_against_the_contract_fails_the_calls_and_no_more() -> None:
    class Broken:
        async def send(
            self, orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
        ) -> None: ...

        async def receive(self) -> Sequence[Answer] | None:
            await asyncio.sleep(WAY_S)
            raise ValueError("nonsense")

    @contextlib.asynccontextmanager
    async def dial() -> AsyncIterator[Broken]:
        yield Broken()

    async def scenario() -> None:
        stream = PrefillStream(dial)
        for _ in range(2):
            with pytest.raises(ServingError) as caught:
                await stream.prefill(call("a"), 5.0)
            assert caught.value.reason is Reason.INTERNAL

    virtual_loop.run(scenario())


def test_an_order_that_cannot_be_taken_ends_alone_and_a_number_in_use_ends_the_stream() -> None:
    async def scenario() -> None:
        worker = Worker()
        told: list[EncodedAnswer] = []
        refused = ServingError(Reason.INVALID_REQUEST, "token_ids: empty; set it")
        batches: list[tuple[list[Order | BadOrder], list[int]]] = [
            ([BadOrder(1, refused), Order(2, call("b"), 5.0)], []),
            ([Order(2, call("c"), 5.0)], []),
        ]

        async def incoming() -> AsyncIterator[tuple[Sequence[Order | BadOrder], Sequence[int]]]:
            for batch in batches:
                yield batch
                await asyncio.sleep(0.01)

        async def write(answers: Sequence[EncodedAnswer]) -> None:
            told.extend(answers)

        with pytest.raises(ServingError, match=r"orders\.number: 2 is in use"):
            await Calls(worker).serve(incoming(), write)  # type: ignore[arg-type]  # what it uses
        assert told == [answer_to_proto(1, refused)]
        assert worker.cancelled == ["b"]

    virtual_loop.run(scenario())
