"""Connections of the HTTP port, by raw sockets: clients that dawdle, garble, or end their side."""

import asyncio
import contextlib
import json
import re
import socket
import zlib
from collections.abc import AsyncIterator
from typing import Any  # JSON

import pytest

from splitwave.core.errors import Reason
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import eventually

BODY: dict[str, Any] = {"model": MODEL, "prompt": "The capital of", "temperature": 0}
SOON_S = 15.0
HEAD_S, BODY_S = 0.8, 1.2
UNREAD = ("unread", Reason.INVALID_REQUEST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model) as started:
        yield started
        await started.empty()


@pytest.fixture
async def hasty(model: Model) -> AsyncIterator[RouterStack]:
    """A router that waits for no one."""
    async with router_stack(
        model, http_head_max_s=HEAD_S, http_body_max_s=BODY_S, http_connections_max=6
    ) as started:
        yield started
        await started.empty()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes; `end`: and end this side."""
        self.writer.write(data)
        await self.writer.drain()
        if end:
            self.writer.write_eof()

    async def rest(self) -> bytes:
        """All that comes until the other end closes."""
        async with asyncio.timeout(SOON_S):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def connected(stack: RouterStack) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*stack.http_address)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def asked(body: dict[str, Any], version: str = "1.1", extra: str = "") -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n{extra}Content-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


def answer_of(said: bytes) -> tuple[int, Any]:
    """Status and JSON of the final answer, behind interim ones."""
    while said.startswith(b"HTTP/1.1 102 "):
        said = said.partition(b"\r\n\r\n")[2]
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def test_who_sends_nothing_is_closed_without_a_word(hasty: RouterStack) -> None:
    async with connected(hasty) as client:
        assert await client.rest() == b""

    assert hasty.door.refusals.counts.total() == 0


@pytest.mark.parametrize("begun", [b"P", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA"])
async def test_half_a_head_is_told_that_it_came_too_late(hasty: RouterStack, begun: bytes) -> None:
    async with connected(hasty) as client:
        await client.send(begun)
        status, answer = answer_of(await client.rest())

    assert (status, answer["error"]["type"]) == (408, "invalid_request_error")
    assert answer["error"]["code"] == "request_timeout"
    assert hasty.door.refusals.counts[UNREAD] == 1


async def test_a_head_that_drips_has_no_more_time_than_another(hasty: RouterStack) -> None:
    async def drip(client: Client) -> None:
        for byte in b"GET /health HTTP/1.1\r\n" * 100:
            await client.send(bytes((byte,)))
            await asyncio.sleep(HEAD_S / 10)

    began_s = asyncio.get_running_loop().time()
    async with connected(hasty) as client:
        dripping = asyncio.create_task(drip(client))
        await client.reader.read(1)
        took_s = asyncio.get_running_loop().time() - began_s
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)

    assert took_s == pytest.approx(HEAD_S, abs=5.0)


async def test_half_a_head_behind_a_whole_request_is_not_waited_for_either(
    hasty: RouterStack,
) -> None:
    async with connected(hasty) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(HEAD_S * 2)  # Idle is no offence.
        await client.send(b"GET /hea")
        status, _ = answer_of(await client.rest())

    assert status == 408


async def test_a_body_that_does_not_come_is_told_so(hasty: RouterStack) -> None:
    async with connected(hasty) as client:
        await client.send(asked(BODY)[:-5])
        async with asyncio.timeout(SOON_S):
            said = await client.reader.readuntil(b"}}")

    status, answer = answer_of(said)
    assert (status, answer["error"]["type"]) == (408, "invalid_request_error")
    assert answer["error"]["code"] == "request_timeout"
    assert hasty.door.refusals.counts["/v1/completions", Reason.INVALID_REQUEST] == 1


CHUNKED = "Host: x\r\nTransfer-Encoding: chunked"
GARBLED = {
    "no gzip": ("/v1/completions", "Host: x\r\nContent-Encoding: gzip\r\nContent-Length: 2", b"{}"),
    "no deflate": (
        "/v1/chat/completions",
        "Host: x\r\nContent-Encoding: deflate\r\nContent-Length: 2",
        b"{}",
    ),
    "half a deflate": (
        "/tokenize",
        "Host: x\r\nContent-Encoding: deflate\r\nContent-Length: 6",
        zlib.compress(b"{}" * 99)[:6],
    ),
    "no chunk": ("/v1/completions", CHUNKED, b"2\r\n{}\r\nzz\r\n"),
    "a chunk too long": ("/tokenize", CHUNKED, b"2\r\n{}}}}\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("case", GARBLED)
async def test_a_body_that_cannot_be_read_is_the_clients_fault_and_told_at_once(
    stack: RouterStack, caplog: pytest.LogCaptureFixture, case: str, apart: bool
) -> None:
    path, headers, body = GARBLED[case]
    async with connected(stack) as client:
        head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode()
        for data in (head, body[:2], body[2:]) if apart else (head + body,):
            await client.send(data)
            await asyncio.sleep(0.05 if apart else 0.0)
        said = await client.rest()  # It is told once, and the connection closed.

    status, answer = answer_of(said)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")
    assert said.count(b"HTTP/1.") == 1
    ((route, reason),) = stack.door.refusals.counts.elements()
    assert (route, reason) in ((path, Reason.INVALID_REQUEST), UNREAD)
    assert route == path or not apart, "its head was read"
    if route == path:
        assert "the body is not as " in answer["error"]["message"]
        assert "-Encoding says; " in answer["error"]["message"]
    assert caplog.records == []


async def test_a_slow_body_and_a_long_answer_have_their_own_time(hasty: RouterStack) -> None:
    """Neither counts against the head's: a stream outlives it."""
    data = asked({**BODY, "max_tokens": 300})
    async with connected(hasty) as client:
        await client.send(data[:-20])
        await asyncio.sleep(BODY_S / 2)
        await client.send(data[-20:])
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(HEAD_S * 2)
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", end=True)
        assert b"HTTP/1.1 200 OK" in await client.rest()


