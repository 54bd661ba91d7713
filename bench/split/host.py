"""One system from its start to its end, and the cells that it is measured in meanwhile.

    python -m bench.split.host JOB.json

It is a process of its own, so that a limit can end it with all that it has started. On stdout it
says what it does, a JSON object a line.
"""

import asyncio
import ctypes
import json
import resource
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON

import aiohttp
import msgspec
import psutil

from bench.split import figures
from bench.split.cells import Cell, Chosen, Store, wanted
from bench.split.measure import ClientFailed, Span, Target, ask, specs, steps
from bench.split.programs import SUBREAPER, Launch, Place, Processes, kill, launch
from bench.split.settings import Comparison, Load
from splitwave.core.errors import ServingError

SETTLE_S = 0.5
PROBE_S = 60.0
PROBE_TOKENS = 4


class SystemFailed(Exception):
    """The system does not come up, or is gone."""


class Job(msgspec.Struct, kw_only=True):
    """What a host is told."""

    workload: str
    folder: str
    """Of workloads."""
    system: str
    cells: list[str]
    out: str
    engine: str
    model_path: str
    model: str
    run_dir: str
    gpus: list[str]
    left_s: float
    """No cell is begun that would not fit into what is left of it."""
    facts: dict[str, Any]
    """What stands in every cell of the run."""


def say(**fields: object) -> None:
    """Tell whoever started this."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


@dataclass
class Host:
    """One system that is up."""

    comparison: Comparison
    job: Job
    launched: Launch
    processes: Processes
    store: Store
    until_s: float

    async def ready(self) -> None:
        """Return once every address has answered a request. Raises SystemFailed."""
        deadline_s = time.monotonic() + self.comparison.times.ready_s
        async with aiohttp.ClientSession() as http:
            for address in self.launched.addresses:
                why = "it was not asked"
                while (why := await self._probe(http, address)) != "":
                    self._check()
                    if time.monotonic() > deadline_s:
                        limit_s = self.comparison.times.ready_s
                        raise SystemFailed(f"{address} gave no tokens after {limit_s:g} s: {why}")
                    await asyncio.sleep(0.2)

    async def _probe(self, http: aiohttp.ClientSession, address: str) -> str:
        """Why it does not answer; empty if it does."""
        low = self.comparison.token_ids[0]
        body = {
            "model": self.job.model,
            "prompt": [low] * 8,
            "max_tokens": PROBE_TOKENS,
            "ignore_eos": True,
            "stream": True,  # All servers here stream; some do nothing else.
        }
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        url = f"http://{address}/v1/completions"
        try:
            async with http.post(url, json=body, timeout=timeout) as answer:
                text = await answer.text()
                served = answer.status == 200 and '"choices"' in text and '"error"' not in text
                return "" if served else f"status {answer.status}: {text[-300:]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    def _check(self) -> None:
        if (lost := self.processes.lost()) is not None:
            raise SystemFailed(lost)

    async def measure(self, cells: list[Cell]) -> None:
        """Measure what there is time for. Raises SystemFailed if the system is lost."""
        warmed = ""
        for cell in cells:
            times = self.comparison.times_of(cell.shape)
            if not self.store.is_pending(cell, again=True):  # By then a lower rate was too much.
                continue
            if time.monotonic() + times.cell_max_s > self.until_s:
                say(stopped="no time is left", cell=cell.name)
                return
            say(begun=cell.name)
            if warmed != cell.shape.name:
                await self._warm(cell)
                warmed = cell.shape.name
            await self._measure(cell)
            await asyncio.sleep(SETTLE_S)

    async def _warm(self, cell: Cell) -> None:
        """Requests of this shape that do not count: first steps compile and allocate."""
        streams = min(cell.shape.streams, default=8)
        span = Span(
            warm_s=0.1, until_s=1.0, end_s=1.0 + self.comparison.times_of(cell.shape).drain_s
        )
        load = Load(kind="closed", value=streams)
        target = self._target("warm")
        await ask(specs(self.comparison, cell.shape, load, span, target), target.folder)

    async def _measure(self, cell: Cell) -> None:
        times, target = self.comparison.times_of(cell.shape), self._target(cell.name)
        until_s = times.warm_s + times.measure_s + times.cool_s
        span = Span(warm_s=times.warm_s, until_s=until_s, end_s=until_s + times.drain_s)
        told = specs(self.comparison, cell.shape, cell.load, span, target)
        before, used_s = await self._steps(), self.processes.cpu_s()
        began_s = time.monotonic()
        seen = await ask(told, target.folder)
        took_s = time.monotonic() - began_s
        self._check()
        after = await self._steps()
        cores = {
            name: round((now_s - used_s[name]) / took_s, 3)
            for name, now_s in self.processes.cpu_s().items()
        }
        made = figures.of_cell(seen, cell.load, times, self.comparison.slo)
        kept = {
            "status": "done",
            "trace": told[0].trace().digest(),
            **made,
            "steps": {role: after[role].since(before[role]) for role in after},
            "cores_used": cores,
            "took_s": round(took_s, 1),
            **self.job.facts,
        }
        self.store.keep(cell, kept, figures.rows(seen, times))
        say(done=cell.name, good_share=made["good_share"], tokens_per_s=made["tokens_per_s"])
        shutil.rmtree(target.folder)

    async def _steps(self) -> dict[str, Any]:
        try:
            return await steps(self.launched.workers)
        except ServingError as error:
            self._check()
            raise SystemFailed(f"a worker does not describe itself: {error}") from error

    def _target(self, name: str) -> Target:
        folder = Path(self.job.run_dir) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Target(addresses=self.launched.addresses, model=self.job.model, folder=folder)


async def run(job: Job) -> int:
    """Start the system, measure, stop it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    until_s = time.monotonic() + job.left_s
    comparison = Comparison.read(job.workload, Path(job.folder))
    system = comparison.system(job.system)
    place = Place(
        engine=job.engine,
        model_path=Path(job.model_path),
        model=job.model,
        run_dir=Path(job.run_dir),
        gpus=tuple(job.gpus),
    )
    cells = [cell for cell in wanted(comparison, system, Chosen()) if cell.name in job.cells]
    launched = launch(comparison, system, place)
    processes = Processes(launched.programs, place.run_dir)
    store = Store(Path(job.out), comparison, job.engine)
    host = Host(comparison, job, launched, processes, store, until_s)
    began_s = time.monotonic()
    try:
        await host.ready()
        say(ready=system.name, boot_s=round(time.monotonic() - began_s, 1))
        await host.measure(cells)
    except (SystemFailed, ClientFailed, TimeoutError) as error:
        say(failed=f"{type(error).__name__}: {processes.lost() or error}")
        return 1
    except asyncio.CancelledError:
        say(failed="it was stopped")
        return 1
    finally:
        processes.stop()
        kill(psutil.Process().children(recursive=True))  # Orphans come to this process.
    return 0


def main(arguments: Mapping[str, Any] | None = None) -> int:
    """Host one system."""
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # A stream is a file.
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    told = arguments or json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return asyncio.run(run(msgspec.convert(told, Job)))


if __name__ == "__main__":
    sys.exit(main())
