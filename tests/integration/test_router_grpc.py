"""GenerateService over real gRPC, on simulated engines."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from google.protobuf.message import Message
from grpc.aio import AioRpcError

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling
from splitwave.engine.sim import SimModel
from splitwave.engine.sim.tokens import prompt_logprobs
from splitwave.v1alpha1 import generate_service_pb2 as pb
from splitwave.v1alpha1 import generate_service_pb2_grpc as pb_grpc
from splitwave.wire.chat import Conversation
from splitwave.wire.client import Answer, Ask, detokenize, generate, list_models, tokenize
from splitwave.wire.errors import from_rpc_error
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually

GREEDY = Sampling(max_tokens=30, temperature=0.0)
PROMPT = "The capital of France is"


def right(prompt: str, sampling: Sampling) -> str:
    """The text of an aggregated engine: a byte is its own token."""
    return bytes(SimModel().complete(list(prompt.encode()), sampling).token_ids).decode()


async def answers(stack: RouterStack, ask: Ask) -> list[Answer]:
    return [answer async for answer in generate(stack.channel, ask, timeout_s=20.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started
        await started.empty()


async def test_text_offsets_and_counts_are_those_of_an_aggregated_engine(
    stack: RouterStack,
) -> None:
    got = await answers(stack, Ask(prompt=PROMPT, sampling=GREEDY, request_id="mine"))

    assert "".join(answer.text for answer in got) == right(PROMPT, GREEDY)
    offsets = [answer.offset + i for answer in got for i in range(len(answer.token_ids))]
    assert offsets == list(range(30))
    last = got[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.prompt_tokens, last.completion_tokens, last.attempts) == (24, 30, 1)
    assert last.handoff_bytes == 2 * DECODE.block_bytes
    assert last.times_s["total"] >= last.times_s["time_to_first_token"] > 0
    assert [answer.finish_reason for answer in got[:-1]] == [None] * (len(got) - 1)


async def test_token_ids_are_taken_as_they_are(stack: RouterStack) -> None:
    got = await answers(stack, Ask(prompt=list(PROMPT.encode()), sampling=GREEDY))

    assert "".join(answer.text for answer in got) == right(PROMPT, GREEDY)


async def test_many_requests_at_once_get_their_own_answers(stack: RouterStack) -> None:
    prompts = [f"{i} {PROMPT}" for i in range(40)]

    got = await asyncio.gather(
        *(answers(stack, Ask(prompt=prompt, sampling=GREEDY)) for prompt in prompts)
    )

    texts = ["".join(answer.text for answer in each) for each in got]
    assert texts == [right(prompt, GREEDY) for prompt in prompts]


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.2},
        {"seed": 7, "temperature": 1.0},
        {"min_tokens": 3},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"logit_bias": {65: 3.5}},
        {"stop_token_ids": tuple(range(97, 110))},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_every_feature_gives_the_tokens_of_an_aggregated_engine(
    stack: RouterStack, change: dict[str, object]
) -> None:
    sampling = replace(GREEDY, **change)  # type: ignore[arg-type]  # named fields

    got = await answers(stack, Ask(prompt=PROMPT, sampling=sampling))

    token_ids = [token_id for answer in got for token_id in answer.token_ids]
    complete = SimModel().complete(list(PROMPT.encode()), replace(sampling, eos_token_ids=(259,)))
    assert token_ids == complete.token_ids
    assert got[-1].finish_reason is complete.finish
    assert got[-1].stopped_by == complete.stop_token_id


async def test_log_probabilities_come_with_each_token(stack: RouterStack) -> None:
    sampling = replace(GREEDY, logprobs=2)

    got = await answers(stack, Ask(prompt=PROMPT, sampling=sampling))

    rows = [row for answer in got for row in answer.logprobs]
    wanted = SimModel().complete(list(PROMPT.encode()), sampling).logprobs
    assert [(row.token_id, row.rank) for row in rows] == [(x.token_id, x.rank) for x in wanted]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_an_echo_with_no_tokens_scores_the_prompt_alone_as_over_http(
    stack: RouterStack, logprobs: int | None
) -> None:
    sampling = replace(GREEDY, max_tokens=0)
    ask = Ask(prompt=PROMPT, sampling=sampling, echo=True, prompt_logprobs=logprobs)

    got = await answers(stack, ask)

    ids = list(PROMPT.encode())
    rows = [] if logprobs is None else prompt_logprobs(ids, logprobs)
    assert (got[0].prompt_text, got[0].prompt) == (PROMPT, tuple(ids))
    assert [row.logprob for row in got[0].prompt_logprobs] == [
        pytest.approx(row.logprob) for row in rows
    ]
    assert not any(answer.text or answer.token_ids or answer.logprobs for answer in got)
    assert (got[-1].completion_tokens, got[-1].finish_reason) == (0, FinishReason.LENGTH)


@pytest.mark.parametrize("changes", [{}, {"prompt_logprobs": 0}], ids=["bare", "scored"])
async def test_no_tokens_without_an_echo_are_refused(
    stack: RouterStack, changes: dict[str, int]
) -> None:
    ask = Ask(prompt=PROMPT, sampling=replace(GREEDY, max_tokens=0), **changes)  # type: ignore[arg-type]  # named fields

    with pytest.raises(ServingError, match="max_tokens: 0 is below 1"):
        await answers(stack, ask)


UNKNOWN = b"\xb8\x3e\x01"
"""Field 999, which no message has."""


def with_unknown(place: str) -> pb.GenerateRequest:
    """A request that holds an unknown field somewhere."""
    request = pb.GenerateRequest()
    match place:
        case "SamplingParams":
            request.sampling.MergeFromString(UNKNOWN)
        case "ChatMessage":
            request.chat.messages.add(role="user", content="Hi").MergeFromString(UNKNOWN)
        case "TokenIds":
            request.token_ids.MergeFromString(b"\x0a\x02\x41\x42" + UNKNOWN)
        case _:
            request.MergeFromString(UNKNOWN)
    return request


@pytest.mark.parametrize("place", ["GenerateRequest", "SamplingParams", "ChatMessage", "TokenIds"])
async def test_a_field_that_is_unknown_here_is_refused_by_number(
    stack: RouterStack, place: str
) -> None:
    calls = pb_grpc.GenerateServiceStub(stack.channel)

    with pytest.raises(AioRpcError, match=f"{place}: has a field 999") as failed:
        _ = [part async for part in calls.Generate(with_unknown(place))]

    assert from_rpc_error(failed.value).reason is Reason.UNSUPPORTED_FEATURE


@pytest.mark.parametrize(
    ("name", "request_type"),
    [
        ("Tokenize", pb.TokenizeRequest),
        ("Detokenize", pb.DetokenizeRequest),
        ("ListModels", pb.ListModelsRequest),
    ],
)
async def test_every_call_refuses_fields_that_are_unknown_here(
    stack: RouterStack, name: str, request_type: type[Message]
) -> None:
    with pytest.raises(AioRpcError, match=f"{name}Request: has a field 999"):
        await getattr(pb_grpc.GenerateServiceStub(stack.channel), name)(
            request_type.FromString(UNKNOWN)
        )


async def test_a_stop_string_ends_the_text_before_it_and_the_decoding(stack: RouterStack) -> None:
    text = right(PROMPT, GREEDY)
    stop = text[10:13]

    sampling = replace(GREEDY, max_tokens=2000)
    got = await answers(stack, Ask(prompt=PROMPT, sampling=sampling, stop=(stop,)))

    assert "".join(answer.text for answer in got) == text[: text.index(stop)]
    assert (got[-1].finish_reason, got[-1].stopped_by) == (FinishReason.STOP, stop)
    assert got[-1].completion_tokens == text.index(stop) + len(stop)
    assert got[-1].handoff_bytes == 2 * DECODE.block_bytes
    assert got[-1].times_s["handoff"] > 0


async def test_a_client_that_leaves_stops_the_computing(stack: RouterStack) -> None:
    sampling = replace(GREEDY, max_tokens=3000)
    async for answer in generate(stack.channel, Ask(prompt=PROMPT, sampling=sampling)):
        if answer.offset > 5:
            break

    await eventually(lambda: stack.door.outcomes["cancelled"] == 1)


async def test_a_deadline_is_kept(stack: RouterStack) -> None:
    sampling = replace(GREEDY, max_tokens=4000)
    call = generate(stack.channel, Ask(prompt=PROMPT, sampling=sampling), timeout_s=0.3)

    with pytest.raises(ServingError) as failed:
        async for _ in call:
            pass

    assert failed.value.reason is Reason.DEADLINE_EXCEEDED


async def test_choices_have_seeds_of_their_own_and_an_end_each(stack: RouterStack) -> None:
    sampling = Sampling(max_tokens=20, seed=2**63 - 1)

    got = await answers(stack, Ask(prompt=PROMPT, sampling=sampling, choices=3))

    seeds = (2**63 - 1, -(2**63), -(2**63) + 1)  # They go round in 64 bits.
    for choice, seed in enumerate(seeds):
        mine = [answer for answer in got if answer.choice == choice]
        assert "".join(x.text for x in mine) == right(PROMPT, replace(sampling, seed=seed))
        assert [x.finish_reason for x in mine if x.finish_reason] == [FinishReason.LENGTH]
        assert mine[-1].completion_tokens == 20
    order = [answer.choice for answer in got]
    assert order != sorted(order), "the choices come interleaved"


async def test_the_prompt_comes_first_with_its_log_probabilities(stack: RouterStack) -> None:
    got = await answers(
        stack, Ask(prompt=PROMPT, sampling=GREEDY, echo=True, prompt_logprobs=2, choices=2)
    )

    token_ids = list(PROMPT.encode())
    for choice in (0, 1):
        first, *rest = [answer for answer in got if answer.choice == choice]
        assert (first.prompt_text, list(first.prompt)) == (PROMPT, token_ids)
        assert first.prompt_logprobs == pytest.approx(prompt_logprobs(token_ids, 2))
        assert all(not answer.prompt for answer in rest)


@pytest.mark.parametrize("prompt", ["x", [120]])
async def test_a_prompt_of_one_token_has_no_log_probabilities(
    stack: RouterStack, prompt: str | list[int]
) -> None:
    first, *_ = await answers(
        stack, Ask(prompt=prompt, sampling=GREEDY, prompt_logprobs=1, echo=True)
    )

    assert (first.prompt, first.prompt_text, first.prompt_logprobs) == ((120,), "x", [])


CHAT = Conversation(messages=[{"role": "user", "content": "Hi"}])
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_conversation_is_rendered_as_over_http(stack: RouterStack, model: Model) -> None:
    got = await answers(stack, Ask(prompt=CHAT, sampling=GREEDY, echo=True))

    assert got[0].prompt_text == RENDERED
    assert list(got[0].prompt) == model.tokenizer.encode(RENDERED)
    assert await tokenize(stack.channel, CHAT, 5.0) == list(got[0].prompt)
    async with stack.http.post(
        "/v1/chat/completions",
        json={"messages": CHAT.messages, "max_tokens": 30, "temperature": 0},
    ) as response:
        answer = await response.json()
    assert "".join(x.text for x in got) == answer["choices"][0]["message"]["content"]


async def test_text_goes_to_token_ids_and_back(stack: RouterStack) -> None:
    token_ids = await tokenize(stack.channel, "Hé", 5.0)

    assert token_ids == list("Hé".encode())
    assert await detokenize(stack.channel, [258, *token_ids], 5.0) == "<|im_start|>Hé"
    with pytest.raises(ServingError, match="tokens: token id 260"):
        await detokenize(stack.channel, [260], 5.0)


async def test_models_are_named_with_their_context(stack: RouterStack) -> None:
    assert await list_models(stack.channel, 2.0) == {MODEL: DECODE.model_len_max_tokens}


async def test_two_clients_may_choose_the_same_request_id(stack: RouterStack) -> None:
    asks = [Ask(prompt=f"{i} {PROMPT}", sampling=GREEDY, request_id="same") for i in range(4)]

    got = await asyncio.gather(*(answers(stack, ask) for ask in asks))

    texts = ["".join(answer.text for answer in each) for each in got]
    assert texts == [right(f"{i} {PROMPT}", GREEDY) for i in range(4)]


async def test_a_full_router_sheds_with_a_time_to_wait(model: Model) -> None:
    async with router_stack(model, live_max=1) as stack:
        sampling = replace(GREEDY, max_tokens=3000)
        first = generate(stack.channel, Ask(prompt=PROMPT, sampling=sampling))
        await anext(first)

        with pytest.raises(ServingError) as refused:
            await answers(stack, Ask(prompt=PROMPT, sampling=GREEDY))

        await first.aclose()
        assert refused.value.reason is Reason.OVERLOADED
        assert refused.value.retry_after_s is not None
        await stack.empty()


async def test_a_drain_finishes_what_was_admitted_and_lets_nobody_in(model: Model) -> None:
    async with router_stack(model) as stack:
        sampling = replace(GREEDY, max_tokens=300)
        running = asyncio.create_task(answers(stack, Ask(prompt=PROMPT, sampling=sampling)))
        await eventually(lambda: stack.decode_seats() == 1)

        stack.stop.set()
        await eventually(lambda: stack.door.admission.closed)
        with pytest.raises(ServingError) as refused:
            await answers(stack, Ask(prompt=PROMPT, sampling=GREEDY))

        assert refused.value.reason is Reason.WORKER_DRAINING
        assert "".join(answer.text for answer in await running) == right(PROMPT, sampling)
        assert await stack.exit_code == 0
