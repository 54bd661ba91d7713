"""What cannot be served is refused by name, over HTTP and gRPC, before anything is done for it.

One stack for the whole table: a refusal leaves nothing behind, which the last test asserts.
"""

import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
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
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "Hi there", "max_tokens": 5}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
GREEDY = Sampling(max_tokens=5, temperature=0.0)
DEEP = "[" * 100_000
GENERATE = "/splitwave.v1alpha1.GenerateService/Generate"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started


BOTH: Sequence[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "colour"),
    ({"model": 7}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 99999}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"priority": 2**31}, "priority"),
    ({"priority": -(2**31) - 1}, "priority"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"65": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["x", "y" * 257]}, "stop[1]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"priority": "high"}, "priority"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto", "tools": [{}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]

COMPLETIONS: Sequence[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x" * 4096}, "prompt"),
    ({"prompt": "x", "seed": 1}, "prompt"),
    ({"prompt": "x" * 3300, "echo": True, "logprobs": 20}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]

CHATS: Sequence[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
]

CASES = [
    *(("/v1/completions", {**COMPLETION, **change}, param) for change, param in BOTH),
    *(("/v1/chat/completions", {**CHAT, **change}, param) for change, param in BOTH),
    *(("/v1/completions", {**COMPLETION, **x}, param) for x, param in COMPLETIONS),
    *(("/v1/chat/completions", {**CHAT, **change}, param) for change, param in CHATS),
]


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


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_an_unknown_model_is_not_found(stack: RouterStack, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with stack.http.post(path, json={**body, "model": "gone"}) as response:
        answer = await response.json()

    error = answer["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert MODEL in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
async def test_an_unknown_path_is_refused_in_openais_words(
    stack: RouterStack, method: str, path: str, status: int
) -> None:
    with counted_once(stack, OTHER):
        async with stack.http.request(method, path) as response:
            answer = await response.json()

    assert (response.status, answer["error"]["type"]) == (status, "invalid_request_error")


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
