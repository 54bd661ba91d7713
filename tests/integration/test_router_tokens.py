"""vLLM's endpoints beside OpenAI's, and the OpenAPI document that describes both."""

import json
from collections.abc import AsyncIterator
from typing import Any  # JSON

import msgspec
import pytest

from services.router.openai import openapi
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started
        await started.empty()


async def post(stack: RouterStack, path: str, body: object) -> tuple[int, Any]:
    async with stack.http.post(path, json=body) as response:
        return response.status, await response.json()


async def get(stack: RouterStack, path: str) -> tuple[int, Any]:
    async with stack.http.get(path) as response:
        return response.status, await response.json()


async def test_a_text_has_token_ids_and_the_models_length(stack: RouterStack) -> None:
    status, answer = await post(stack, "/tokenize", {"prompt": "Hé", "return_token_strs": True})

    assert status == 200
    assert answer == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [72, 195, 169],
        "token_strs": ["H", "bytes:\\xc3", "bytes:\\xa9"],
    }


async def test_a_chat_is_rendered_before_it_is_tokenized(stack: RouterStack, model: Model) -> None:
    _, answer = await post(stack, "/tokenize", CHAT)
    _, text = await post(stack, "/detokenize", {"tokens": answer["tokens"]})

    assert answer["tokens"] == model.tokenizer.encode(RENDERED)
    assert text == {"prompt": RENDERED}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {**CHAT, "prompt": "x"}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "colour": 1}, 400, "colour"),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_name(
    stack: RouterStack, path: str, body: object, status: int, param: str | None
) -> None:
    got, answer = await post(stack, path, body)

    assert (got, answer["error"]["param"]) == (status, param)


async def test_ready_says_what_it_depends_on(stack: RouterStack) -> None:
    assert await get(stack, "/ready") == (
        200,
        {"ready": True, "draining": False, "prefill_workers": 1, "decode_workers": 1},
    )

    stack.door.admission.closed = True

    status, answer = await get(stack, "/ready")
    assert (status, answer["ready"], answer["draining"]) == (503, False, True)


async def test_a_model_is_described_by_its_name(stack: RouterStack) -> None:
    status, answer = await get(stack, f"/v1/models/{MODEL}")
    missing, error = await get(stack, "/v1/models/not/here")

    assert (status, answer["id"]) == (200, MODEL)
    assert (missing, error["error"]["code"]) == (404, "model_not_found")


async def test_metrics_are_served_beside_the_api(stack: RouterStack) -> None:
    async with stack.http.get("/metrics") as response:
        text = await response.text()

    assert "splitwave_router_requests_live " in text


async def test_the_document_names_every_route_and_field(stack: RouterStack) -> None:
    _, document = await get(stack, "/openapi.json")

    assert document["openapi"].startswith("3.1")
    body = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "stop", "chat_template_kwargs"} <= body.keys()
    assert "429" in document["paths"]["/v1/completions"]["post"]["responses"]
    named = set(json.dumps(document).split('"')) & {"#/components/schemas/ErrorAnswer"}
    assert named


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
PLAIN = {
    "prompt": ["Hi there", "Ho"],
    "max_tokens": 4,
    "n": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "echo": True,
    "return_token_ids": True,
}
SAID = {
    **CHAT,
    "max_tokens": 4,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 1,
    "prompt_logprobs": 1,
    "return_token_ids": True,
}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", PLAIN, openapi.CompletionAnswer),
        ("/v1/chat/completions", SAID, openapi.ChatAnswer),
        ("/tokenize", CHAT, openapi.TokenizeAnswer),
        ("/detokenize", {"tokens": [65]}, openapi.DetokenizeAnswer),
        ("/v1/models", None, openapi.ModelList),
        (f"/v1/models/{MODEL}", None, openapi.ModelView),
        ("/ready", None, openapi.ReadyAnswer),
        ("/v1/completions", {"prompt": ""}, openapi.ErrorAnswer),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_answers_are_as_the_document_says(
    stack: RouterStack, path: str, body: object, kind: type[msgspec.Struct]
) -> None:
    _, answer = await (get(stack, path) if body is None else post(stack, path, body))

    assert_fits(answer, kind)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", PLAIN, openapi.CompletionAnswer),
        ("/v1/chat/completions", SAID, openapi.ChatAnswer),
    ],
)
async def test_chunks_are_as_the_document_says(
    stack: RouterStack, path: str, body: dict[str, Any], kind: type[msgspec.Struct]
) -> None:
    async with stack.http.post(path, json={**body, **STREAMED}) as response:
        text = await response.text()

    for event in text.strip().split("\n\n")[:-1]:
        assert_fits(json.loads(event.removeprefix("data: ")), kind)


def assert_fits(answer: Any, kind: type[msgspec.Struct]) -> None:
    """The answer is of that kind, and no field of it goes unsaid."""
    read = msgspec.to_builtins(msgspec.convert(answer, kind, str_keys=True), str_keys=True)
    assert_within(answer, read)


def assert_within(answer: Any, read: Any) -> None:
    if isinstance(answer, dict):
        assert answer.keys() <= read.keys()
        for key, value in answer.items():
            assert_within(value, read[key])
    elif isinstance(answer, list):
        for value, other in zip(answer, read, strict=True):
            assert_within(value, other)
