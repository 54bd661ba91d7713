"""GenerateService: the public gRPC API."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import grpc.aio

from services.router import tracing
from services.router.front_door import FrontDoor
from services.router.order import Ending, Order, check_choices
from services.router.parts import News, Parts
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.sampling_limits import check_prompt_logprobs
from splitwave.text import ChatOptions, TextOptions
from splitwave.v1alpha1 import generate_service_pb2 as pb
from splitwave.v1alpha1 import generate_service_pb2_grpc as pb_grpc
from splitwave.v1alpha1 import generation_pb2
from splitwave.wire.chat import chat_from_proto
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.generation import (
    finish_reason_to_proto,
    logprobs_to_proto,
    sampling_from_client,
)
from splitwave.wire.stream import Writes, emitter
from splitwave.wire.time import duration_to_proto
from splitwave.wire.unknown import refuse_unknown

SERVICE_NAMES = ("splitwave.v1alpha1.GenerateService",)
_PATH = f"/{SERVICE_NAMES[0]}"


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
            with (
                self._door.traced(tracing.GRPC, headers, request.request_id),
                self._door.refusals.watch(f"{_PATH}/Generate"),
            ):
                refuse_unknown(request)
                self._door.check_model(request.model)
                text, token_ids = await self._token_ids(request)
                order = await self._order(request, token_ids, context)
                wanted = request.echo or order.prompt_logprobs is not None
                echoed = await self._echoed(request, text, token_ids)
                prompts = Prompts(order, echoed, wanted=wanted, alone=_scores_only(request))
                await self._serve(order, prompts, context)
        except ServingError as error:
            await abort(context, error)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Aborts
    ) -> pb.ListModelsResponse:
        try:
            with self._door.refusals.watch(f"{_PATH}/ListModels"):
                refuse_unknown(request)
        except ServingError as error:
            await abort(context, error)
        return pb.ListModelsResponse(
            models=[
                pb.Model(name=name, context_max_tokens=tokens)
                for name, tokens in self._door.models().items()
            ]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Aborts) -> pb.TokenizeResponse:
        try:
            with self._door.refusals.watch(f"{_PATH}/Tokenize"):
                refuse_unknown(request)
                self._door.check_model(request.model)
                prompt = await self._prompt(request)
                token_ids = await self._door.encode(prompt, special=self._special(request))
        except ServingError as error:
            await abort(context, error)
        longest = max(self._door.models().values(), default=0)
        return pb.TokenizeResponse(token_ids=token_ids, context_max_tokens=longest)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Aborts
    ) -> pb.DetokenizeResponse:
        try:
            with self._door.refusals.watch(f"{_PATH}/Detokenize"):
                refuse_unknown(request)
                self._door.check_model(request.model)
                text = await self._door.decode(list(request.token_ids))
                return pb.DetokenizeResponse(text=text)
        except ServingError as error:
            await abort(context, error)

    async def _prompt(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> str:
        """The text to tokenize; of a conversation what its template makes of it."""
        if request.WhichOneof("prompt") == "text":
            return request.text
        if request.WhichOneof("prompt") != "chat":
            raise ServingError(
                Reason.INVALID_REQUEST, "prompt: absent; set one of the fields that give it"
            )
        chat = chat_from_proto(request.chat)
        adds = chat.add_generation_prompt
        options = ChatOptions(
            add_generation_prompt=not chat.continue_final_message if adds is None else adds,
            continue_final_message=chat.continue_final_message,
            template_arguments=chat.template_arguments,
        )
        return await self._door.chat_prompt(chat.messages, options)

    def _special(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
        """Whether the tokenizer adds its special tokens: templates write their own."""
        if request.HasField("add_special_tokens"):
            return request.add_special_tokens
        return request.WhichOneof("prompt") == "text"

    async def _token_ids(self, request: pb.GenerateRequest) -> tuple[str, Sequence[int]]:
        """A prompt's text, empty if it came as token ids, and its token ids."""
        if request.WhichOneof("prompt") == "token_ids":
            return "", await self._door.prompt_ids(list(request.token_ids.ids))
        text = await self._prompt(request)
        special = self._special(request)
        return text, await self._door.prompt_ids(text, add_special_tokens=special)

    async def _echoed(
        self, request: pb.GenerateRequest, text: str, token_ids: Sequence[int]
    ) -> str:
        """The prompt's text under echo, else none."""
        if text or not request.echo:
            return text if request.echo else ""
        skip = not request.keep_special_tokens
        return await self._door.tokenizer.decode_async(token_ids, skip_special_tokens=skip)

    async def _order(
        self, request: pb.GenerateRequest, token_ids: Sequence[int], context: Context
    ) -> Order:
        door = self._door
        wanted = request.prompt_logprobs if request.HasField("prompt_logprobs") else None
        check_prompt_logprobs(wanted, len(token_ids))
        sampling = sampling_from_client(
            _params(request), door.sampling_limits(token_ids), door.eos_token_ids
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
            choices=check_choices(request.n if request.HasField("n") else 1),
            prompt_logprobs=wanted,
            priority=request.priority,
            timeout_s=context.time_remaining(),
        )

    async def _serve(self, order: Order, prompts: "Prompts", context: Context) -> None:
        """Send parts as they come; those that come while one is sent travel together."""
        emit, parts = emitter(context), Parts()
        request_id = order.request_id  # In the first message only.
        async with parts.filled_by(self._door.complete([order], parts)) as answer:
            while await parts.came():
                for choice, came in parts.take().items():
                    news = prompts.shown(came)
                    message = _message(choice, news, request_id)
                    prompts.add(choice, news, message)
                    await emit(message)
                    request_id = ""
            answer.result()


