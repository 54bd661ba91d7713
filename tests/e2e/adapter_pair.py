"""A prefill and a decode group driven as the router and the workers will drive them."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any  # JSON

from splitwave.core.generation import first_token_is_kept
from splitwave.engine.port import EngineDied, EngineRequest, Held, Pull, RequestOutput
from splitwave.engine.vllm.adapter import VllmEngine
from tests.e2e.adapter_cases import Case


class Caller:
    """Submits requests to one engine and collects their outputs by id."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.seen: dict[str, list[RequestOutput]] = {}
        self.pulls_ended: list[str] = []
        self.batches = 0
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._pump = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for steps in self.engine.steps():
            for step in steps:
                self.batches += 1
                self.pulls_ended += step.pulls_ended
                for output in step.outputs:
                    self.seen.setdefault(output.engine_request_id, []).append(output)
                    end = self._ends.get(output.engine_request_id)
                    if end and not end.done() and (output.finish or output.failure):
                        end.set_result(None)

    async def start(self, *requests: EngineRequest) -> None:
        """Submit without waiting for an end."""
        for request in requests:
            end = asyncio.get_running_loop().create_future()
            self._ends.setdefault(request.engine_request_id, end)
        await self.engine.submit(requests)

    async def run(self, request: EngineRequest) -> list[RequestOutput]:
        """Submit one request and return its outputs once it has ended."""
        await self.start(request)
        await asyncio.wait_for(self._ends[request.engine_request_id], 60)
        return self.seen[request.engine_request_id]

    async def ended(self) -> str:
        """Wait for the group's end, and return how `steps` ended."""
        try:
            await asyncio.wait_for(self._pump, 10)
        except EngineDied as died:
            return f"EngineDied rank={died.rank} {died} log={len(died.log_tail)}"
        return "closed"


def flat(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Sum up a request's outputs as JSON."""
    last = outputs[-1]
    chosen = [entry for o in outputs for entry in o.logprobs or ()]
    return {
        "tokens": [token for o in outputs for token in o.token_ids],
        "logprobs": [dataclasses.astuple(entry) for entry in chosen],
        "finish": last.finish,
        "stop_token_id": last.stop_token_id,
        "failure": last.failure,
        "message": last.failure_message,
        "outputs": len(outputs),
    }


def going_on(
    name: str, rank: int, case: Case, kept: list[RequestOutput], held: Held
) -> EngineRequest:
    """Return the request that decode goes on with, behind the tokens kept from prefill."""
    left = case.sampling.max_tokens - len(kept)
    return EngineRequest(
        engine_request_id=name,
        rank=rank,
        token_ids=[*case.token_ids, *(token for output in kept for token in output.token_ids)],
        sampling=dataclasses.replace(case.sampling, max_tokens=left),
        pull=Pull(
            handoff_id=name,
            remote_tokens=held.remote_tokens,
            connector_params=held.connector_params,
        ),
    )


class Pair:
    """A prefill and a decode group, used as the router and the workers will use them."""

    def __init__(self, prefill: Caller, decode: Caller) -> None:
        self.prefill, self.decode = prefill, decode
        self.blocks_handed_over = 0
        self.first_positions: list[int] = []
        self._count = 0

    async def generate(self, case: Case) -> dict[str, Any]:
        """Prefill on one group, decode on the other."""
        self._count += 1
        name, rank = f"{case.name}/{self._count}", self._count % 2
        hold = case.sampling.max_tokens > 1 or not first_token_is_kept(case.sampling)
        first = await self.prefill.run(
            EngineRequest(
                engine_request_id=name,
                rank=0,
                token_ids=case.token_ids,
                sampling=case.sampling,
                hold=hold,
            )
        )
        held = first[-1].held
        if held is None:
            return flat(first)
        kept = first if first_token_is_kept(case.sampling) else []
        self.blocks_handed_over += held.block_count
        rest = await self.decode.run(going_on(name, rank, case, kept, held))
        if rest[0].pulled is not None:
            self.first_positions.append(rest[0].pulled.first_position)
        return flat([*kept, *rest])


async def within(limit_s: float, true: Callable[[], Awaitable[bool]]) -> bool:
    """Ask until the answer is yes, at most `limit_s`."""
    give_up_at_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_at_s:
        if await true():
            return True
        await asyncio.sleep(0.05)
    return False


async def nothing_held(engine: VllmEngine) -> bool:
    """True if no rank uses a block or holds a lease."""
    counts = await engine.counters()
    return all(c.blocks_used == 0 and c.leases_live == 0 for c in counts)
