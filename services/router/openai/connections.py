"""Connections of the HTTP port: how long a client may take, how many there are, when it has left.

aiohttp waits for a head for as long as it keeps idle connections, and takes a client that ends
its side for one that has gone. Both are decided here, on its connection class.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final  # Any: aiohttp's own keyword arguments

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import PayloadEncodingError

from services.router.openai.http_faults import error_body
from services.router.refusals import UNREAD, Refusals
from splitwave.core.errors import Reason, ServingError
from splitwave.wire.errors import HTTP_STATUS, openai_error_body, retry_after_header

LOOKS_S: Final = (0.01, 0.05, 0.25)
"""When it is looked whether a client that ended its side is there still; then each LOOK_EVERY_S."""
LOOK_EVERY_S: Final = 1.0
INTERIM: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An interim answer, which every client of HTTP/1.1 must be able to skip (RFC 9110, 15.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What clients may take of the HTTP port."""

    head_max_s: float = 30.0
    """From the first byte of a request, or from connecting, to the end of its head."""
    body_max_s: float = 60.0
    """From there to the end of its body."""
    idle_max_s: float = 3630.0
    """Between two requests: longer than proxies keep theirs, so that none meets a closed one."""
    connections_max: int = 16384


class Connection(web.RequestHandler):
    """One connection.

    A client may end its side and still read (RFC 9112, 9.6), as `nc -N` does, or have gone:
    both look the same until something is written. So something harmless is: an interim answer,
    or a comment in a stream of events. Who has gone answers that with a reset, which ends the
    computing; who reads on gets the answer.
    """

    def __init__(
        self, manager: web.Server, limits: HttpLimits, refusals: Refusals, **options: Any
    ) -> None:
        super().__init__(manager, keepalive_timeout=limits.idle_max_s, **options)
        self._limits, self._refusals = limits, refusals
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_began = False
        self._looks = 0
        self.harmless: Callable[[], object] | None = None
        """Writes what an answer that has begun may hold anywhere; set by who writes it."""

    # Time.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request's head, if there is room for one more connection."""
        super().connection_made(transport)
        self._await_head()
        assert self._manager is not None
        if len(self._manager.connections) > self._limits.connections_max:
            most = self._limits.connections_max
            why = f"there are {most} connections already; try again later"
            error = ServingError(Reason.OVERLOADED, why, retry_after_s=1.0)
            self._refuse(error, HTTPStatus(HTTP_STATUS[error.reason]))

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that begin a head must be followed by all of it in time."""
        heads, begins = self._request_count, self._between_requests()
        super().data_received(data)
        self._blame_body()
        if self._request_count != heads:
            self._head_came()
        elif self._head_timer is None and data and begins:
            self._await_head()
        self._head_began = self._head_timer is not None

    def _process_keepalive(self) -> None:
        """End a connection that was idle for its time, but not amid the head of a request.

        What began just before is served like any other, or told that it came too late.
        """
        if self._head_began:
            self._keepalive_handle = None
        else:
            super()._process_keepalive()

    def _blame_body(self) -> None:
        """What stops being HTTP amid a body is a failure of that request, and no further one.

        aiohttp's parser leaves the reader of the body waiting, and answers what came as another.
        """
        if not self._messages or isinstance(self._messages[-1][0], RawRequestMessage):
            return
        begun = self._messages[-2][1] if len(self._messages) > 1 else None
        if begun is None and self._current_request is not None:
            begun = self._current_request.content
        if begun is None or begun.is_eof():
            return
        self._messages.pop()
        begun.set_exception(web.RequestPayloadError("amid the body"))
        begun.feed_eof()  # Or aiohttp would wait for the rest, behind the answer.
        self.close()

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.head_max_s, self._head_overdue)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _between_requests(self) -> bool:
        """True if what comes now belongs to no request that was begun."""
        request = self._current_request
        answering = request is not None and request.content.is_eof() and not self._messages
        return answering or self._idle()

    def _body_came(self) -> bool:
        """True if what was begun last has been read to its end."""
        if self._messages:
            return self._messages[-1][1].is_eof()
        return self._current_request is None or self._current_request.content.is_eof()

    def _head_overdue(self) -> None:
        self._head_timer = None
        if not self._idle():
            self.close()  # An earlier request of this connection gets its answer before.
        elif self._head_began:
            within = f"did not come within {self._limits.head_max_s:g} s; send it at once"
            error = ServingError(Reason.INVALID_REQUEST, f"the head: {within}")
            self._refuse(error, HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.force_close()  # It never said anything, so there is nothing to answer.

    def _idle(self) -> bool:
        """True if no request is being answered, or waits for that."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _refuse(self, error: ServingError, status: HTTPStatus) -> None:
        """Say why outside of any request, and close."""
        self._refusals.count(UNREAD, error.reason)
        body = msgspec.json.encode(error_body(error, status))
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **retry_after_header(error),
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        head = "\r\n".join([*lines, "", ""])
        if self.transport is not None:
            self.transport.write(head.encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is told in OpenAI's words too. Ends the connection."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        self._refusals.count(UNREAD, Reason.INVALID_REQUEST)
        why = (message or "").strip().partition("\n")[0].rstrip(":")
        what = "the body" if isinstance(exc, PayloadEncodingError) else "not HTTP"
        error = ServingError(Reason.INVALID_REQUEST, f"{what}: {why}; correct it")
        response = web.Response(
            body=msgspec.json.encode(openai_error_body(error)),
            status=status,
            content_type="application/json",
        )
        response.force_close()
        return response

    # The client's end.

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop waiting."""
        self._head_came()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's returns None, for False
        """The client sends no more: True keeps the connection for what it still is to get."""
        if self._idle() or not self._body_came() or not self._can_ask():
            return False
        self._ask()
        self._look_later()
        return True

    def _can_ask(self) -> bool:
        request = self._current_request
        return request is None or request.version >= HttpVersion11 or self.harmless is not None

    def _ask(self) -> None:
        """Write something harmless, which only a client that has gone objects to."""
        if self.harmless is not None:
            self.harmless()
        elif self.transport is not None and not self._answering():
            self.transport.write(INTERIM)

    def _answering(self) -> bool:
        """True once bytes of a final answer are out, so that no interim one may follow."""
        request = self._current_request
        return request is not None and request.writer.output_size > 0

    def _look_later(self) -> None:
        after_s = LOOKS_S[self._looks] if self._looks < len(LOOKS_S) else LOOK_EVERY_S
        self._looks += 1
        self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._idle():
            self.force_close()  # All is answered, and no request can follow.
        elif self._was_reset():
            self.transport.abort()
        else:
            self._look_later()

    def _was_reset(self) -> bool:
        assert self.transport is not None
        connection = self.transport.get_extra_info("socket")
        return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
