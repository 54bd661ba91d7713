"""Calls that ended before anything was admitted for them: what operators count beside outcomes.

An admitted request has an outcome (front_door.py); a call that was let in nowhere has its route
and its reason here, by whichever way it came and however little of it could be read.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final  # Any: gRPC's handlers take and give any message

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.router import tracing
from splitwave.core.errors import Reason, ServingError
from splitwave.wire.errors import abort

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]  # Subscriptable for the type checker alone.

UNREAD: Final = "unread"
"""Route of a call whose head could not be read, or did not come."""
OTHER: Final = "other"
"""Route of a call for what is not there."""
REASONS: Final = (
    Reason.INVALID_REQUEST,
    Reason.UNSUPPORTED_FEATURE,
    Reason.MODEL_NOT_FOUND,
    Reason.POOL_UNAVAILABLE,
    Reason.OVERLOADED,
    Reason.WORKER_DRAINING,
    Reason.CANCELLED,
)
"""What a call is refused for; INTERNAL too if a bug of ours does it."""


class Refusals:
    """Counts of one router."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Reason]] = Counter()
        """By route and reason."""
        self.routes: dict[str, None] = {}
        """Routes that generate, an ordered set: their counts begin at 0."""

    def count(self, route: str, reason: Reason) -> None:
        """Count a call that failed, unless something was admitted for it."""
        if not tracing.current().admitted:
            self.counts[route, reason] += 1

    def by_reason(self) -> dict[str, int]:
        """Over all routes."""
        found: Counter[str] = Counter()
        for (_, reason), count in self.counts.items():
            found[reason.value] += count
        return dict(found)

    @contextmanager
    def watch(self, route: str) -> Iterator[None]:
        """Count the call that is served within the block if it fails."""
        try:
            yield
        except ServingError as error:
            self.count(route, error.reason)
            raise
        except (asyncio.CancelledError, ConnectionError):
            self.count(route, Reason.CANCELLED)
            raise


_GARBLED: Final = object()


class Guarded(grpc.GenericRpcHandler):
    """A service's methods, with an answer by name for bytes that are not their request.

    Left to itself gRPC answers UNKNOWN, without a reason of the catalogue, and nobody counts it.
    """

    def __init__(self, service: grpc.GenericRpcHandler, name: str, refusals: Refusals) -> None:
        self._service, self._prefix, self._refusals = service, f"/{name}/", refusals
        self._made: dict[str, _Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        """The handler of a method; None, as gRPC wants it, for one that is not there."""
        method = handler_call_details.method
        made = self._made.get(method)
        if made is None:
            found = self._service.service(handler_call_details)
            if found is None:
                if method.startswith(self._prefix):
                    self._refusals.count(OTHER, Reason.UNSUPPORTED_FEATURE)
                return None
            made = self._made[method] = self._guarded(method, found)
        return made

    def _guarded(self, method: str, found: "_Handler") -> "_Handler":
        parse = found.request_deserializer
        assert parse is not None
        serve: Callable[..., Any] | None
        make: Callable[..., _Handler]
        if found.unary_unary is not None:
            serve, make = found.unary_unary, grpc.unary_unary_rpc_method_handler
        else:
            serve, make = found.unary_stream, grpc.unary_stream_rpc_method_handler
        assert serve is not None, "no method takes a stream"
        return make(
            self._answer(method, serve),
            request_deserializer=lambda data: _read(parse, data),
            response_serializer=found.response_serializer,
        )

    def _answer(self, method: str, serve: Callable[..., Any]) -> Callable[..., Any]:
        async def checked(request: Any, context: Any) -> Any:
            if request is _GARBLED:
                await self._refuse(method, context)
            return await serve(request, context)

        async def yielded(request: Any, context: Any) -> AsyncIterator[Any]:
            if request is _GARBLED:
                await self._refuse(method, context)
            async for message in serve(request, context):
                yield message

        return yielded if inspect.isasyncgenfunction(serve) else checked

    async def _refuse(self, method: str, context: Any) -> None:
        self._refusals.count(method, Reason.INVALID_REQUEST)
        message = "the request: not a message of this method; compare your .proto with ours"
        await abort(context, ServingError(Reason.INVALID_REQUEST, message))


class GuardedServer:
    """Takes services as a server does, and adds them guarded."""

    def __init__(self, server: grpc.aio.Server, names: Sequence[str], refusals: Refusals) -> None:
        """`names`: of the services that will be added, in that order."""
        self._server, self._names, self._refusals = server, iter(names), refusals

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add them, guarded."""
        self._server.add_generic_rpc_handlers(
            [Guarded(each, next(self._names), self._refusals) for each in handlers]
        )

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Nothing: it is the same once more, and gRPC's asynchronous server ignores it."""


def _read(parse: Callable[[bytes], object], data: bytes) -> object:
    try:
        return parse(data)
    except DecodeError:
        return _GARBLED
