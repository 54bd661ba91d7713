"""What cannot be served is refused by name, over HTTP and gRPC, before anything is done for it.

One stack for the whole table: a refusal leaves nothing behind, which the last test asserts.
"""

import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any  # JSON

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from services.router.refusals import OTHER
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.wire.chat import Conversation
from splitwave.wire.client import Ask, generate
from splitwave.wire.errors import from_rpc_error
from tests.integration.bad_fields import CASES, CHAT, COMPLETION, TOKENIZE
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = Sampling(max_tokens=5, temperature=0.0)
DEEP = "[" * 100_000
GENERATE = "/splitwave.v1alpha1.GenerateService/Generate"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model, live_max=16) as started:
        yield started


@contextlib.contextmanager
def counted_once(stack: RouterStack, route: str) -> Iterator[None]:
    """The call is counted as refused on its route, or has an outcome if it was let in."""
    door = stack.door

    def seen() -> tuple[int, int]:
        mine = sum(n for (where, _), n in door.refusals.counts.items() if where == route)
        return mine + door.outcomes.total(), door.refusals.counts.total() + door.outcomes.total()

    before = seen()
    yield
    assert seen() == (before[0] + 1, before[1] + 1)


def label(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=label)
async def test_a_bad_request_names_its_field(
    stack: RouterStack, path: str, body: dict[str, Any], param: str
) -> None:
    for stream in ({}, {"stream": True}):
        data = json.dumps({**stream, **body}).encode()
        with counted_once(stack, path):
            async with stack.http.post(path, data=data) as response:
                answer = await response.json()

        assert (response.status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["code"] in ("invalid_request", "unsupported_feature")
        assert "; " in answer["error"]["message"], "it says what to do"


@pytest.mark.parametrize(("body", "param"), TOKENIZE, ids=label)
async def test_what_is_not_tokenized_is_named(
    stack: RouterStack, body: dict[str, Any], param: str
) -> None:
    async with stack.http.post("/tokenize", json=body) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["param"]) == (400, param), answer


async def test_a_bad_id_in_a_header_names_the_header(stack: RouterStack) -> None:
    headers = {"X-Request-Id": "a b"}
    async with stack.http.post("/v1/completions", json=COMPLETION, headers=headers) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["param"]) == (400, "X-Request-Id")


async def test_what_a_value_is_held_against_is_named_as_it_was_sent(stack: RouterStack) -> None:
    body = {**CHAT, "min_tokens": 9, "max_completion_tokens": 5}
    async with stack.http.post("/v1/chat/completions", json=body) as response:
        error = (await response.json())["error"]

    assert error["param"] == "min_tokens"
    assert "[0, max_completion_tokens = 5]" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"3", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\xff", "messages": 1}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"temperature": NaN}', 400),
        (b'{"temperature": 1e999}', 400),
        (b'{"max_tokens": 3}', 400),
        (b'{"prompt": "x"} {}', 400),
        (f'{{"prompt": {DEEP}'.encode(), 400),
        (f'{{"tools": {DEEP}'.encode(), 400),
        (f'{{"chat_template_kwargs": {{"a": {DEEP}'.encode(), 400),
        (b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}', 413),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, bytes) else "",
)
async def test_a_body_that_is_no_request_is_refused(
    stack: RouterStack, path: str, body: bytes, status: int
) -> None:
    with counted_once(stack, path):
        async with stack.http.post(path, data=io.BytesIO(body)) as response:
            answer = await response.json()

    assert (response.status, answer["error"]["type"]) == (status, "invalid_request_error")
    assert "; " in answer["error"]["message"], "it says what to do"
    if status == 413:
        assert answer["error"]["code"] == "body_too_large"
        assert "16 MiB" in answer["error"]["message"]


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_an_unknown_model_is_not_found(stack: RouterStack, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with stack.http.post(path, json={**body, "model": "gone"}) as response:
        answer = await response.json()

    error = answer["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allowed"),
    [
        ("GET", "/v1/nothing", 404, "not_found", None),
        ("GET", "/v1/completions", 405, "method_not_allowed", "POST"),
        ("POST", "/health", 405, "method_not_allowed", "GET,HEAD"),
    ],
)
async def test_an_unknown_path_is_refused_in_openais_words(  # noqa: PLR0913  # one row of the table
    stack: RouterStack, method: str, path: str, status: int, code: str, allowed: str | None
) -> None:
    with counted_once(stack, OTHER):
        async with stack.http.request(method, path) as response:
            error = (await response.json())["error"]

    assert (response.status, error["type"]) == (status, "invalid_request_error")
    assert error["code"] == code
    assert error["message"].startswith(f"{method} {path}: ")
    assert response.headers.get("Allow") == allowed


@dataclass(frozen=True)
class Refusal:
    """A gRPC request and how its refusal's message begins."""

    ask: Ask
    message: str
    reason: Reason = Reason.INVALID_REQUEST


def ask(**changes: Any) -> Ask:
    return replace(Ask(prompt="Hi there", sampling=GREEDY), **changes)


