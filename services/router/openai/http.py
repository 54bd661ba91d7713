"""OpenAI's HTTP API: /v1/completions, /v1/models and /health.

A failure before the first byte is its HTTP status and OpenAI's error body; a failure
after it is an event of its own. Never a 200 for a failure, never an empty 200.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from services.router.front_door import Ending, FrontDoor, Order
from services.router.openai.chunks import DONE, Chunks
from services.router.openai.events import EventStream
from services.router.openai.schema import CompletionBody, read_completion
from services.router.sink import Part
from splitwave.core.errors import Reason, ServingError
from splitwave.core.sampling_limits import SamplingLimits
from splitwave.wire.errors import HTTP_STATUS, openai_error_body, retry_after_header

BODY_BYTES_MAX = 16 * 1024 * 1024

_encode = msgspec.json.encode


class OpenAI:
    """The routes on a front door."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    def app(self) -> web.Application:
        """The application with its routes."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_openai_errors])
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = read_completion(await request.read())
        order = await self._order(body, request)
        chunks = Chunks(
            f"cmpl-{order.request_id}",
            int(time.time()),
            self._door.settings.model,
            self._door.tokenizer,
        )
        if body.streams:
            return await self._stream(request, order, chunks, body.wants_usage)
        parts: list[Part] = []
        ending = await self._door.complete(order, parts.append)
        return _json(chunks.whole(parts, ending), 200)

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models."""
        models = [
            {"id": name, "object": "model", "owned_by": "splitwave", "max_model_len": tokens}
            for name, tokens in self._door.models().items()
        ]
        return _json(_encode({"object": "list", "data": models}), 200)

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 if a request could be served."""
        ready = self._door.fleet.ready() and not self._door.admission.closed
        return web.Response(status=200 if ready else 503)

    async def _order(self, body: CompletionBody, request: web.Request) -> Order:
        door = self._door
        door.check_model(body.model)
        token_ids = await door.prompt_ids(body.one_prompt())
        limits = SamplingLimits(
            tokens_max=door.tokens_left(token_ids), vocab_size=door.tokenizer.vocab_size
        )
        sampling = body.sampling(door.eos_token_ids, limits)
        return Order(
            request_id=door.request_id(request.headers.get("X-Request-Id", "")),
            token_ids=token_ids,
            sampling=sampling,
            text=body.text_options(sampling, door.ending_ids(sampling)),
            priority=body.priority or 0,
            trace_headers={
                name: request.headers[name]
                for name in ("traceparent", "tracestate")
                if name in request.headers
            },
        )

    async def _stream(
        self, request: web.Request, order: Order, chunks: Chunks, wants_usage: bool
    ) -> web.StreamResponse:
        events = EventStream(give_up=lambda: generation.cancel())

        def show(part: Part) -> None:
            if part.text or part.logprobs:  # A token without text of its own needs no event.
                events.write(chunks.part(part))

        generation = asyncio.get_running_loop().create_task(self._door.complete(order, show))
        try:
            await events.first(generation)
            if generation.done():
                generation.result()  # A failure before the first byte has its own status.
            await events.open(request)
            await _finish(events, generation, chunks, wants_usage)
            return await events.close()
        finally:
            generation.cancel()
            await asyncio.gather(generation, return_exceptions=True)


async def _finish(
    events: EventStream, generation: asyncio.Task[Ending], chunks: Chunks, wants_usage: bool
) -> None:
    """Wait for the end of a stream and say how it came about."""
    try:
        ending = await generation
    except ServingError as error:
        events.write(_encode(openai_error_body(error)))
    else:
        events.write(chunks.last(ending))
        if wants_usage:
            events.write(chunks.usage(ending))
    events.write(DONE)


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in OpenAI's words."""
    try:
        return await handler(request)
    except ServingError as error:
        return _failure(error, HTTP_STATUS[error.reason])
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        return _failure(ServingError(Reason.INVALID_REQUEST, message), error.status)


def _failure(error: ServingError, status: int) -> web.Response:
    response = _json(_encode(openai_error_body(error)), status)
    response.headers.update(retry_after_header(error))
    return response


def _json(body: bytes, status: int) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@contextlib.asynccontextmanager
async def http_port(door: FrontDoor, listen: str) -> AsyncIterator[str]:
    """Serve on `listen` (host:port, port 0 takes a free one); yields the address.

    Raises OSError if the port is taken.
    """
    # A client that goes away cancels its handler, and so the computing.
    runner = web.AppRunner(OpenAI(door).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host, int(port)).start()
        yield f"{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
