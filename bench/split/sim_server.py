"""A simulated group that serves both phases, behind OpenAI's completions API.

    python -m bench.split.sim_server PORT SETTINGS.json

The engine is Splitwave's simulator with requests that hold nothing: a rank chunks a prompt into
its steps beside the tokens that it generates, and all ranks step together at the pace of the
slowest, so a prompt on any rank delays the next token of every stream. It is a timing model: a
step lasts a fixed time, and some more for each token and each prompt token in it. Unlike vLLM it
ends a request that finds no KV block (give it enough), and it places requests on the rank with
the fewest, by counts that are never stale.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import uvloop
from aiohttp import web

from splitwave.core.generation import Sampling
from splitwave.engine.port import EngineRequest, RequestOutput, Role
from splitwave.engine.sim import SimEngine, SimSettings, start_sim_group

Outputs = asyncio.Queue[RequestOutput]


class Front:
    """Takes requests, gives them to ranks, and passes their tokens on."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._on_rank = [0] * engine.settings.ranks
        self._waiting: dict[str, Outputs] = {}

    async def read(self) -> None:
        """Hand outputs to those that wait for them, until the engine ends."""
        async for batches in self._engine.steps():
            for batch in batches:
                for output in batch.outputs:
                    if (queue := self._waiting.get(output.engine_request_id)) is not None:
                        queue.put_nowait(output)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions, streamed."""
        asked = await request.json()
        name = f"cmpl-{next(self._numbers)}"
        rank = min(range(len(self._on_rank)), key=self._on_rank.__getitem__)
        queue = self._waiting[name] = Outputs()
        self._on_rank[rank] += 1
        try:
            await self._engine.submit([_engine_request(name, rank, asked)])
            return await self._stream(request, name, queue)
        finally:
            self._on_rank[rank] -= 1
            del self._waiting[name]
            await self._engine.abort([name])

    async def _stream(self, request: web.Request, name: str, queue: Outputs) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            output = await queue.get()
            if output.failure is not None:
                error = {"message": output.failure_message, "code": output.failure.value}
                await answer.write(_event({"error": error}))
                break
            choice = {"index": 0, "text": "", "token_ids": output.token_ids}
            await answer.write(_event({"id": name, "choices": [choice]}))
            if output.finish is not None:
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        return web.Response()


def _engine_request(name: str, rank: int, asked: dict[str, object]) -> EngineRequest:
    prompt, tokens = asked["prompt"], asked["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(tokens, int)
    return EngineRequest(
        engine_request_id=name,
        rank=rank,
        token_ids=prompt,
        sampling=Sampling(max_tokens=tokens, ignore_eos=bool(asked.get("ignore_eos"))),
    )


def _event(body: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body).encode()


async def serve(port: int, settings: SimSettings) -> None:
    """Serve until the process ends or the engine does."""
    front = Front(await start_sim_group(settings))
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", front.completions)
    app.router.add_get("/health", front.health)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await front.read()


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[2]).read_text())
    uvloop.run(serve(int(sys.argv[1]), SimSettings(role=Role.PREFILL, **told)))
