"""What a client sees of a stream over HTTP: its text, its events, their order and their end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any  # JSON

import pytest

from splitwave.core.generation import Sampling
from splitwave.engine.sim import SimModel
from splitwave.engine.sim.tokens import prompt_logprobs
from tests.integration.router_stack import Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, PREFILL, eventually

SAYING = "日本語 🎉 naïve, 👩‍👩‍👧 and STOP here. "
PROMPT = "x" * len(SAYING.encode())  # So that the saying begins where the completion does.
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
SAID = bytes((SAYING * 2).encode()[:60]).decode(errors="replace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def reciting(model: Model) -> AsyncIterator[RouterStack]:
    """A stack whose model recites: a character is up to four tokens."""
    words = SAYING.encode()
    prefill, decode = replace(PREFILL, recites=words), replace(DECODE, recites=words)
    async with router_stack(model, prefill=prefill, decode=decode) as started:
        yield started
        await started.empty()


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with reciting(model) as started:
        yield started


@pytest.fixture
async def inventive(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started
        await started.empty()


async def chunks(
    stack: RouterStack, body: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """The chunks of a stream, each an event, [DONE] the last."""
    async with stack.http.post(path, json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        text = await response.text()
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts(got: list[dict[str, Any]]) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk in got if chunk["choices"]]


def reasons(got: list[dict[str, Any]]) -> list[str | None]:
    return [chunk["choices"][0]["finish_reason"] for chunk in got if chunk["choices"]]


async def test_characters_that_span_tokens_come_whole(stack: RouterStack) -> None:
    got = await chunks(stack, {**BODY, "max_tokens": len(SAYING.encode())})

    assert "".join(texts(got)) == SAYING
    assert not any("\ufffd" in text for text in texts(got))
    assert len(got) > 20, "they come as they are made"


async def test_a_character_that_is_cut_off_is_replaced_at_the_end_only(stack: RouterStack) -> None:
    got = await chunks(stack, {**BODY, "max_tokens": 1})

    assert texts(got) == ["\ufffd"]
    assert reasons(got) == ["length"]


@pytest.mark.parametrize("stop", ["STOP", "語 🎉", "🎉", "and STOP", "👩‍👩‍👧"])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_across_chunks_is_found_and_never_shown_in_part(
    stack: RouterStack, stop: str, include: bool
) -> None:
    body = {**BODY, "stop": [stop, "never said"], "include_stop_str_in_output": include}

    got = await chunks(stack, body)

    end = SAYING.index(stop) + (len(stop) if include else 0)
    assert "".join(texts(got)) == SAYING[:end]
    assert reasons(got) == [None] * (len(got) - 1) + ["stop"]
    assert got[-1]["choices"][0]["stop_reason"] == stop


async def test_what_only_begins_a_stop_string_is_shown_in_the_end(stack: RouterStack) -> None:
    tokens = len("日本語 🎉 naï".encode())

    got = await chunks(stack, {**BODY, "stop": "naïf", "max_tokens": tokens})

    assert "".join(texts(got)) == "日本語 🎉 naï"
    assert reasons(got)[-1] == "length"


async def test_the_usage_chunk_is_the_last_and_counts_what_was_made(stack: RouterStack) -> None:
    body = {**BODY, "stop": "🎉", "stream_options": {"include_usage": True}}

    *got, usage = await chunks(stack, body)

    made = len("日本語 🎉".encode())
    counts = {key: usage["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert usage["choices"] == []
    assert counts == {"prompt_tokens": len(PROMPT), "completion_tokens": made}
    assert all(chunk["usage"] is None for chunk in got)


async def test_one_token_is_a_whole_stream(inventive: RouterStack) -> None:
    got = await chunks(inventive, {**BODY, "max_tokens": 1})
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
    }
    said = await chunks(inventive, chat, "/v1/chat/completions")

    assert [len(text) for text in texts(got) if text] == [1]
    assert reasons(got)[-1] == "length"
    deltas = [chunk["choices"][0]["delta"] for chunk in said]
    assert (deltas[0], len(deltas)) == ({"role": "assistant", "content": ""}, 3)
    assert reasons(said) == [None, None, "length"]


async def test_three_choices_come_interleaved_and_end_once_each(inventive: RouterStack) -> None:
    body = {**BODY, "n": 3, "seed": 11, "temperature": 1, "stop": "e"}

    got = await chunks(inventive, body)

    order = [chunk["choices"][0]["index"] for chunk in got]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order)
    ended = [c["choices"][0]["index"] for c in got if c["choices"][0]["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]
    for index in range(3):
        mine = [chunk for chunk in got if chunk["choices"][0]["index"] == index]
        assert mine[-1]["choices"][0]["finish_reason"]
        sampling = Sampling(max_tokens=60, seed=11 + index)
        whole = bytes(SimModel().complete(list(PROMPT.encode()), sampling).token_ids).decode()
        assert "".join(texts(mine)) == whole.partition("e")[0]


async def test_cancelling_a_stream_cancels_all_of_its_choices(inventive: RouterStack) -> None:
    body = {**BODY, "n": 3, "seed": 1, "temperature": 1, "max_tokens": 3000}
    async with inventive.http.post("/v1/completions", json=body) as response:
        await response.content.readany()
        await eventually(lambda: inventive.decode_seats() == 3)
        response.close()

    await eventually(lambda: inventive.door.outcomes["cancelled"] == 1)
    await inventive.empty()


async def test_several_prompts_are_numbered_in_order(inventive: RouterStack) -> None:
    body = {**BODY, "prompt": ["one", [116, 119, 111]], "n": 2, "max_tokens": 8, "stream": False}

    async with inventive.http.post("/v1/completions", json=body) as response:
        answer = await response.json()

    right = [
        bytes(SimModel().complete(list(p), Sampling(max_tokens=8, temperature=0)).token_ids)
        for p in (b"one", b"two")
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    said = [choice["text"].encode() for choice in answer["choices"]]
    assert said == [right[0], right[0], right[1], right[1]]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 32)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi there", [72, 105]])
async def test_an_echo_scores_the_prompt(
    inventive: RouterStack, stream: bool, prompt: str | list[int]
) -> None:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    body = {**BODY, "prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}

    if stream:
        got = await chunks(inventive, body)
        text = "".join(texts(got))
        told = [chunk["choices"][0]["logprobs"] for chunk in got]
        columns = {
            key: [value for each in told if each for value in each[key]]
            for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
    else:
        async with inventive.http.post("/v1/completions", json={**body, "stream": False}) as x:
            (choice,) = (await x.json())["choices"]
        text, columns = choice["text"], choice["logprobs"]

    assert text.startswith(bytes(ids).decode())
    assert "".join(columns["tokens"]) == text
    assert columns["text_offset"] == list(range(len(text)))
    scored = [row.logprob for row in prompt_logprobs(ids, 1)]
    assert columns["token_logprobs"][: len(ids)] == [None, *map(pytest.approx, scored)]
    assert columns["top_logprobs"][0] is None


async def test_a_prompt_is_scored_without_a_completion(inventive: RouterStack) -> None:
    body = {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 0}

    async with inventive.http.post("/v1/completions", json=body) as response:
        answer = await response.json()

    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("Hi", ["H", "i"])
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2


async def test_vllms_prompt_logprobs_are_by_token_id(inventive: RouterStack) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "prompt_logprobs": 1}

    async with inventive.http.post("/v1/completions", json=body) as response:
        (choice,) = (await response.json())["choices"]

    first, second = choice["prompt_logprobs"]
    (row,) = prompt_logprobs([72, 105], 1)
    assert first is None
    assert second["105"]["logprob"] == pytest.approx(row.logprob)
    assert (second["105"]["rank"], second["105"]["decoded_token"]) == (row.rank, "i")


async def test_more_choices_than_the_pool_ever_holds_are_refused_at_once(model: Model) -> None:
    """Waiting cannot help them; fewer wait for room if they must, and are served."""
    few = replace(DECODE, ranks=2, seats_per_rank=3)
    async with router_stack(model, decode=few) as stack:
        whole = {**BODY, "stream": False, "max_tokens": 8}
        began_s = asyncio.get_running_loop().time()
        async with stack.http.post("/v1/completions", json={**whole, "n": 7}) as response:
            refused = (await response.json())["error"]
        took_s = asyncio.get_running_loop().time() - began_s
        single = {**whole, "n": 7, "max_tokens": 1}
        fits = {**whole, "n": 6}
        async with asyncio.timeout(30.0):
            for body in (fits, single):  # Of one token each there is nothing to decode.
                async with stack.http.post("/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
        await stack.empty()

    assert (response.status, refused["param"]) == (200, "n")
    assert "the 6 for which" in refused["message"]
    assert took_s < 10.0, "a turn for room takes 30 s"
    assert stack.door.admitted == 2, "it was not let in"


async def test_choices_too_long_for_the_pools_blocks_are_refused_at_once(model: Model) -> None:
    few = replace(DECODE, ranks=1, seats_per_rank=64, blocks_per_rank=256)
    async with router_stack(model, decode=few) as stack:
        long = {**BODY, "stream": False, "prompt": "x" * 2000, "max_tokens": 8}
        async with stack.http.post("/v1/completions", json={**long, "n": 5}) as response:
            answer = await response.json()
        await stack.empty()

    assert (response.status, answer["error"]["param"]) == (400, "n"), answer
