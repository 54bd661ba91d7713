"""What a client is told of a failure: every reason, on every path, before the first byte and after.

The faults are put where requests meet the fleet: room that is refused before anything was
shown, and an attempt that is lost after tokens were shown and may not be resumed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any  # JSON

import grpc.aio
import pytest
import pytest_asyncio

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.runtime.tracing_files import SpanRecord
from splitwave.wire.client import Answer, Ask, generate
from splitwave.wire.errors import CODE, HTTP_STATUS, from_rpc_error, openai_type
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import eventually
from tests.unit.traced import Kept

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 2.5
PROMPT = "Hi there"
LONG = 4000
IDS = count()


@dataclass(frozen=True)
class Rig:
    """The one stack of the table, and the spans that it made."""

    stack: RouterStack
    kept: Kept

    async def root(self, request_id: str) -> SpanRecord:
        """The span of a whole request; it ends when the client has heard all."""
        await eventually(lambda: bool(self._roots(request_id)))
        (root,) = self._roots(request_id)
        return root

    def _roots(self, request_id: str) -> list[SpanRecord]:
        about = [x for x in self.kept.spans() if x.is_request]
        return [x for x in about if x.attributes.get("splitwave.request_id") == request_id]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(model: Model) -> AsyncIterator[Rig]:
    kept = Kept()
    async with router_stack(model, traces=kept.traces()) as stack:
        yield Rig(stack, kept)
        await stack.empty()


@asynccontextmanager
async def refused_room(stack: RouterStack, error: ServingError) -> AsyncIterator[None]:
    """Before the first byte: no attempt gets room."""

    async def take(need: object) -> Any:
        raise error

    stack.door.fleet.rooms.take = take  # type: ignore[method-assign]  # this is the fault
    try:
        yield
    finally:
        del stack.door.fleet.rooms.take


@asynccontextmanager
async def lost_attempts(stack: RouterStack, error: ServingError) -> AsyncIterator[None]:
    """After the first tokens: attempts are lost, and a resume is refused with the error."""

    def spend() -> None:
        raise error

    async def lose() -> None:
        decoding = stack.workers.decode_worker.decoding
        while True:
            for session in stack.workers.decode_worker.sessions.by_id.values():
                for attempt in list(session.attempts.values()):
                    if attempt.offset > 5:
                        lost = ServingError(Reason.PREEMPTED, "no blocks")
                        decoding._fail(attempt, lost)  # noqa: SLF001  # this is the fault
            await asyncio.sleep(0.01)

    stack.door.fleet.spend_resume = spend  # type: ignore[method-assign]  # this is the fault
    losing = asyncio.create_task(lose())
    try:
        yield
    finally:
        losing.cancel()
        del stack.door.fleet.spend_resume


@dataclass(frozen=True)
class Heard:
    """What a client has heard: how much text, and then the failure."""

    text: str
    error: dict[str, Any]
    status: int
    finish_reasons: list[Any]
    retry_after: str | None = None


async def over_http(stack: RouterStack, request_id: str, path: str, *, stream: bool) -> Heard:
    said = {"prompt": PROMPT} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": PROMPT}]}  # fmt: skip
    body = {"model": MODEL, "max_tokens": LONG, "temperature": 0, "stream": stream, **said}
    async with stack.http.post(path, json=body, headers={"X-Request-Id": request_id}) as response:
        text = await response.text()
    retry_after = response.headers.get("Retry-After")
    if response.content_type == "application/json":
        return Heard("", json.loads(text)["error"], response.status, [], retry_after)
    *chunks, failure, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    choices = [json.loads(x.removeprefix("data: "))["choices"][0] for x in chunks]
    return Heard(
        "".join(x["text"] if "text" in x else x["delta"].get("content", "") for x in choices),
        json.loads(failure.removeprefix("data: "))["error"],
        response.status,
        [x["finish_reason"] for x in choices if x["finish_reason"]],
    )


Path = Callable[[RouterStack, str], Any]

HTTP: dict[str, Path] = {
    "completion": lambda s, i: over_http(s, i, "/v1/completions", stream=False),
    "completion stream": lambda s, i: over_http(s, i, "/v1/completions", stream=True),
    "chat": lambda s, i: over_http(s, i, "/v1/chat/completions", stream=False),
    "chat stream": lambda s, i: over_http(s, i, "/v1/chat/completions", stream=True),
}


def assert_told(heard: Heard, error: ServingError) -> None:
    """The body, wherever it stands."""
    assert heard.error == {
        "message": error.message,
        "type": openai_type(error.reason),
        "param": None,
        "code": error.reason.value,
    }
    assert heard.finish_reasons == []


async def assert_traced(rig: Rig, request_id: str, reason: Reason) -> None:
    root = await rig.root(request_id)
    assert (root.status, root.attributes["splitwave.outcome"]) == ("error", reason.value)
    assert root.attributes["error.type"] == reason.value


@pytest.mark.parametrize("path", HTTP)
@pytest.mark.parametrize("reason", Reason)
async def test_before_the_first_byte_a_failure_is_a_status(
    rig: Rig, reason: Reason, path: str
) -> None:
    error = ServingError(reason, "it is so", retry_after_s=WAIT_S)
    request_id = f"b{next(IDS)}"

    async with refused_room(rig.stack, error):
        heard = await HTTP[path](rig.stack, request_id)

    assert heard.status == HTTP_STATUS[reason]
    assert_told(heard, error)
    wait = None if reason is Reason.REQUEST_QUARANTINED else "3"
    assert heard.retry_after == wait, "seconds, rounded up"
    await assert_traced(rig, request_id, reason)


@pytest.mark.parametrize("path", HTTP)
@pytest.mark.parametrize("reason", Reason)
async def test_after_the_first_byte_a_failure_is_an_event(
    rig: Rig, reason: Reason, path: str
) -> None:
    error = ServingError(reason, "it is so")
    request_id = f"a{next(IDS)}"

    async with lost_attempts(rig.stack, error):
        heard = await HTTP[path](rig.stack, request_id)

    streams = path.endswith("stream")
    assert heard.status == (200 if streams else HTTP_STATUS[reason])
    assert bool(heard.text) is streams
    assert_told(heard, error)
    await assert_traced(rig, request_id, reason)


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("shown", [False, True], ids=["before", "after"])
async def test_over_grpc_a_failure_is_a_status_with_its_reason(
    rig: Rig, reason: Reason, shown: bool
) -> None:
    error = ServingError(reason, "it is so", retry_after_s=WAIT_S)
    request_id = f"g{next(IDS)}"
    sampling = Sampling(max_tokens=LONG, temperature=0.0)
    got: list[Answer] = []

    async def ask() -> None:
        asked = Ask(prompt=PROMPT, sampling=sampling, request_id=request_id)
        async for answer in generate(rig.stack.channel, asked, 20.0):
            got.append(answer)  # noqa: PERF401  # what came before the failure counts

    async with lost_attempts(rig.stack, error) if shown else refused_room(rig.stack, error):
        with pytest.raises(ServingError) as failed:
            await ask()

    assert bool(got) is shown
    assert not any(answer.finish_reason for answer in got)
    cause = failed.value.__cause__
    assert isinstance(cause, grpc.aio.AioRpcError)
    assert cause.code() is CODE[reason]
    told = from_rpc_error(cause)
    assert (told.reason, told.message, told.retry_after_s) == (reason, "it is so", WAIT_S)
    await assert_traced(rig, request_id, reason)


# What really happens.


async def test_nothing_is_let_in_while_a_pool_is_absent(model: Model) -> None:
    async with router_stack(model) as stack:
        for pool in (stack.workers.prefill, stack.workers.decode):
            pool.stop.set()
        await eventually(lambda: not any(stack.door.fleet.usable().values()))
        heard = [await HTTP[path](stack, path.replace(" ", "-")) for path in HTTP]
        with pytest.raises(ServingError) as refused:
            async for _ in generate(
                stack.channel, Ask(prompt=PROMPT, sampling=Sampling(max_tokens=4)), 20.0
            ):
                pass
        async with stack.http.get("/ready") as ready:
            told = await ready.json()

    assert {each.status for each in heard} == {503}
    assert {each.error["code"] for each in heard} <= {"pool_unavailable", "worker_draining"}
    assert refused.value.reason in (Reason.POOL_UNAVAILABLE, Reason.WORKER_DRAINING)
    assert (ready.status, told["prefill_workers"], told["decode_workers"]) == (503, 0, 0)


async def test_a_full_router_says_when_to_come_back(model: Model) -> None:
    async with router_stack(model, live_max=1) as stack:
        body = {"prompt": PROMPT, "max_tokens": LONG, "stream": True, "ignore_eos": True}
        async with stack.http.post("/v1/completions", json=body) as first:
            await first.content.readany()
            heard = [await HTTP[path](stack, path.replace(" ", "-")) for path in HTTP]

        assert [each.status for each in heard] == [429] * 4
        assert {each.error["code"] for each in heard} == {"overloaded"}
        assert {each.retry_after for each in heard} == {"1"}


async def test_choices_that_do_not_fit_beside_others_are_refused_together(model: Model) -> None:
    """Too many beside those that are live may come again; too many for the router never fit."""
    async with router_stack(model, live_max=4) as stack:
        long = {"prompt": PROMPT, "max_tokens": 3000, "stream": True}
        heard = []
        async with stack.http.post("/v1/completions", json=long) as live:
            await live.content.readany()
            for n in (4, 5):
                body = {"prompt": PROMPT, "n": n, "max_tokens": 4}
                async with stack.http.post("/v1/completions", json=body) as response:
                    error = (await response.json())["error"]
                heard.append((response.status, error["code"], "Retry-After" in response.headers))

        assert heard == [(429, "overloaded", True), (400, "invalid_request", False)]
        assert stack.door.admitted == 1
        await stack.empty()


async def test_a_draining_router_refuses_and_finishes(model: Model) -> None:
    async with router_stack(model) as stack:
        body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
        async with stack.http.post("/v1/completions", json=body) as running:
            await running.content.readany()
            stack.door.admission.closed = True
            heard = await over_http(stack, "d", "/v1/chat/completions", stream=True)
            rest = await running.text()

    assert (heard.status, heard.error["code"]) == (503, "worker_draining")
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in rest


async def test_a_deadline_that_passes_is_told_before_and_after_the_first_byte(
    model: Model,
) -> None:
    async with router_stack(model, timeout_s=0.5) as stack:
        whole = await over_http(stack, "w", "/v1/completions", stream=False)
        streamed = await over_http(stack, "s", "/v1/completions", stream=True)

    assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
    assert (streamed.status, streamed.error["code"]) == (200, "deadline_exceeded")
    assert streamed.text
    assert streamed.finish_reasons == []


async def test_a_bug_of_ours_is_told_as_one(model: Model) -> None:
    async with router_stack(model) as stack:

        def broken(*_: object, **__: object) -> Any:
            raise RuntimeError("a secret prompt")

        stack.door.sampling_limits = broken  # type: ignore[method-assign]  # this is the fault
        heard = await over_http(stack, "x", "/v1/completions", stream=False)

    assert (heard.status, heard.error["code"]) == (500, "internal")
    assert "secret" not in json.dumps(heard.error)
