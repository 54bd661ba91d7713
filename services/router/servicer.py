"""GenerateService: the public gRPC API."""

from collections.abc import Sequence
from typing import Protocol

import grpc.aio

from services.router import tracing
from services.router.front_door import FrontDoor
from services.router.order import Ending, Order
from services.router.parts import News, Parts
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.text import TextOptions
from splitwave.v1alpha1 import generate_service_pb2 as pb
from splitwave.v1alpha1 import generate_service_pb2_grpc as pb_grpc
from splitwave.v1alpha1 import generation_pb2
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.generation import (
    finish_reason_to_proto,
    logprobs_to_proto,
    sampling_from_client,
)
from splitwave.wire.stream import Writes, emitter
from splitwave.wire.time import duration_to_proto

SERVICE_NAMES = ("splitwave.v1alpha1.GenerateService",)


class Context(Aborts, Writes[pb.GenerateResponse], Protocol):
    """What is used of a call's context."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if it set none."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """The caller's headers."""


class GenerateServicer(pb_grpc.GenerateServiceServicer):
    """GenerateService on a front door."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def Generate(  # type: ignore[override]  # writes rather than yields
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        headers = _trace_headers(context)
        try:
            with self._door.traced(tracing.GRPC, headers, request.request_id):
                order = await self._order(request, context)
                await self._serve(order, context)
        except ServingError as error:
            await abort(context, error)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: object
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=name, context_max_tokens=tokens)
                for name, tokens in self._door.models().items()
            ]
        )

    async def _order(self, request: pb.GenerateRequest, context: Context) -> Order:
        door = self._door
        door.check_model(request.model)
        match request.WhichOneof("prompt"):
            case "text":
                token_ids = await door.prompt_ids(request.text)
            case "token_ids":
                token_ids = await door.prompt_ids(list(request.token_ids.ids))
            case _:
                raise ServingError(Reason.INVALID_REQUEST, "prompt: absent; set text or token_ids")
        sampling = sampling_from_client(
            request.sampling,
            tokens_left=door.tokens_left(token_ids),
            vocab_size=door.tokenizer.vocab_size,
            eos_token_ids=door.eos_token_ids,
        )
        return Order(
            request_id=door.request_id(request.request_id),
            token_ids=token_ids,
            sampling=sampling,
            text=TextOptions(
                stop=tuple(request.stop),
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=not request.keep_special_tokens,
                min_tokens=sampling.min_tokens,
                stop_token_ids=door.ending_ids(sampling),
            ),
            priority=request.priority,
            timeout_s=context.time_remaining(),
        )

    async def _serve(self, order: Order, context: Context) -> None:
        """Send parts as they come; those that come while one is sent travel together."""
        emit, parts = emitter(context), Parts()
        request_id = order.request_id  # In the first message only.
        async with parts.filled_by(self._door.complete([order], parts)) as answer:
            while await parts.came():
                for choice, news in parts.take().items():
                    await emit(_message(choice, news, request_id))
                    request_id = ""
            answer.result()


def add_to(server: grpc.aio.Server, door: FrontDoor) -> None:
    """Add the service."""
    pb_grpc.add_GenerateServiceServicer_to_server(GenerateServicer(door), server)


def _message(choice: int, news: News, request_id: str) -> pb.GenerateResponse:
    rows: list[TokenLogprob] = [row for part in news.parts for row in part.logprobs]
    message = pb.GenerateResponse(
        text="".join(part.text for part in news.parts),
        token_ids=[token_id for part in news.parts for token_id in part.token_ids],
        logprobs=logprobs_to_proto(rows),
        request_id=request_id,
    )
    if news.parts:
        message.offset = news.parts[0].offset
    if news.ending is not None:
        _end(message, news.ending)
    return message


def _end(message: pb.GenerateResponse, ending: Ending) -> None:
    """Add how a choice ended to its last message."""
    trail = ending.trail
    message.text += ending.text
    if not message.token_ids:
        message.offset = ending.completion_tokens
    message.finish_reason = finish_reason_to_proto(ending.finish_reason)
    message.usage.CopyFrom(
        generation_pb2.Usage(
            prompt_tokens=ending.prompt_tokens,
            cached_tokens=trail.cached_tokens,
            completion_tokens=ending.completion_tokens,
        )
    )
    message.timings.CopyFrom(
        generation_pb2.Timings(
            grant_wait=duration_to_proto(trail.grant_wait_s),
            prefill=duration_to_proto(trail.prefill_s),
            handoff=duration_to_proto(trail.handoff_s),
            time_to_first_token=duration_to_proto(ending.first_token_s),
            total=duration_to_proto(ending.total_s),
            attempts=trail.attempts,
            handoff_bytes=trail.handoff_bytes,
        )
    )
    if ending.stop_string is not None:
        message.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id


def _trace_headers(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    wanted = ("traceparent", "tracestate")
    return {key: value for key, value in metadata if key in wanted and isinstance(value, str)}