class Prompts:
    """Puts the prompt into the first message of each choice, if it was asked for."""

    def __init__(self, order: Order, text: str, *, wanted: bool, alone: bool) -> None:
        """`alone`: nothing that is generated is shown."""
        self._text, self._token_ids = text, order.token_ids
        self._wanted, self._alone = wanted, alone
        self._shown: set[int] = set()

    def shown(self, news: News) -> News:
        """What the client sees of some news."""
        if not self._alone:
            return news
        ending = news.ending and replace(news.ending, text="", completion_tokens=0)
        return News(news.prompt, [], ending)

    def add(self, choice: int, news: News, message: pb.GenerateResponse) -> None:
        """Add it to a message unless the choice has had it."""
        if not self._wanted or choice in self._shown:
            return
        self._shown.add(choice)
        message.prompt.text = self._text
        message.prompt.token_ids.extend(self._token_ids)
        logprobs = logprobs_to_proto(news.prompt)
        if logprobs is not None:
            message.prompt.logprobs.CopyFrom(logprobs)


def add_to(server: grpc.aio.Server, door: FrontDoor) -> None:
    """Add the service."""
    door.refusals.routes[f"{_PATH}/Generate"] = None
    pb_grpc.add_GenerateServiceServicer_to_server(GenerateServicer(door), server)


def _scores_only(request: pb.GenerateRequest) -> bool:
    """Whether the prompt alone is wanted. One token is made then, since engines make no fewer."""
    sampling = request.sampling
    return request.echo and sampling.HasField("max_tokens") and not sampling.max_tokens


def _params(request: pb.GenerateRequest) -> generation_pb2.SamplingParams:
    """What the client wrote of sampling, as it can be computed."""
    if not _scores_only(request):
        return request.sampling
    params = generation_pb2.SamplingParams()
    params.CopyFrom(request.sampling)
    params.max_tokens = 1
    return params


def _message(choice: int, news: News, request_id: str) -> pb.GenerateResponse:
    rows: list[TokenLogprob] = [row for part in news.parts for row in part.logprobs]
    message = pb.GenerateResponse(
        choice=choice,
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
