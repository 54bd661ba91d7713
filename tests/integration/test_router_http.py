"""The OpenAI HTTP API, on simulated engines."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any  # JSON

import pytest
from aiohttp import web

from services.router.openai.http import OpenAI
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually

PROMPT = "The capital of France is"
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}


def right(prompt: str = PROMPT, tokens: int = 30) -> str:
    """The text of an aggregated engine: a byte is its own token."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return bytes(SimModel().complete(list(prompt.encode()), sampling).token_ids).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started
        await started.empty()


async def post(stack: RouterStack, body: object) -> tuple[int, Any]:
    async with stack.http.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


async def events(stack: RouterStack, body: object) -> list[str]:
    """The data of each event of a stream, the last one included."""
    async with stack.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    assert text.endswith("\n\n")
    assert all(event.startswith("data: ") for event in text.removesuffix("\n\n").split("\n\n"))
    return [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]


async def test_a_whole_answer_has_text_reason_and_usage(stack: RouterStack) -> None:
    status, answer = await post(stack, BODY)

    assert status == 200
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (right(), "length")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["usage"] == {
        "prompt_tokens": 24,
        "completion_tokens": 30,
        "total_tokens": 54,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_has_the_same_text_and_ends_with_done(stack: RouterStack) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}

    got = await events(stack, body)

    assert got[-1] == "[DONE]"
    *chunks, usage = [json.loads(event) for event in got[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == right()
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert len(chunks) > 20, "tokens come as they are made"


async def test_many_streams_at_once_get_their_own_text(stack: RouterStack) -> None:
    prompts = [f"{i} {PROMPT}" for i in range(32)]

    got = await asyncio.gather(
        *(events(stack, {**BODY, "prompt": prompt, "stream": True}) for prompt in prompts)
    )

    texts = [
        "".join(json.loads(event)["choices"][0]["text"] for event in each[:-1]) for each in got
    ]
    assert texts == [right(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT], list(PROMPT.encode()), [list(PROMPT.encode())]]
)
async def test_a_prompt_is_text_or_token_ids_alone_or_in_a_list(
    stack: RouterStack, prompt: object
) -> None:
    _, answer = await post(stack, {**BODY, "prompt": prompt})

    assert answer["choices"][0]["text"] == right()


async def test_without_max_tokens_sixteen_are_made(stack: RouterStack) -> None:
    _, answer = await post(stack, {"model": MODEL, "prompt": PROMPT, "temperature": 0})

    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text(stack: RouterStack, include: bool) -> None:
    text = right()
    stop = text[10:13]

    body = {**BODY, "stop": stop, "include_stop_str_in_output": include}
    _, answer = await post(stack, body)

    (choice,) = answer["choices"]
    end = text.index(stop) + (len(stop) if include else 0)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text[:end],
        "stop",
        stop,
    )


async def test_log_probabilities_are_openais_columns(stack: RouterStack) -> None:
    _, whole = await post(stack, {**BODY, "logprobs": 2})
    streamed = await events(stack, {**BODY, "logprobs": 2, "stream": True})

    columns = whole["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == right()
    assert columns["text_offset"] == list(range(30))
    assert all(len(top) in (2, 3) for top in columns["top_logprobs"])
    assert len(columns["token_logprobs"]) == 30
    chunks = [json.loads(event)["choices"][0]["logprobs"] for event in streamed[:-2]]
    assert [token for chunk in chunks for token in chunk["tokens"]] == columns["tokens"]


async def test_null_is_the_same_as_absent(stack: RouterStack) -> None:
    nulls = dict.fromkeys(
        ["top_p", "stop", "seed", "n", "logprobs", "stream", "logit_bias", "user"]
    )

    status, answer = await post(stack, {**BODY, **nulls})

    assert (status, answer["choices"][0]["text"]) == (200, right())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_router_answers_429_with_a_time_to_wait(model: Model, stream: bool) -> None:
    async with router_stack(model, live_max=1) as stack:
        long = {**BODY, "max_tokens": 3000, "stream": True}
        async with stack.http.post("/v1/completions", json=long) as first:
            await first.content.readany()

            body = {**BODY, "stream": stream}
            async with stack.http.post("/v1/completions", json=body) as refused:
                answer = await refused.json()

        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert answer["error"]["code"] == "overloaded"
        await stack.empty()


async def test_a_client_that_leaves_stops_the_computing(stack: RouterStack) -> None:
    body = {**BODY, "max_tokens": 3000, "stream": True}
    async with stack.http.post("/v1/completions", json=body) as response:
        await response.content.readany()
        response.close()

    await eventually(lambda: stack.door.outcomes["cancelled"] == 1)


async def test_a_client_that_leaves_before_its_whole_answer_stops_the_computing(
    stack: RouterStack,
) -> None:
    asking = asyncio.create_task(post(stack, {**BODY, "max_tokens": 3000}))
    await eventually(lambda: stack.decode_seats() == 1)

    asking.cancel()

    await eventually(lambda: stack.door.outcomes["cancelled"] == 1)


async def test_a_client_that_does_not_read_is_given_up_and_costs_bounded_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.openai.events.UNSENT_BYTES_MAX", 10_000)
    completions = OpenAI.completions

    async def narrow(api: OpenAI, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return await completions(api, request)

    monkeypatch.setattr(OpenAI, "completions", narrow)
    async with router_stack(model) as stack:
        body = {**BODY, "max_tokens": 4000, "stream": True, "logprobs": 20}
        with await connected(stack, body):
            await eventually(lambda: stack.door.outcomes["cancelled"] == 1)
        await stack.empty()


async def connected(stack: RouterStack, body: object) -> socket.socket:
    """A client that sends its request and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, stack.http_address)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + data)
    return client


async def test_a_failure_after_the_first_byte_is_an_event_of_its_own(
    stack: RouterStack,
) -> None:
    body = {**BODY, "max_tokens": 4000, "stream": True}
    async with stack.http.post("/v1/completions", json=body) as response:
        await response.content.readany()
        (session,) = stack.workers.decode_worker.sessions.by_id.values()
        await eventually(lambda: bool(session.attempts))
        for attempt in list(session.attempts.values()):
            error = ServingError(Reason.STALLED, "no token came")
            stack.workers.decode_worker.decoding._fail(attempt, error)  # noqa: SLF001  # this is the fault
        rest = await response.text()

    *_, failure, done = rest.removesuffix("\n\n").split("\n\n")
    assert response.status == 200
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "stalled"
    assert done == "data: [DONE]"


async def test_a_failure_before_the_first_byte_is_its_own_status(model: Model) -> None:
    async with router_stack(model, timeout_s=0.2) as stack:
        stack.door.fleet.rooms.take = _never  # type: ignore[method-assign]  # this is the fault

        status, answer = await post(stack, {**BODY, "stream": True})

    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def _never(need: object) -> Any:
    await asyncio.sleep(60.0)


async def test_models_and_health_say_what_can_be_served(stack: RouterStack) -> None:
    async with stack.http.get("/v1/models") as response:
        models = await response.json()
    async with stack.http.get("/health") as health:
        pass

    assert [entry["id"] for entry in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == DECODE.model_len_max_tokens
    assert health.status == 200


async def test_small_writes_are_not_held_back(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    async def look(_: OpenAI, request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    monkeypatch.setattr(OpenAI, "health", look)
    async with router_stack(model) as stack, stack.http.get("/health"):
        pass

    assert seen == [1]
