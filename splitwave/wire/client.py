"""A client of GenerateService in plain words: for the command line, benchmarks and tests."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.worker import WorkerDescription
from splitwave.v1alpha1 import generate_service_pb2 as pb
from splitwave.v1alpha1 import worker_service_pb2 as worker_pb
from splitwave.wire.chat import Conversation, chat_to_proto
from splitwave.wire.errors import from_rpc_error
from splitwave.wire.generation import (
    finish_reason_from_proto,
    logprobs_from_proto,
    sampling_to_proto,
)
from splitwave.wire.stubs import generate_stub, worker_stub
from splitwave.wire.time import duration_from_proto
from splitwave.wire.worker import description_from_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion to ask for."""

    prompt: str | Sequence[int] | Conversation
    """Text, token ids, or a conversation."""
    sampling: Sampling
    model: str = ""
    request_id: str = ""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    keep_special_tokens: bool = False
    priority: int = 0
    choices: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A part of a completion; the last one has `finish_reason`, counts and times."""

    text: str
    token_ids: tuple[int, ...]
    offset: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    choice: int = 0
    prompt: tuple[int, ...] = ()
    """The prompt's tokens, in a choice's first part if they were asked for."""
    prompt_text: str = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    handoff_bytes: int = 0
    attempts: int = 0
    times_s: dict[str, float] = field(default_factory=dict)
    """By the names of Timings' fields."""


async def generate(
    channel: grpc.aio.Channel, ask: Ask, timeout_s: float | None = None
) -> AsyncGenerator[Answer, None]:
    """Stream one completion. Raises ServingError as the router said it."""
    call = generate_stub(channel).Generate(_request(ask), timeout=timeout_s)
    try:
        async for message in call:
            yield _answer(message)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()  # Nothing to do once it has ended.


async def list_models(channel: grpc.aio.Channel, timeout_s: float) -> dict[str, int]:
    """Served models with their context lengths in tokens."""
    try:
        models = await generate_stub(channel).ListModels(pb.ListModelsRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return {model.name: model.context_max_tokens for model in models.models}


async def tokenize(
    channel: grpc.aio.Channel, prompt: str | Conversation, timeout_s: float
) -> list[int]:
    """Token ids of a text or of a conversation."""
    request = pb.TokenizeRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.chat.CopyFrom(chat_to_proto(prompt))
    try:
        answer = await generate_stub(channel).Tokenize(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return list(answer.token_ids)


async def detokenize(channel: grpc.aio.Channel, token_ids: Sequence[int], timeout_s: float) -> str:
    """Text of token ids."""
    request = pb.DetokenizeRequest(token_ids=token_ids)
    try:
        answer = await generate_stub(channel).Detokenize(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer.text


async def describe_worker(
    channel: grpc.aio.Channel, timeout_s: float, *, counters: bool = False
) -> WorkerDescription:
    """What a worker is and has counted; `counters` asks its engines as well."""
    request = worker_pb.DescribeWorkerRequest(counters=counters)
    try:
        message = await worker_stub(channel).DescribeWorker(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return description_from_proto(message)


async def drain_worker(channel: grpc.aio.Channel, why: str, timeout_s: float) -> int:
    """Stop a worker's intake; return the attempts and handoffs that it still has to finish."""
    request = worker_pb.DrainWorkerRequest(why=why)
    try:
        answer = await worker_stub(channel).DrainWorker(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer.outstanding


def _request(ask: Ask) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=ask.request_id,
        model=ask.model,
        sampling=sampling_to_proto(ask.sampling),
        stop=ask.stop,
        include_stop_str_in_output=ask.include_stop,
        keep_special_tokens=ask.keep_special_tokens,
        priority=ask.priority,
        n=ask.choices,
        echo=ask.echo,
        prompt_logprobs=ask.prompt_logprobs,
        add_special_tokens=ask.add_special_tokens,
    )
    if isinstance(ask.prompt, str):
        request.text = ask.prompt
    elif isinstance(ask.prompt, Conversation):
        request.chat.CopyFrom(chat_to_proto(ask.prompt))
    else:
        request.token_ids.ids.extend(ask.prompt)
    return request


def _answer(message: pb.GenerateResponse) -> Answer:
    stopped_by: str | int | None = None
    if message.WhichOneof("stopped_by") == "stop_string":
        stopped_by = message.stop_string
    elif message.WhichOneof("stopped_by") == "stop_token_id":
        stopped_by = message.stop_token_id
    timings = message.timings
    return Answer(
        text=message.text,
        token_ids=tuple(message.token_ids),
        offset=message.offset,
        logprobs=(
            logprobs_from_proto(message.logprobs, message.token_ids)
            if message.HasField("logprobs")
            else []
        ),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        stopped_by=stopped_by,
        prompt_tokens=message.usage.prompt_tokens,
        cached_tokens=message.usage.cached_tokens,
        completion_tokens=message.usage.completion_tokens,
        choice=message.choice,
        prompt=tuple(message.prompt.token_ids),
        prompt_text=message.prompt.text,
        prompt_logprobs=(
            logprobs_from_proto(message.prompt.logprobs, message.prompt.token_ids[1:])
            if message.prompt.HasField("logprobs")
            else []
        ),
        handoff_bytes=timings.handoff_bytes,
        attempts=timings.attempts,
        times_s={
            "grant_wait": duration_from_proto(timings.grant_wait),
            "prefill": duration_from_proto(timings.prefill),
            "handoff": duration_from_proto(timings.handoff),
            "time_to_first_token": duration_from_proto(timings.time_to_first_token),
            "total": duration_from_proto(timings.total),
        },
    )
