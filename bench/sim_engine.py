"""CPU time of the simulator, per token and request, as JSON on stdout.

    python -m bench.sim_engine > bench/results/sim_engine.json

What the simulator costs is what a test or a load run of the services cannot
measure, so it has to stay small beside them. `rank` cases step one rank without a
loop; `engine` cases run groups on a loop with steps of 5 ms, reader included;
`split` is whole requests over a prefill and a decode group.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable

import uvloop

from bench.provenance import provenance
from splitwave.core.generation import Sampling
from splitwave.engine.port import Engine, EngineRequest, Held, Pull, RequestOutput, Role
from splitwave.engine.sim import SimFabric, SimSettings, start_sim_group
from splitwave.engine.sim.rank import SimRank

ROUNDS = 5
PROMPT = [65] * 100
STEP_S = 0.005
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def settings(role: Role, *, ranks: int = 1, seats: int = 64, step_s: float = STEP_S) -> SimSettings:
    """A group that never runs out of blocks."""
    return SimSettings(
        role=role,
        group_id=role,
        ranks=ranks,
        seats_per_rank=seats,
        blocks_per_rank=seats * 256,
        batch_max_tokens=max(2048, seats),
        step_fixed_s=step_s,
        pull_fixed_s=step_s,
    )


def request(name: str, tokens: int, *, rank: int = 0, logprobs: int | None = None) -> EngineRequest:
    """One request that is not handed over."""
    sampling = Sampling(max_tokens=tokens, logprobs=logprobs)
    return EngineRequest(engine_request_id=name, rank=rank, token_ids=PROMPT, sampling=sampling)


def rank_us_per_step(seats: int, *, logprobs: int | None = None) -> float:
    """Best CPU microseconds of one rank's step in which every seat makes a token."""
    best_s, steps = float("inf"), 200
    for _ in range(ROUNDS):
        rank = SimRank(settings(Role.PREFILL, seats=seats), 0, lambda _offer, _now_s: True)
        for i in range(seats):
            rank.submit(request(f"r{i}", 2_000, logprobs=logprobs), 0.0)
        step = rank.begin(0.0)
        while step.generating < seats:
            rank.finish(step, 0.0)
            step = rank.begin(0.0)
        started_s = time.process_time()
        for _ in range(steps):
            rank.finish(step, 0.0)
            step = rank.begin(0.0)
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / steps * 1e6


async def read(engine: Engine, ends: int) -> dict[str, RequestOutput]:
    """Read until so many requests have ended; their last outputs by id."""
    last: dict[str, RequestOutput] = {}
    async for batches in engine.steps():
        for batch in batches:
            for output in batch.outputs:
                if output.failure is not None:
                    raise RuntimeError(output.failure_message)
                if output.finish is not None:
                    last[output.engine_request_id] = output
        if len(last) == ends:
            break
    return last


async def generate(ranks: int, tokens: int) -> float:
    """CPU microseconds a token of a group whose 64 seats a rank are full."""
    engine = await start_sim_group(settings(Role.PREFILL, ranks=ranks))
    requests = [request(f"r{i}", tokens, rank=i % ranks) for i in range(64 * ranks)]
    started_s = time.process_time()
    await engine.submit(requests)
    await read(engine, len(requests))
    used_s = time.process_time() - started_s
    await engine.close()
    return used_s / (len(requests) * tokens) * 1e6


async def split(count: int, tokens: int) -> float:
    """CPU microseconds a request of 100 prompt tokens, prefilled, pulled and decoded."""
    fabric = SimFabric()
    prefill = await start_sim_group(settings(Role.PREFILL, step_s=0.001), fabric)
    decode = await start_sim_group(settings(Role.DECODE, step_s=0.001), fabric)
    started_s = time.process_time()
    for start in range(0, count, 64):
        names = [f"r{i}" for i in range(start, min(start + 64, count))]
        await prefill.submit([_prefilled(name) for name in names])
        held = await read(prefill, len(names))
        await decode.submit([_decoded(name, held[name].held, tokens) for name in names])
        await read(decode, len(names))
    used_s = time.process_time() - started_s
    await prefill.close()
    await decode.close()
    return used_s / count * 1e6


def _prefilled(name: str) -> EngineRequest:
    return EngineRequest(
        engine_request_id=name,
        rank=0,
        token_ids=PROMPT,
        sampling=Sampling(max_tokens=1),
        hold=True,
    )


def _decoded(name: str, held: Held | None, tokens: int) -> EngineRequest:
    if held is None:
        raise RuntimeError(f"{name} holds nothing")
    pull = Pull(
        handoff_id=name,
        remote_tokens=held.remote_tokens,
        connector_params=held.connector_params,
    )
    return EngineRequest(
        engine_request_id=name,
        rank=0,
        token_ids=PROMPT,
        sampling=Sampling(max_tokens=tokens),
        pull=pull,
    )


def on_loop(loop: str, ranks: int) -> float:
    """Best of the rounds on one kind of loop."""
    best = float("inf")
    for _ in range(ROUNDS):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            best = min(best, runner.run(generate(ranks, 100)))
    return best


def main() -> int:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        split_us = runner.run(split(2_000, 20))
    report = {
        **provenance(
            "python -m bench.sim_engine",
            paths=["splitwave/engine/sim", "bench/sim_engine.py"],
            packages=["uvloop"],
        ),
        "rounds": ROUNDS,
        "rank_cpu_us_per_step": {
            "64_seats": round(rank_us_per_step(64), 1),
            "512_seats": round(rank_us_per_step(512), 1),
            "64_seats_5_logprobs": round(rank_us_per_step(64, logprobs=5), 1),
        },
        "engine_cpu_us_per_token": {
            f"{loop}_{ranks}_ranks": round(on_loop(loop, ranks), 2)
            for loop in LOOPS
            for ranks in (1, 8)
        },
        "split_cpu_us_per_request_of_20_tokens": round(split_us, 1),
    }
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
