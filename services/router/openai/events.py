"""Server-sent events of one stream, written from the frame loop without waiting.

Events that come before the response has begun are kept; from then on all of one turn of the loop
go to the connection together, since each write is a system call and wakes the client. Format:
WHATWG HTML, "Server-sent events"; chunked framing: RFC 9112, section 7.1.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web

from services.router.openai.connections import Connection

_log = logging.getLogger(__name__)

UNSENT_BYTES_MAX = 1024 * 1024
"""A client with more than this unread is treated as gone: memory is bounded."""


class _Response(web.StreamResponse):
    """A response whose headers wait for its first events, as those of whole answers do."""

    _send_headers_immediately = False


class Turn:
    """Sends what streams have written, for all of them at once, a little later.

    The end of an answer takes two turns from its last token: waiting for as many lets both go
    together. A turn is short, and all streams of a frame wait for the same.
    """

    def __init__(self) -> None:
        self._written: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """A stream has something to send; add it once until it is flushed."""
        if not self._written:
            asyncio.get_running_loop().call_soon(self._wait)
        self._written.append(stream)

    def _wait(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        written, self._written = self._written, []
        for stream in written:
            try:
                stream.flush()
            except Exception as error:  # noqa: BLE001  # One client's connection must not cost others'.
                _log.warning("a stream of events could not be written: %r", error)
                stream.give_up()


class EventStream:
    """The events of one response. Write at any time; open once there is something to say."""

    def __init__(self, give_up: Callable[[], object], request_id: str, turn: Turn) -> None:
        """`give_up` is called once if the client does not read; `turn`: of all streams here."""
        self._give_up = give_up
        self._request_id = request_id
        self._turn = turn
        self._kept: list[bytes] = []
        """Events that were not sent yet, as they will stand on the wire."""
        self._first = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None
        self._connection: Connection | None = None
        self._response: web.StreamResponse | None = None
        self._chunked = False

    def write(self, data: bytes) -> None:
        """Send one event's data, with all else that this turn of the loop has for the client."""
        if self._transport is None:
            self._first.set()
        elif not self._kept:
            self._turn.add(self)
        self._kept.append(b"data: %b\n\n" % data)

    def flush(self) -> None:
        """Send what was written, unless the stream's end has taken it along."""
        if not self._kept or self._transport is None:
            return
        events = b"".join(self._kept)
        self._kept.clear()
        if self._transport.is_closing():
            return  # The client has gone, and the request ends by that.
        if self._chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._transport.write(events)
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._transport.abort()
            self.give_up()

    def give_up(self) -> None:
        """End the request: nobody can be told what becomes of it."""
        self._give_up()

    def harmless(self) -> None:
        """Write a comment, which clients skip: who has gone will say so."""
        if self._transport is not None:
            self._transport.write(b"3\r\n:\n\n\r\n" if self._chunked else b":\n\n")

    async def first(self, generation: "asyncio.Task[object]") -> None:
        """Wait for the first event, or the end of what writes them."""
        generation.add_done_callback(lambda _: self._first.set())
        await self._first.wait()

    async def open(self, request: web.Request) -> None:
        """Begin the response with what was kept. Raises ConnectionError if the client has gone."""
        response = _Response(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Request-Id": self._request_id,
            }
        )
        self._chunked = request.version >= (1, 1)
        if self._chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        self._response = response
        # Until the headers are out, writes to the connection itself would overtake them.
        while True:
            kept, self._kept = self._kept, []
            await response.write(b"".join(kept) or b":\n\n")  # Headers go with something.
            if not self._kept:
                break
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        self._transport = cast(asyncio.WriteTransport, request.transport)  # uvloop's is no subclass
        self._connection = cast(Connection, request.protocol)
        self._connection.harmless = self.harmless

    async def close(self) -> web.StreamResponse:
        """End the response, with what is still to be sent."""
        assert self._response is not None
        if self._connection is not None:
            self._connection.harmless = None
        kept, self._kept = self._kept, []
        await self._response.write_eof(b"".join(kept))
        return self._response
