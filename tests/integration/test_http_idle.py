"""Connections of the HTTP port between two requests: kept for their time, then closed cleanly."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any  # JSON

import aiohttp
import pytest

from services.router import grants, prefill_client
from services.router.config import RouterConfig
from services.router.openai import connections
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.test_http_connections import Client, answer_of, asked, connected
from tests.integration.worker_stack import DECODE

BODY: dict[str, Any] = {"model": MODEL, "prompt": "The capital of", "temperature": 0}
SHORT = {**BODY, "max_tokens": 5}
LONG_IDLE_S = 3.5
"""Longer than the router lets pass between two looks of its own; all that wait so wait at once."""
IDLE_MAX_S = 0.5
SLOW = replace(DECODE, step_fixed_s=0.02)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OVER = b"\r\n\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def brief(model: Model) -> AsyncIterator[RouterStack]:
    """A router that keeps idle connections for a moment, and takes longer than that to answer."""
    async with router_stack(model, decode=SLOW, http_idle_max_s=IDLE_MAX_S) as started:
        yield started
        await started.empty()


async def whole(client: Client) -> bytes:
    """One answer of a known length."""
    head = await client.reader.readuntil(OVER)
    if b"Content-Length: " not in head:
        return head
    length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
    return head + await client.reader.readexactly(length)


def waited_s(began_s: float) -> float:
    return asyncio.get_running_loop().time() - began_s


def test_the_idle_time_of_the_test_below_outlasts_every_look_of_the_routers() -> None:
    config = RouterConfig()
    looks = (connections.LOOK_EVERY_S, grants.LOOK_AGAIN_S, prefill_client.LOOK_AGAIN_S)

    assert max(*looks, config.resolve_s) < LONG_IDLE_S < config.http_idle_max_s


async def kept(stack: RouterStack, streams: tuple[bool, bool]) -> int:
    """Connections that a client opens for two requests with a long idle time between them."""
    opened = 0
    watch = aiohttp.TraceConfig()

    async def opening(*_: object) -> None:
        nonlocal opened
        opened += 1

    watch.on_connection_create_end.append(opening)
    address = "http://{}:{}".format(*stack.http_address)
    async with aiohttp.ClientSession(address, trace_configs=[watch]) as client:
        for idle_s, stream in zip((LONG_IDLE_S, 0.0), streams, strict=True):
            body = {**SHORT, "stream": stream}
            async with client.post("/v1/completions", json=body) as response:
                text = await response.text()
            assert (response.status, "[DONE]" in text) == (200, stream)
            await asyncio.sleep(idle_s)
    return opened


async def test_a_kept_connection_serves_again_after_a_long_idle_time(model: Model) -> None:
    """With the default settings. All wait at once: the suite waits for it only here."""
    ways = [(first, second) for first in (True, False) for second in (True, False)]
    async with router_stack(model) as stack:
        assert await asyncio.gather(*(kept(stack, streams) for streams in ways)) == [1] * 4
        await stack.empty()


async def test_an_idle_connection_is_closed_after_its_time_without_a_word(
    brief: RouterStack,
) -> None:
    async with connected(brief) as client:
        for _ in range(2):  # Each request begins the time anew.
            await client.send(asked(SHORT))
            status, _ = answer_of(await whole(client))
            began_s = asyncio.get_running_loop().time()
            await asyncio.sleep(IDLE_MAX_S / 2)
        rest = await client.rest()

    assert (status, rest) == (200, b"")
    assert IDLE_MAX_S - 0.1 < waited_s(began_s) < IDLE_MAX_S + 5.0


async def test_what_takes_longer_than_idle_connections_are_kept_is_answered_whole(
    brief: RouterStack,
) -> None:
    """The coming of its body, and its computing."""
    tokens = int(2 * IDLE_MAX_S / SLOW.step_fixed_s)

    async def slow(stream: bool) -> bytes:
        data = asked({**BODY, "max_tokens": tokens, "ignore_eos": True, "stream": stream})
        async with connected(brief) as client:
            await client.send(data[:-10])
            await asyncio.sleep(1.5 * IDLE_MAX_S)
            await client.send(data[-10:])
            return await client.rest()

    began_s = asyncio.get_running_loop().time()
    streamed, said = await asyncio.gather(slow(True), slow(False))

    assert waited_s(began_s) > 3.5 * IDLE_MAX_S
    assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer_of(said)[1]["usage"]["completion_tokens"] == tokens


async def test_a_head_that_began_within_the_time_may_end_after_it(brief: RouterStack) -> None:
    async with connected(brief) as client:
        await client.send(HEALTH)
        await whole(client)
        await asyncio.sleep(0.5 * IDLE_MAX_S)
        await client.send(HEALTH[:20])
        await asyncio.sleep(0.8 * IDLE_MAX_S)
        await client.send(HEALTH[20:])
        said = await client.rest()  # It is served, and closed a while after that.

    assert said.startswith(b"HTTP/1.1 200 OK")


async def test_a_request_that_meets_the_close_is_answered_whole_or_not_at_all(
    brief: RouterStack,
) -> None:
    """A client may then send it again on another connection: nothing was begun for it."""

    async def meet(after_s: float) -> bytes:
        async with connected(brief) as client:
            await client.send(asked(SHORT))
            await whole(client)
            await asyncio.sleep(after_s)
            try:
                await client.send(asked(SHORT))
                return await client.rest()
            except ConnectionError:
                return b""

    admitted = brief.door.admitted
    times_s = [0.0, *(IDLE_MAX_S - 0.06 + 0.002 * n for n in range(60)), 2 * IDLE_MAX_S]
    answers = await asyncio.gather(*map(meet, times_s))

    served = [answer_of(said) for said in answers if said]
    assert {status for status, _ in served} <= {200}
    assert len({json.dumps(answer["choices"]) for _, answer in served}) == 1
    assert 0 < len(served) < len(answers), "it was met, before and after"
    assert brief.door.admitted - admitted == len(answers) + len(served)
