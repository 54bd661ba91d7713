"""OpenAI's HTTP API, with those of vLLM's endpoints that serve text.

A failure before the first byte is its HTTP status and OpenAI's error body; a failure
after it is an event of its own. Never a 200 for a failure, never an empty 200.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from services.router import tracing
from services.router.front_door import FrontDoor
from services.router.openai import openapi
from services.router.openai.answers import DONE, Form, Head, Streamed, Telling, Usage, Whole
from services.router.openai.connections import Connection, HttpLimits
from services.router.openai.events import EventStream, Turn
from services.router.openai.fields import GenerationBody
from services.router.openai.http_faults import BODY_BYTES_MAX, error_body, fault_error
from services.router.openai.names import named, sent_names
from services.router.openai.orders import OrderBook
from services.router.openai.schema import (
    CompletionBody,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from services.router.openai.token_words import TokenWords
from services.router.order import Order
from services.router.refusals import OTHER
from services.router.status_page import add_routes
from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import Role
from splitwave.wire.errors import HTTP_STATUS, openai_error_body, retry_after_header

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_OPERATIONS = {
    "/v1/completions": tracing.COMPLETIONS,
    "/v1/chat/completions": tracing.CHAT_COMPLETIONS,
}


class OpenAI:
    """The routes on a front door."""

    def __init__(self, door: FrontDoor, limits: HttpLimits) -> None:
        self._door, self._limits = door, limits
        self._orders = OrderBook(door)
        self._turn = Turn()
        door.refusals.routes.update(dict.fromkeys(_OPERATIONS))

    def app(self) -> web.Application:
        """The application with its routes."""
        app = web.Application(
            client_max_size=BODY_BYTES_MAX, middlewares=[self._traced, self._told]
        )
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/openapi.json", self.openapi)
        add_routes(app, self._door)
        return app

    @web.middleware
    async def _traced(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Trace the calls that generate, those that are refused included."""
        operation = _OPERATIONS.get(request.path)
        if operation is None or request.method != "POST":
            return await handler(request)
        request_id = request.headers.get("X-Request-Id", "")
        with self._door.traced(operation, request.headers, request_id) as trace:
            response = await handler(request)
            trace.tell({"http.response.status_code": response.status})
            return response

    @web.middleware
    async def _told(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tell every failure in OpenAI's words, and count the calls that were let in nowhere."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else OTHER
        try:
            with self._door.refusals.watch(route):
                return await handler(request)
        except ServingError as error:
            response = _failure(error, HTTP_STATUS[error.reason])
            if request.content.exception() is not None:
                response.force_close()  # Where the next request begins, nobody knows.
            return response
        except web.HTTPException as error:
            self._door.refusals.count(route, Reason.INVALID_REQUEST)
            where = f"{request.method} {request.path}"
            response = _failure(fault_error(error.status, where, error.reason), error.status)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except ConnectionError:
            raise  # The client has gone: nobody is there to be told.
        except Exception:  # noqa: BLE001  # the edge: whatever fails is told as a failure
            self._door.refusals.count(route, Reason.INTERNAL)
            _log.exception("our bug", extra={"path": request.path})
            ours = ServingError(Reason.INTERNAL, "the router failed; its log says why")
            return _failure(ours, HTTP_STATUS[Reason.INTERNAL])

    async def _body(self, request: web.Request) -> bytes:
        """The body, which has to come in time and as its headers say."""
        try:
            if request.content.is_eof():
                return await request.read()
            async with asyncio.timeout(self._limits.body_max_s):
                return await request.read()
        except web.RequestPayloadError:
            request.content.feed_eof()  # Or aiohttp would wait for the rest, behind the answer.
            raise _garbled(request) from None
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = read_completion(await self._body(request))
        with named(sent_names(body)):
            orders, form = await self._orders.completion(body, request.headers)
            return await self._answer(request, body, orders, form)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = read_chat(await self._body(request))
        with named(sent_names(body)):
            order, form = await self._orders.chat(body, request.headers)
            return await self._answer(request, body, [order], form)

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models."""
        models = [_model(name, tokens) for name, tokens in self._door.models().items()]
        return _json(_encode({"object": "list", "data": models}), 200)

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        self._door.check_model(name)
        tokens = self._door.models().get(name)
        if tokens is None:
            usable = self._door.fleet.usable()
            absent = next((role for role in Role if not usable[role]), Role.DECODE)
            raise self._door.fleet.absence(absent, retry_after_s=1.0)
        return _json(_encode(_model(name, tokens)), 200)

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        body = read_tokenize(await self._body(request))
        with named(sent_names(body)):
            tokens = await self._orders.tokens(body)
        words = TokenWords(self._door.tokenizer, as_ids=False)
        longest = max(self._door.models().values(), default=None)
        answer = {
            "count": len(tokens),
            "max_model_len": longest,
            "tokens": tokens,
            "token_strs": [words.word(x) for x in tokens] if body.return_token_strs else None,
        }
        return _json(_encode(answer), 200)

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        body = read_detokenize(await self._body(request))
        self._door.check_model(body.model)
        return _json(_encode({"prompt": await self._door.decode(body.tokens)}), 200)

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 if a request could be served."""
        return web.Response(status=200 if self._door.ready() else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """GET /ready: the same, and what it depends on."""
        door = self._door
        workers = {f"{role.value}_workers": n for role, n in door.fleet.usable().items()}
        answer = {"ready": door.ready(), "draining": door.admission.closed, **workers}
        return _json(_encode(answer), 200 if door.ready() else 503)

    async def openapi(self, _: web.Request) -> web.Response:
        """GET /openapi.json."""
        return _json(openapi.document(), 200)

    async def _answer(
        self, request: web.Request, body: GenerationBody, orders: Sequence[Order], form: Form
    ) -> web.StreamResponse:
        request_id = orders[0].request_id
        kind = "chatcmpl" if form.whole_object == "chat.completion" else "cmpl"
        head = Head(
            answer_id=f"{kind}-{request_id}",
            created_s=int(time.time()),
            model=self._door.settings.model,
        )
        scored_only = isinstance(body, CompletionBody) and body.scored_only
        prompts_tokens = [len(order.token_ids) for order in orders]
        usage = Usage(prompts_tokens, body.choices, scored_only=scored_only)
        if not body.streams:
            whole = Whole(head, form, usage)
            await self._door.complete(orders, whole)
            return _json(whole.body(), 200, request_id)
        telling = Telling(
            usage=body.wants_usage,
            usage_always=body.wants_usage_always,
            every_token=bool(body.return_token_ids),
        )
        events = EventStream(lambda: generation.cancel(), request_id, self._turn)
        streamed = Streamed(head, form, telling, usage, events.write)
        generation = asyncio.get_running_loop().create_task(self._door.complete(orders, streamed))
        return await _stream(request, events, streamed, generation)


async def _stream(
    request: web.Request,
    events: EventStream,
    streamed: Streamed,
    generation: "asyncio.Task[None]",
) -> web.StreamResponse:
    """Send events until the answer has ended, and say how."""
    try:
        await events.first(generation)
        if generation.done():
            generation.result()  # A failure before the first byte has its own status.
        await events.open(request)
        try:
            await generation
        except ServingError as error:
            events.write(_encode(openai_error_body(error)))
        else:
            streamed.finish()
        events.write(DONE)
        return await events.close()
    finally:
        generation.cancel()
        await asyncio.gather(generation, return_exceptions=True)


def _garbled(request: web.Request) -> ServingError:
    names = [x for x in ("Content-Encoding", "Transfer-Encoding") if x in request.headers]
    said = " and ".join(names) or "Content-Length"
    return ServingError(
        Reason.INVALID_REQUEST, f"the body is not as {said} says; correct it, or send it plain"
    )


def _model(name: str, tokens: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "splitwave",
        "root": name,
        "max_model_len": tokens,
    }


def _failure(error: ServingError, status: int) -> web.Response:
    trace = tracing.current()
    trace.ended(error.reason.value, error.message)
    response = _json(_encode(error_body(error, status)), status, trace.request_id)
    response.headers.update(retry_after_header(error))
    return response


def _json(body: bytes, status: int, request_id: str = "") -> web.Response:
    headers = {"X-Request-Id": request_id} if request_id else {}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


@contextlib.asynccontextmanager
async def http_port(door: FrontDoor, listen: str, limits: HttpLimits) -> AsyncIterator[str]:
    """Serve on `listen` (host:port, port 0 takes a free one); yields the address.

    Raises OSError if the port is taken.
    """
    # A client that goes away cancels its handler, and so the computing.
    app = OpenAI(door, limits).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    connection = functools.partial(Connection, runner.server, limits, door.refusals)
    host, _, port = listen.rpartition(":")
    loop = asyncio.get_running_loop()
    server: asyncio.Server | None = None
    try:
        server = await loop.create_server(
            lambda: connection(loop=loop, access_log=None), host, int(port), backlog=1024
        )
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()
