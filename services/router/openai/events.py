"""Server-sent events of one stream, written from the frame loop without waiting.

Events that come before the response has begun are kept; from then on each goes to
the connection at once, so all events of a frame are written by one loop. Format:
WHATWG HTML, "Server-sent events"; chunked framing: RFC 9112, section 7.1.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web

from services.router.openai.connections import Connection

UNSENT_BYTES_MAX = 1024 * 1024
"""A client with more than this unread is treated as gone: memory is bounded."""


class EventStream:
    """The events of one response. Write at any time; open once there is something to say."""

    def __init__(self, give_up: Callable[[], object], request_id: str) -> None:
        """`give_up` is called once if the client does not read."""
        self._give_up = give_up
        self._request_id = request_id
        self._kept: list[bytes] = []
        self._first = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None
        self._connection: Connection | None = None
        self._response: web.StreamResponse | None = None
        self._chunked = False

    def write(self, data: bytes) -> None:
        """Send one event's data."""
        if self._transport is None:
            self._kept.append(data)
            self._first.set()
            return
        event = b"data: %b\n\n" % data
        if self._chunked:
            event = b"%x\r\n%b\r\n" % (len(event), event)
        self._transport.write(event)
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._transport.abort()
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
        response = web.StreamResponse(
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
            await response.write(b"".join(b"data: %b\n\n" % data for data in kept))
            if not self._kept:
                break
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        self._transport = cast(asyncio.WriteTransport, request.transport)  # uvloop's is no subclass
        self._connection = cast(Connection, request.protocol)
        self._connection.harmless = self.harmless

    async def close(self) -> web.StreamResponse:
        """End the response."""
        assert self._response is not None
        if self._connection is not None:
            self._connection.harmless = None
        await self._response.write_eof()
        return self._response
