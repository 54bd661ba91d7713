"""VllmEngine: vLLM's public gRPC engine service on the router's front door.

Token ids in, token ids out. A gateway that speaks this protocol, such as smg, sees one
engine: the split, its pools and its ranks stay behind the router.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import NoReturn, Protocol

import grpc.aio
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from services.router import tracing
from services.router.front_door import FrontDoor
from services.router.order import Order, check_choices
from services.router.parts import Parts
from services.router.vllm_engine.answers import Answers
from services.router.vllm_engine.calls import Call, Calls
from services.router.vllm_engine.model import EngineModel, TokenizerBundle
from services.router.vllm_engine.sampling import (
    prompt_logprobs_of,
    prompt_of,
    read_sampling,
    refuse_unserved,
    text_options,
)
from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import Role
from splitwave.wire.errors import Aborts, abort
from splitwave.wire.stream import Writes, emitter

SERVICE_NAMES = ("vllm.grpc.engine.VllmEngine",)
_PATH = f"/{SERVICE_NAMES[0]}"
VERSION = f"splitwave {version('splitwave')}"
SERVER_TYPE = "vllm-grpc"
"""What callers of this service know a vLLM engine by."""


class Context(Aborts, Writes[pb.GenerateResponse], Protocol):
    """What is used of a call's context."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if it set none."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """The caller's headers."""


class VllmEngineServicer:
    """The engine service on a front door."""

    def __init__(self, door: FrontDoor, model: EngineModel) -> None:
        self._door = door
        self._model = model
        self._tokenizer = TokenizerBundle(model.directory)
        self._calls = Calls()
        self._began_s = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        headers = _trace_headers(context)
        try:
            with (
                self._door.traced(tracing.VLLM_ENGINE, headers, request.request_id) as trace,
                self._door.refusals.watch(f"{_PATH}/Generate"),
                self._calls.abortable(request.request_id) as call,
            ):
                order = await self._order(request, context, headers)
                serve = self._stream if request.stream else self._whole
                await serve(order, call, context)
                if call.aborted:
                    trace.ended(Reason.CANCELLED.value, "aborted by the caller")
        except ServingError as error:
            await abort(context, error)

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortResponse:
        for request_id in request.request_ids:
            self._calls.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: object
    ) -> pb.HealthCheckResponse:
        if self._door.admission.closed:
            return pb.HealthCheckResponse(healthy=False, message="the router is stopping")
        if not self._door.ready():
            return pb.HealthCheckResponse(healthy=False, message="a pool has no usable worker")
        return pb.HealthCheckResponse(healthy=True, message="ready")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Aborts
    ) -> pb.GetModelInfoResponse:
        limits = self._door.fleet.limits()
        if limits is None:
            self._door.refusals.count(f"{_PATH}/GetModelInfo", Reason.POOL_UNAVAILABLE)
            await abort(context, self._door.fleet.absence(Role.DECODE, retry_after_s=1.0))
        model, tokenizer = self._model, self._door.tokenizer
        return pb.GetModelInfoResponse(
            model_path=str(model.directory),
            tokenizer_path=str(model.directory),
            served_model_name=self._door.settings.model,
            is_generation=True,
            max_context_length=limits.model_len_max_tokens,
            max_req_input_len=limits.model_len_max_tokens - 1,
            vocab_size=tokenizer.vocab_size,
            model_type=model.model_type,
            architectures=model.architectures,
            eos_token_ids=self._door.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: object
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._door.admission.live,
            is_paused=self._door.admission.closed,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,  # One engine: ranks are chosen behind the router.
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: object) -> pb.GetLoadsResponse:
        live, live_max = self._door.admission.live, self._door.settings.live_max
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[
                pb.SchedulerLoad(
                    num_running_reqs=live,
                    num_total_reqs=live,
                    max_running_requests=live_max,
                    utilization=live / live_max,
                )
            ],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: object
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        for data, digest in await self._tokenizer.chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def Embed(self, request: pb.EmbedRequest, context: Aborts) -> NoReturn:
        await self._unserved(context, "Embed: this model generates text, it embeds none")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: Aborts) -> NoReturn:
        await self._unserved(context, "FlushCache: caches are the workers' own")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Aborts
    ) -> NoReturn:
        await self._unserved(context, "StartProfile: profile the workers themselves")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Aborts
    ) -> NoReturn:
        await self._unserved(context, "StopProfile: profile the workers themselves")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Aborts
    ) -> NoReturn:
        await self._unserved(context, "SubscribeKvEvents: KV blocks are the workers' own")

    async def _unserved(self, context: Aborts, message: str) -> NoReturn:
        method = message.partition(":")[0]
        self._door.refusals.count(f"{_PATH}/{method}", Reason.UNSUPPORTED_FEATURE)
        await abort(context, ServingError(Reason.UNSUPPORTED_FEATURE, message))

    async def _order(
        self, request: pb.GenerateRequest, context: Context, headers: Mapping[str, str]
    ) -> Order:
        refuse_unserved(request)
        door, params = self._door, request.sampling_params
        token_ids = await door.prompt_ids(prompt_of(request))
        limits = door.sampling_limits(token_ids)
        prompt_logprobs = prompt_logprobs_of(params, len(token_ids))
        sampling = read_sampling(params, door.eos_token_ids, limits)
        return Order(
            request_id=door.request_id(request.request_id),
            token_ids=token_ids,
            sampling=sampling,
            text=text_options(params, door.ending_ids(sampling)),
            choices=check_choices(params.n or 1),
            prompt_logprobs=prompt_logprobs,
            timeout_s=context.time_remaining(),
            trace_headers=headers,
        )

    async def _stream(self, order: Order, call: Call, context: Context) -> None:
        """Send tokens as they come; those that come while some are sent travel together."""
        emit, parts, answers = emitter(context), Parts(), Answers(order)
        async with parts.filled_by(self._door.complete([order], parts)) as answer:
            call.runs(answer)
            while await parts.came():
                for choice, news in parts.take().items():
                    for message in answers.stream(choice, news):
                        await emit(message)
            if call.aborted and answer.cancelled():
                for message in answers.rest({}):
                    await emit(message)
            else:
                answer.result()

    async def _whole(self, order: Order, call: Call, context: Context) -> None:
        """Send one message a choice, at the end."""
        emit, parts, answers = emitter(context), Parts(), Answers(order)
        async with parts.filled_by(self._door.complete([order], parts)) as answer:
            call.runs(answer)
            await asyncio.wait((answer,))
            taken = parts.take()
            if call.aborted and answer.cancelled():
                for message in answers.rest(taken):
                    await emit(message)
            else:
                answer.result()
                for choice, news in sorted(taken.items()):
                    await emit(answers.whole(choice, news))


def add_to(server: grpc.aio.Server, door: FrontDoor, model: EngineModel) -> None:
    """Add the service."""
    door.refusals.routes[f"{_PATH}/Generate"] = None
    pb_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(door, model), server)


def _trace_headers(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    wanted = ("traceparent", "tracestate")
    return {key: value for key, value in metadata if key in wanted and isinstance(value, str)}
