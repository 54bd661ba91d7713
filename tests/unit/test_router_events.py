"""Server-sent events on their way to the connection: what is written together, and what it says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.router.openai.events import UNSENT_BYTES_MAX, EventStream, Turn

REQUEST = b"POST / HTTP/1.%d\r\nHost: here\r\nContent-Length: 0\r\n\r\n"


class Handler(web.RequestHandler):
    """aiohttp's, with what streams of events hook into."""

    harmless: Callable[[], object] | None = None


class Stand:
    """A server with one route, and a connection to it; notes each write to the connection."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.gave_up = 0
        self.turn = Turn()
        self.tell: Callable[[EventStream], Awaitable[None]]
        self.failure: Exception | None = None

    def watch(self, request: web.Request) -> None:
        transport = request.transport
        assert transport is not None
        write = transport.write

        def noting(data: bytes) -> None:
            self.writes.append(bytes(data))
            write(data)

        transport.write = noting  # type: ignore[method-assign,assignment]  # transports have no hook
        transport.writelines = lambda parts: noting(b"".join(parts))  # type: ignore[method-assign,assignment]  # likewise

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.watch(request)
        events = EventStream(self.give_up, "r1", self.turn)
        events.write(b"first")
        await events.open(request)
        try:
            await self.tell(events)
        except Exception as error:
            self.failure = error
            raise
        return await events.close()

    def give_up(self) -> None:
        self.gave_up += 1

    async def ask(self, tell: Callable[[EventStream], Awaitable[None]], minor: int = 1) -> bytes:
        """Answer one request, whose client reads all."""
        self.tell = tell
        async with self.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST % minor)
            whole = b""
            while not whole.endswith(b"[DONE]\n\n" if minor == 0 else b"0\r\n\r\n"):
                part = await asyncio.wait_for(reader.read(2**16), 5.0)
                assert part, whole
                whole += part
            writer.close()
        assert self.failure is None
        return whole

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        manager = web.Server(self.answer)  # type: ignore[arg-type]  # aiohttp's own type is wider
        server = await loop.create_server(lambda: Handler(manager, loop=loop), "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            await manager.shutdown(1.0)


@pytest.fixture
def stand() -> Stand:
    return Stand()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_headers_go_with_the_first_events(stand: Stand) -> None:
    async def tell(events: EventStream) -> None:
        events.write(b"[DONE]")

    whole = await stand.ask(tell)

    assert stand.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"data: first\n\n" in stand.writes[0]
    assert b"".join(stand.writes) == whole


async def test_what_is_written_in_one_turn_is_sent_at_once(stand: Stand) -> None:
    async def tell(events: EventStream) -> None:
        events.write(b"a")
        events.write(b"b")
        await turns(4)
        events.write(b"c")
        await turns(4)
        events.write(b"[DONE]")

    await stand.ask(tell)

    assert stand.writes[1:] == [
        b"12\r\ndata: a\n\ndata: b\n\n\r\n",
        b"9\r\ndata: c\n\n\r\n",
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    ]


async def test_the_last_token_and_the_end_that_follows_it_go_together(stand: Stand) -> None:
    """From a token to the answer's end it takes a turn of the request and one of its response."""

    async def tell(events: EventStream) -> None:
        events.write(b"token")
        await turns(1)
        events.write(b"end")
        await turns(1)
        events.write(b"[DONE]")

    await stand.ask(tell)

    assert len(stand.writes) <= 3
    assert stand.writes[1].count(b"data: ") >= 2


async def test_an_old_client_gets_no_chunks(stand: Stand) -> None:
    async def tell(events: EventStream) -> None:
        events.write(b"a")
        await turns(4)
        events.write(b"[DONE]")

    whole = await stand.ask(tell, minor=0)

    assert whole.endswith(b"\r\n\r\ndata: first\n\ndata: a\n\ndata: [DONE]\n\n")


async def test_a_client_that_reads_nothing_is_given_up_once(stand: Stand) -> None:
    gone = asyncio.Event()

    async def tell(events: EventStream) -> None:
        while not stand.gave_up:
            events.write(b"x" * 2**16)
            await turns(3)
        for _ in range(3):
            events.write(b"more")
            await turns(3)
        gone.set()

    stand.tell = tell
    async with stand.listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(REQUEST % 1)
        await asyncio.wait_for(gone.wait(), 10.0)
        writer.close()

    assert stand.gave_up == 1
    assert sum(map(len, stand.writes)) > UNSENT_BYTES_MAX


class Transport:
    """A connection that is fine, closing, or broken."""

    def __init__(self, *, closing: bool = False, failure: Exception | None = None) -> None:
        self.written = b""
        self._closing, self._failure = closing, failure

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes) -> None:
        assert not self._closing
        if self._failure is not None:
            raise self._failure
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0


async def test_a_connection_that_breaks_costs_no_other_stream_its_events() -> None:
    turn, given_up = Turn(), []
    transports = {
        "broken": Transport(failure=RuntimeError("the handler is closed")),
        "closing": Transport(closing=True),
        "fine": Transport(),
    }
    streams = []
    for name, transport in transports.items():
        stream = EventStream(lambda name=name: given_up.append(name), "r", turn)  # type: ignore[misc]  # mypy cannot infer it
        stream._transport = transport  # type: ignore[assignment]  # noqa: SLF001  # `open` needs a real one
        streams.append(stream)
    for number in range(2):
        for stream in streams:
            stream.write(b"%d" % number)
        await turns(4)

    assert transports["fine"].written == b"data: 0\n\ndata: 1\n\n"
    assert set(given_up) == {"broken"}
