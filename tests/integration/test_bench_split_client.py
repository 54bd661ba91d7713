"""A client of the split comparison before a server that behaves, and before one that does not."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any  # a spec's fields

import aiohttp
import pytest
from aiohttp import web

from bench.split.balance import Board
from bench.split.client import Asked, Spec, Status, run

TOKENS = 5


class Server:
    """OpenAI's completions as told: a token every few milliseconds, or something else."""

    def __init__(self, answer: "Callable[[Server, web.StreamResponse], Any] | int") -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.running = self.running_max = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Note what is asked, and answer."""
        self.bodies.append(await request.json())
        if isinstance(self._answer, int):
            return web.Response(status=self._answer, text="no room")
        self.running += 1
        self.running_max = max(self.running, self.running_max)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            await self._answer(self, response)
            return response
        finally:
            self.running -= 1


def event(**fields: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()


async def behave(server: Server, response: web.StreamResponse, tokens: int = TOKENS) -> None:
    for _ in range(tokens):
        await response.write(event(choices=[{"text": "", "token_ids": [1]}]))
        await asyncio.sleep(0.01)
    await response.write(event(choices=[], usage={}) + b"data: [DONE]\n\n")


async def stop_short(server: Server, response: web.StreamResponse) -> None:
    await behave(server, response, tokens=TOKENS - 1)


async def hang(server: Server, response: web.StreamResponse) -> None:
    await response.write(event(choices=[{"token_ids": [1]}]))
    await asyncio.sleep(60)


async def fail(server: Server, response: web.StreamResponse) -> None:
    await response.write(event(choices=[{"token_ids": [1]}]))
    await response.write(event(error={"message": "the lease expired"}))


async def break_off(server: Server, response: web.StreamResponse) -> None:
    await response.write(event(choices=[{"token_ids": [1]}]))
    raise ConnectionResetError


@contextlib.asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[list[str]]:
    """Their addresses."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for server in servers:
            app = web.Application()
            app.router.add_post("/v1/completions", server.completions)
            runner = web.AppRunner(
                app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            addresses.append(site.name.removeprefix("http://"))
        yield addresses


async def asked_of(tmp_path: Path, *servers: Server, **changes: Any) -> list[Asked]:
    """What one client saw of these servers."""
    Board.make(tmp_path / "board", changes.get("clients", 1), len(servers))
    async with serving(*servers) as addresses:
        given: dict[str, Any] = {
            "seed": 1, "kind": "poisson", "value": 40.0, "prompt_tokens": 16,
            "completion_tokens": TOKENS, "token_ids": (5, 9), "warm_s": 0.1, "until_s": 0.5,
            "end_s": 9.0, "model": "m", "addresses": addresses, "board": str(tmp_path / "board"),
            "client": 0, "clients": 1, "out": "",
        }  # fmt: skip
        return await run(Spec(**given | changes), time.monotonic())


async def test_every_arrival_is_sent_when_it_is_due(tmp_path: Path) -> None:
    server = Server(behave)
    asked = await asked_of(tmp_path, server)

    assert len(asked) == len(server.bodies) > 5
    assert {each.status for each in asked} == {Status.DONE}
    assert [each.number for each in asked] == list(range(len(asked)))
    for each in asked:
        assert each.due_s - 0.005 <= each.sent_s  # Timers are a little early at times.
        assert each.sent_s <= each.events_s[0] <= each.events_s[-1] <= each.ended_s
        assert (each.tokens, len(each.events_s)) == (TOKENS, TOKENS)
    assert {len(body["prompt"]) for body in server.bodies} == {16}
    assert {(body["max_tokens"], body["ignore_eos"]) for body in server.bodies} == {(TOKENS, True)}


async def test_an_open_load_does_not_wait_for_answers(tmp_path: Path) -> None:
    """A client that did would send one request a second to a server that hangs."""
    server = Server(hang)
    asked = await asked_of(tmp_path, server, end_s=0.7)

    assert server.running_max == len(asked) > 5
    assert {each.status for each in asked} == {Status.UNFINISHED}
    assert {each.tokens for each in asked} == {1}


async def test_a_closed_load_has_one_request_a_stream(tmp_path: Path) -> None:
    server = Server(behave)
    asked = await asked_of(tmp_path, server, kind="closed", value=3.0)

    assert server.running_max == 3
    assert len(asked) > 9
    assert len({each.number for each in asked}) == len(asked)
    assert max(each.sent_s for each in asked) < 0.5


async def test_clients_share_the_arrivals(tmp_path: Path) -> None:
    alone = await asked_of(tmp_path, Server(behave))
    shares = [
        await asked_of(tmp_path, Server(behave), client=client, clients=2) for client in (0, 1)
    ]

    due = sorted((each.number, each.due_s) for share in shares for each in share)
    assert due == [(each.number, each.due_s) for each in alone]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (503, "status 503: no room"),
        (stop_short, "4 tokens came where 5 were asked for"),
        (fail, "the lease expired"),
        (break_off, "Payload"),
    ],
    ids=["refused", "short", "failed", "broken off"],
)
async def test_a_request_that_is_not_served_keeps_the_reason(
    tmp_path: Path, answer: Any, words: str
) -> None:
    asked = await asked_of(tmp_path, Server(answer), value=20.0)

    assert {each.status for each in asked} == {Status.FAILED}
    assert all(words in each.reason for each in asked), asked[0].reason


async def test_nobody_there_is_a_reason_too(tmp_path: Path) -> None:
    asked = await asked_of(tmp_path, Server(behave), addresses=["127.0.0.1:1"])

    assert {each.status for each in asked} == {Status.FAILED}
    assert "127.0.0.1:1" in asked[0].reason


async def test_a_server_that_hangs_gets_no_more_than_its_share(tmp_path: Path) -> None:
    """The balancer counts what is in flight: the other server takes what comes."""
    hanging, other = Server(hang), Server(behave)
    await asked_of(tmp_path, hanging, other, value=100.0, end_s=0.8)

    assert len(other.bodies) > 2 * len(hanging.bodies) > 0


async def test_the_client_closes_what_it_cut_off(tmp_path: Path) -> None:
    server = Server(hang)
    async with serving(server) as addresses:
        Board.make(tmp_path / "board", 1, 1)
        spec = Spec(
            seed=1, kind="closed", value=2.0, prompt_tokens=4, completion_tokens=2,
            token_ids=(1, 2), warm_s=0.1, until_s=0.2, end_s=0.4, model="m", addresses=addresses,
            board=str(tmp_path / "board"), client=0, clients=1, out="",
        )  # fmt: skip
        await run(spec, time.monotonic())
        async with aiohttp.ClientSession() as http:
            for _ in range(100):
                if server.running == 0:
                    break
                await asyncio.sleep(0.05)
                await http.get(f"http://{addresses[0]}/")

        assert server.running == 0