async def test_connections_are_bounded_and_the_next_is_told(hasty: RouterStack) -> None:
    async with contextlib.AsyncExitStack() as held:
        for _ in range(5):
            client = await held.enter_async_context(connected(hasty))
            await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await client.reader.readuntil(b"\r\n\r\n")
        spare, over = [await held.enter_async_context(connected(hasty)) for _ in range(2)]
        said = await over.rest()
        await spare.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", end=True)
        assert b"200 OK" in await spare.rest()

    status, answer = answer_of(said)
    assert (status, answer["error"]["code"]) == (429, "overloaded")
    assert b"\r\nRetry-After: 1\r\n" in said
    assert hasty.door.refusals.counts["unread", Reason.OVERLOADED] == 1


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"A" * 9000])
async def test_what_is_no_http_is_refused_in_openais_words(
    stack: RouterStack, garbage: bytes
) -> None:
    async with connected(stack) as client:
        await client.send(garbage, end=False)
        status, answer = answer_of(await client.rest())

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert stack.door.refusals.counts[UNREAD] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_who_ends_only_its_own_side_gets_the_whole_answer(
    stack: RouterStack, stream: bool
) -> None:
    body = {**BODY, "max_tokens": 400, "stream": stream}
    async with stack.http.post("/v1/completions", json=body) as response:
        right = await response.text()
    async with connected(stack) as client:
        await client.send(asked(body), end=True)
        said = (await client.rest()).decode()

    assert stack.door.outcomes == {"finished": 2}
    assert texts(said) == texts(right)
    assert len(texts(right)) > 300


def texts(said: str) -> str:
    """All text of completions, in an answer or in a stream's chunks."""
    return "".join(json.loads(x) for x in re.findall(r'"text":("(?:[^"\\]|\\.)*")', said))


async def test_several_requests_before_the_end_are_all_answered(stack: RouterStack) -> None:
    async with connected(stack) as client:
        await client.send(asked({**BODY, "max_tokens": 50}) * 3, end=True)
        said = await client.rest()

    assert said.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_gone_is_not_mistaken_for_one_who_reads_on(
    stack: RouterStack, stream: bool
) -> None:
    """A closed socket sends the same end of data; what is written to it comes back as a reset."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, stack.http_address)
        data = asked({**BODY, "max_tokens": 4000, "stream": stream})
        await loop.sock_sendall(client, data)
        await eventually(lambda: stack.decode_seats() == 1)
        while stream and await loop.sock_recv(client, 65536) == b"":
            pass
        # With all read that has come, its close is an end of data, and no reset by itself.
        with contextlib.suppress(BlockingIOError):
            while client.recv(65536):
                pass

    await eventually(lambda: stack.door.outcomes["cancelled"] == 1)


async def test_an_interim_answer_is_not_for_clients_of_http_1_0(stack: RouterStack) -> None:
    """They could not read it, so the end of their side is taken for their leaving."""
    async with connected(stack) as client:
        await client.send(asked({**BODY, "max_tokens": 4000}, "1.0"))
        await eventually(lambda: stack.decode_seats() == 1)
        client.writer.write_eof()
        assert await client.rest() == b""

    await eventually(lambda: stack.door.outcomes["cancelled"] == 1)
