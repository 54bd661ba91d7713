"""Chats over HTTP, on simulated engines: the text is that of the rendered conversation."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any  # JSON

import pytest

from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel
from splitwave.engine.sim.tokens import prompt_logprobs
from splitwave.wire.chat import Conversation
from splitwave.wire.client import Ask, generate
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_completion_tokens": 12,
    "temperature": 0,
}
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    """Decode takes its time, so that choices overlap on a busy machine too."""
    async with router_stack(model, decode=replace(DECODE, step_fixed_s=0.02)) as started:
        yield started
        await started.empty()


def right(model: Model, rendered: str = RENDERED, tokens: int = 12) -> str:
    """The text of an aggregated engine."""
    prompt = model.tokenizer.encode(rendered)
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return bytes(SimModel().complete(prompt, sampling).token_ids).decode()


async def chat(stack: RouterStack, body: object) -> tuple[int, Any]:
    async with stack.http.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


async def chunks(stack: RouterStack, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which has ended with [DONE]."""
    async with stack.http.post("/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status == 200
        text = await response.text()
    *events, done = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def test_an_answer_is_the_completion_of_the_rendered_conversation(
    stack: RouterStack, model: Model
) -> None:
    status, answer = await chat(stack, BODY)

    assert status == 200
    (choice,) = answer["choices"]
    message = {"role": "assistant", "content": right(model), "refusal": None}
    assert (choice["message"], choice["finish_reason"]) == (message, "length")
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode(RENDERED))


async def test_a_stream_says_the_role_first_and_the_reason_once(
    stack: RouterStack, model: Model
) -> None:
    got = await chunks(stack, {**BODY, "stream_options": {"include_usage": True}})

    *said, usage = got
    deltas = [chunk["choices"][0]["delta"] for chunk in said]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == right(model)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in said]
    assert reasons == [None] * (len(said) - 1) + ["length"]
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)


async def test_parts_of_text_are_joined_and_null_fields_of_answers_are_taken(
    stack: RouterStack, model: Model
) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    told = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    messages = [{"role": "user", "content": parts}, told]

    _, answer = await chat(stack, {**BODY, "messages": messages})

    rendered = (
        "<|im_start|>user\nHel\nlo<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert answer["choices"][0]["message"]["content"] == right(model, rendered)


async def test_a_final_message_can_be_continued(stack: RouterStack, model: Model) -> None:
    messages = [MESSAGES[1], {"role": "assistant", "content": "So "}]

    body = {**BODY, "messages": messages, "continue_final_message": True}
    _, answer = await chat(stack, body)

    rendered = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nSo "
    assert answer["choices"][0]["message"]["content"] == right(model, rendered)


async def test_log_probabilities_come_with_text_and_bytes(stack: RouterStack, model: Model) -> None:
    body = {**BODY, "logprobs": True, "top_logprobs": 2}
    _, answer = await chat(stack, body)
    streamed = await chunks(stack, body)

    rows = answer["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == right(model)
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == right(model)
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    found = [x["choices"][0]["logprobs"] for x in streamed if x["choices"][0]["logprobs"]]
    assert [row for each in found for row in each["content"]] == rows


async def test_what_is_neutral_is_taken(stack: RouterStack, model: Model) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logprobs": None,
        "store": False,
        "best_of": 1,
        "modalities": ["text"],
        "spaces_between_special_tokens": True,
    }

    status, answer = await chat(stack, {**BODY, **neutral})

    assert (status, answer["choices"][0]["message"]["content"]) == (200, right(model))


@pytest.mark.parametrize("stream", [False, True])
async def test_three_choices_have_seeds_of_their_own_and_one_prompt(
    stack: RouterStack, model: Model, stream: bool
) -> None:
    body = {**BODY, "n": 3, "seed": 5, "temperature": 1}
    if stream:
        got = await chunks(stack, {**body, "stream_options": {"include_usage": True}})
        usage, texts = got.pop()["usage"], ["", "", ""]
        for chunk in got:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
        order = [chunk["choices"][0]["index"] for chunk in got]
        assert order != sorted(order), "the choices come interleaved"
    else:
        _, answer = await chat(stack, body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        usage = answer["usage"]

    prompt = model.tokenizer.encode(RENDERED)
    right_texts = [
        bytes(SimModel().complete(prompt, Sampling(max_tokens=12, seed=seed)).token_ids).decode()
        for seed in (5, 6, 7)
    ]
    assert texts == right_texts
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 36)


async def test_a_conversations_log_probabilities_stand_beside_the_choices_once(
    stack: RouterStack, model: Model
) -> None:
    """Where vLLM has them; a stream tells them in its first chunk."""
    asked = {**BODY, "n": 2, "prompt_logprobs": 1, "return_token_ids": True}
    _, whole = await chat(stack, asked)
    first, *others = await chunks(stack, asked)

    ids = model.tokenizer.encode(RENDERED)
    nothing, *rows = whole["prompt_logprobs"]
    assert nothing is None
    for told, row in zip(rows, prompt_logprobs(ids, 1), strict=True):
        assert told[str(row.token_id)]["logprob"] == pytest.approx(row.logprob)
        assert told[str(row.token_id)]["rank"] == row.rank
        assert told.keys() == {str(row.token_id), *(str(each) for each, _ in row.top)}
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == ids
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any({"prompt_logprobs", "prompt_token_ids"} & chunk.keys() for chunk in others)
    _, plain = await chat(stack, BODY)
    assert whole["choices"][0]["message"] == plain["choices"][0]["message"]


async def test_a_conversations_log_probabilities_are_the_same_over_grpc(
    stack: RouterStack,
) -> None:
    _, over_http = await chat(stack, {**BODY, "prompt_logprobs": 2})
    sampling = Sampling(max_tokens=12, temperature=0.0)
    ask = Ask(prompt=Conversation(messages=MESSAGES), sampling=sampling, prompt_logprobs=2)
    first, *_ = [answer async for answer in generate(stack.channel, ask, 20.0)]

    over_grpc = [dict(((row.token_id, row.logprob), *row.top)) for row in first.prompt_logprobs]
    told = [
        {int(token_id): each["logprob"] for token_id, each in row.items()}
        for row in over_http["prompt_logprobs"][1:]
    ]
    assert told == over_grpc, "the simulator's fit into 32 bits"
