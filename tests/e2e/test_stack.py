"""The whole stack as users start it, real engines: its text, counts and ends are the truth."""

import asyncio
import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any  # JSON

import grpc.aio
import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling, first_token_is_kept
from splitwave.core.worker import WorkerDescription
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.wire.client import Answer, Ask, describe_worker, generate
from tests.e2e.adapter_cases import BLOCK, Case, cases, greedy, prompt
from tests.e2e.adapter_oracle import PROMPT_LOGPROBS
from tests.e2e.live_stack import LiveStack, running

ROOT = Path(__file__).parents[2]
ORACLE_LIMIT_S = 300
FREED_WITHIN_S = 2.0

# One token whose first token must come from decode: refused by name, tested below.
SERVED = [c for c in cases() if len(c.token_ids) > 1 or first_token_is_kept(c.sampling)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    return model


@pytest.fixture(scope="module")
def aggregated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("oracle") / "aggregated.json"
    command = [sys.executable, "-m", "tests.e2e.adapter_oracle", str(tiny_model), str(out)]
    subprocess.run(command, cwd=ROOT, timeout=ORACLE_LIMIT_S, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def stack(
    aggregated: dict[str, Any], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveStack]:
    """Leases of 600 s: whatever comes back sooner was given back, not waited for."""
    del aggregated  # It has ended by now, so the two do not share the cores.
    run_dir = tmp_path_factory.mktemp("stack")
    with running(tiny_model, run_dir, "--prefill-setting", "lease_ttl_s=600") as live:
        yield live


@pytest.fixture
async def router(stack: LiveStack) -> AsyncIterator[grpc.aio.Channel]:
    async with stack.channel("grpc") as channel:
        yield channel


async def described(stack: LiveStack, name: str) -> WorkerDescription:
    async with stack.channel(name) as channel:
        return await describe_worker(channel, 10.0, counters=True)


async def completed(channel: grpc.aio.Channel, case: Case) -> list[Answer]:
    sampling = replace(case.sampling, eos_token_ids=())  # The router knows the model's.
    ask = Ask(prompt=case.token_ids, sampling=sampling)
    return [answer async for answer in generate(channel, ask, 120.0)]


def tokens_of(answers: list[Answer]) -> list[int]:
    offset = 0
    token_ids: list[int] = []
    for answer in answers:
        assert answer.offset == offset
        token_ids += answer.token_ids
        offset += len(answer.token_ids)
    return token_ids


async def idle(stack: LiveStack) -> None:
    """Return once nothing is held anywhere; AssertionError if something stays held."""
    deadline_s = time.monotonic() + FREED_WITHIN_S
    while True:
        prefill, decode = await described(stack, "prefill"), await described(stack, "decode")
        held = {
            "leases": prefill.leases.live,
            "engine leases": sum(rank.leases_live for rank in prefill.rank_counters),
            "prefill blocks": sum(rank.blocks_used for rank in prefill.rank_counters),
            "decode blocks": sum(rank.blocks_used for rank in decode.rank_counters),
        }
        if not any(held.values()):
            return
        assert time.monotonic() < deadline_s, f"still held: {held}"
        await asyncio.sleep(0.1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
async def test_split_serving_gives_the_tokens_of_an_aggregated_run(
    case: Case, router: grpc.aio.Channel, aggregated: dict[str, Any]
) -> None:
    answers = await completed(router, case)

    assert tokens_of(answers) == aggregated[case.name]["tokens"]
    assert answers[-1].finish_reason == aggregated[case.name]["finish"]
    assert [a.finish_reason for a in answers[:-1]] == [None] * (len(answers) - 1)


async def test_32_concurrent_requests_give_the_same(
    router: grpc.aio.Channel, aggregated: dict[str, Any]
) -> None:
    burst = SERVED[:32]

    answers = await asyncio.gather(*(completed(router, case) for case in burst))

    got = {case.name: tokens_of(found) for case, found in zip(burst, answers, strict=True)}
    assert got == {case.name: aggregated[case.name]["tokens"] for case in burst}


@pytest.mark.parametrize(
    "case", [c for c in SERVED if c.sampling.logprobs], ids=lambda case: case.name
)
async def test_log_probabilities_are_those_of_an_aggregated_run(
    case: Case, router: grpc.aio.Channel, aggregated: dict[str, Any]
) -> None:
    rows = [row for answer in await completed(router, case) for row in answer.logprobs]

    assert len(rows) == len(aggregated[case.name]["tokens"])
    for row, expected in zip(rows, aggregated[case.name]["logprobs"], strict=True):
        assert len(row.top) == case.sampling.logprobs
        for token_id, logprob in ((row.token_id, row.logprob), *row.top):
            assert logprob == pytest.approx(expected[str(token_id)], abs=1e-3)


SCORED = [
    c for c in SERVED if c.name in ("length 2", "length 33", "length 511", "presence penalty")
]


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
async def test_a_prompts_log_probabilities_are_those_of_an_aggregated_run(
    case: Case, router: grpc.aio.Channel, aggregated: dict[str, Any]
) -> None:
    sampling = replace(case.sampling, max_tokens=4)
    ask = Ask(prompt=case.token_ids, sampling=sampling, prompt_logprobs=PROMPT_LOGPROBS)
    answers = [answer async for answer in generate(router, ask, 120.0)]

    rows = answers[0].prompt_logprobs
    assert [row.token_id for row in rows] == case.token_ids[1:]
    assert tokens_of(answers) == aggregated[case.name]["tokens"][:4], "and decode is as it was"
    for row, expected in zip(rows, aggregated[case.name]["prompt_logprobs"], strict=True):
        assert len(row.top) == PROMPT_LOGPROBS
        for token_id, logprob in ((row.token_id, row.logprob), *row.top):
            assert logprob == pytest.approx(expected[str(token_id)], abs=1e-3)


async def test_decode_pulls_what_the_prompts_need_and_computes_no_prompt(
    stack: LiveStack, router: grpc.aio.Channel
) -> None:
    before = await described(stack, "decode")
    sent = [Case(f"{n}", prompt(n, 9), greedy(4)) for n in (2, BLOCK, BLOCK + 1, 100)]
    needed = sum(math.ceil(len(case.token_ids) / BLOCK) for case in sent) * before.block_bytes

    answers = [await completed(router, case) for case in sent]

    after = await described(stack, "decode")
    moved = [sum(r.bytes_pulled for r in d.rank_counters) for d in (before, after)]
    assert moved[1] - moved[0] == needed
    assert sum(found[-1].handoff_bytes for found in answers) == needed
    assert [r.prefill_tokens_computed for r in after.rank_counters] == [0, 0]
    assert all(set(r.steps_by_kind) == {"eager"} for r in after.rank_counters)
    assert all(not any(r.guard_refusals.values()) for r in after.rank_counters)


@pytest.mark.parametrize(
    "sampling",
    [
        greedy(1),
        greedy(8, ignore_eos=False, logit_bias={259: 100.0}),
        greedy(8, logit_bias={7: 100.0}, stop_token_ids=(7,)),
    ],
    ids=["max_tokens 1", "eos at once", "stop token at once"],
)
async def test_a_request_that_ends_at_its_first_token_holds_nothing(
    sampling: Sampling, stack: LiveStack, router: grpc.aio.Channel
) -> None:
    answers = await completed(router, Case("", prompt(40, 5), sampling))

    assert len(tokens_of(answers)) == 1
    await idle(stack)


async def test_a_client_that_leaves_frees_everything_within_two_seconds(
    stack: LiveStack, router: grpc.aio.Channel
) -> None:
    ask = Ask(prompt=prompt(200, 6), sampling=greedy(700))
    stream = generate(router, ask, 120.0)
    for _ in range(3):
        await anext(stream)

    await stream.aclose()

    await idle(stack)


async def test_a_one_token_prompt_whose_first_token_is_decodes_is_refused_by_name(
    router: grpc.aio.Channel,
) -> None:
    with pytest.raises(ServingError) as refused:
        await completed(router, Case("", [65], greedy(4, temperature=0.5, seed=1)))

    assert refused.value.reason is Reason.UNSUPPORTED_FEATURE


def test_http_streams_the_text_that_it_gives_at_once(stack: LiveStack) -> None:
    body = {"model": stack.served_model, "prompt": "Say it.", "max_tokens": 12, "temperature": 0}

    whole = json.loads(_post(stack, body))
    events = _post(stack, {**body, "stream": True}).split("\n\n")

    counted = [whole["usage"][f"{what}_tokens"] for what in ("prompt", "completion", "total")]
    assert counted == [7, 12, 19]
    assert events[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]


def test_a_chat_is_the_completion_of_its_rendered_conversation(stack: LiveStack) -> None:
    messages = [{"role": "user", "content": "Say it."}]
    tokens = json.loads(_post(stack, {"messages": messages}, "/tokenize"))["tokens"]
    asked = {"max_tokens": 12, "temperature": 0, "logprobs": True}

    chat = json.loads(_post(stack, {**asked, "messages": messages}, "/v1/chat/completions"))
    plain = json.loads(_post(stack, {**asked, "prompt": tokens, "logprobs": 0}))

    (said,), (text,) = chat["choices"], plain["choices"]
    assert said["message"]["content"] == text["text"]
    assert (said["finish_reason"], chat["usage"]) == (text["finish_reason"], plain["usage"])
    told = [row["logprob"] for row in said["logprobs"]["content"]]
    assert told == pytest.approx(text["logprobs"]["token_logprobs"], abs=1e-3)


def _post(stack: LiveStack, body: dict[str, Any], path: str = "/v1/completions") -> str:
    request = urllib.request.Request(
        f"http://{stack.address('http')}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = response.read().decode()
    return text