def sampled(**changes: Any) -> Ask:
    return ask(sampling=replace(GREEDY, **changes))


OVER_GRPC = [
    Refusal(ask(prompt=""), "prompt: empty"),
    Refusal(ask(prompt=[]), "prompt: empty"),
    Refusal(ask(prompt=[9, 260]), "prompt: token id 260"),
    Refusal(ask(prompt="x" * 4096), "prompt: 4096 tokens"),
    Refusal(ask(prompt=Conversation(messages=[])), "messages: empty"),
    Refusal(
        ask(prompt=Conversation(messages=[{"role": "u", "content": "x"}],
                                add_generation_prompt=True, continue_final_message=True)),
        "continue_final_message: not with",
    ),
    Refusal(ask(choices=0), "n: 0"),
    Refusal(ask(choices=129), "n: 129"),
    Refusal(ask(prompt_logprobs=21), "prompt_logprobs: 21"),
    Refusal(ask(prompt="x" * 4000, prompt_logprobs=20), "prompt_logprobs: 21 for each of 4000"),
    Refusal(ask(stop=("",)), r"stop\[0\]: an empty"),
    Refusal(ask(model="x"), "model: 'x'", Reason.MODEL_NOT_FOUND),
    Refusal(ask(request_id="a b"), "request_id: use"),
    Refusal(sampled(max_tokens=0), "max_tokens: 0 is below 1"),
    Refusal(sampled(max_tokens=5000), "max_tokens: 5000 is more than the 4088 tokens"),
    Refusal(sampled(min_tokens=9), "min_tokens: 9"),
    Refusal(sampled(temperature=-1.0), "temperature: -1.0"),
    Refusal(sampled(temperature=float("nan")), "temperature: nan"),
    Refusal(sampled(top_p=2.0), "top_p: 2.0"),
    Refusal(sampled(min_p=-1.0), "min_p: -1.0"),
    Refusal(sampled(presence_penalty=3.0), "presence_penalty: 3.0"),
    Refusal(sampled(repetition_penalty=-1.0), "repetition_penalty: -1.0"),
    Refusal(sampled(logit_bias={999: 1.0}), "logit_bias: token id 999"),
    Refusal(sampled(stop_token_ids=(999,)), "stop_token_ids: token id 999"),
    Refusal(sampled(eos_token_ids=(1,)), "eos_token_ids: these are the model's"),
    Refusal(sampled(logprobs=21), "logprobs: 21"),
    Refusal(
        ask(prompt="x", sampling=replace(GREEDY, repetition_penalty=1.2)),
        "prompt: one token",
        Reason.UNSUPPORTED_FEATURE,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", OVER_GRPC, ids=lambda case: case.message)
async def test_a_bad_request_over_grpc_names_its_field(stack: RouterStack, case: Refusal) -> None:
    with (
        counted_once(stack, GENERATE),
        pytest.raises(ServingError, match=case.message) as refused,
    ):
        async for _ in generate(stack.channel, case.ask, timeout_s=20.0):
            pass

    assert refused.value.reason is case.reason


async def test_bytes_that_are_no_request_are_refused_with_a_reason(stack: RouterStack) -> None:
    """gRPC by itself says UNKNOWN, with the name of an exception of ours and no reason."""
    tokenize = GENERATE.replace("/Generate", "/Tokenize")
    unary: Any = stack.channel.unary_unary(tokenize)
    stream: Any = stack.channel.unary_stream(GENERATE)
    calls: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        (tokenize, lambda: unary(b"\xff\xff", timeout=20.0)),
        (GENERATE, lambda: stream(b"\xff\xff", timeout=20.0).read()),
    ]
    for path, call in calls:
        with counted_once(stack, path), pytest.raises(grpc.aio.AioRpcError) as refused:
            await call()
        error = from_rpc_error(refused.value)
        assert (error.reason, error.message[:12]) == (Reason.INVALID_REQUEST, "the request:")


async def test_a_method_that_is_not_there_is_counted(stack: RouterStack) -> None:
    call: Any = stack.channel.unary_unary("/splitwave.v1alpha1.GenerateService/Sing")
    with counted_once(stack, OTHER), pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"", timeout=20.0)

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_refusals_are_told_by_route_and_reason_and_begin_at_zero(stack: RouterStack) -> None:
    async with stack.http.post("/v1/completions", json={"prompt": ""}):
        pass
    async with stack.http.get("/metrics") as response:
        text = await response.text()

    def told(route: str, reason: str) -> float:
        name = "splitwave_router_requests_refused_total"
        return float(text.partition(f'{name}{{reason="{reason}",route="{route}"}} ')[2].split()[0])

    assert told("/v1/completions", "invalid_request") > 0
    assert told(GENERATE, "cancelled") == 0


async def test_no_refusal_has_left_anything_behind(stack: RouterStack) -> None:
    assert stack.door.admission.live == 0
    assert stack.door.outcomes.keys() <= {Reason.UNSUPPORTED_FEATURE.value}
    await stack.empty()
