"""A backend for other routers: OpenAI completions that answer at a set pace, and compute nothing.

    python -m bench.mock_backend PORT STEP_S

It plays prefill and decode of a deployment that hands over by `kv_transfer_params`. All
streams step together, one token an event, as one engine's do.
"""

import asyncio
import json
import sys

import uvloop
from aiohttp import web

TEXT = "x"


class Clock:
    """Wakes all streams at every step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._stepped = asyncio.Event()

    async def step(self) -> None:
        """Wait for the next step."""
        await self._stepped.wait()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            await asyncio.sleep(self._step_s)
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()


def _event(body: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body).encode()


def app(clock: Clock) -> web.Application:
    """The routes that a router calls."""

    async def completions(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked["model"]}
        choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": None}
        tokens = int(asked["max_tokens"])
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
        if not asked.get("stream"):  # Prefill: one token, and where its KV is.
            kept = {"remote_engine_id": "mock", "remote_block_ids": [1], "remote_host": "127.0.0.1"}
            return web.json_response(
                {**head, "choices": [choice], "usage": usage, "kv_transfer_params": kept}
            )
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        event = _event({**head, "choices": [choice]})
        for _ in range(tokens):
            await clock.step()
            await answer.write(event)
        await answer.write(_event({**head, "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return answer

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    made = web.Application(client_max_size=2**24)
    made.router.add_post("/v1/completions", completions)
    made.router.add_get("/health", health)
    made.router.add_get("/v1/models", models)
    return made


async def serve(port: int, step_s: float) -> None:
    """Serve until the process ends."""
    clock = Clock(step_s)
    runner = web.AppRunner(app(clock), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await clock.run()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
