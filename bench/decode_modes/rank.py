"""One rank's process of a row: builds its engine, runs the phases, reports as JSON lines."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar  # reports are JSON

from bench.decode_modes.spec import Spec, load
from bench.decode_modes.turn import wait_for_turn

BEGAN_S = time.time()


class Reports:
    """A file with one JSON object a line; whoever started this process reads along."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, report: Mapping[str, Any]) -> None:
        """Add one, with the seconds since the process began."""
        line = dict(report) | {"at_s": round(time.time() - BEGAN_S, 3)}
        print(json.dumps(line), file=self._file, flush=True)


class Kept:
    """A file with the tokens of the phases that have ended, whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._phases: dict[str, Mapping[str, Sequence[int]]] = {}

    def __call__(self, phase: str, tokens: Mapping[str, Sequence[int]]) -> None:
        """Add a phase."""
        self._phases[phase] = tokens
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._phases), encoding="utf-8")
        part.replace(self._path)


def work(spec: Spec, rank: int, report: Reports) -> None:
    """Build the engine and run the row."""
    from bench.decode_modes.engine import LockStep, arguments
    from bench.decode_modes.phases import Phases

    report({"begins": "engine"})
    engine = LockStep(arguments(spec), rank)
    compilation = engine.config.compilation_config
    report(
        {
            "booted": True,
            "memory_gb": engine.ask("bench_memory"),
            "v2_runner": bool(getattr(engine.config, "use_v2_model_runner", False)),
            "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
            "capture_sizes": list(compilation.cudagraph_capture_sizes or []),
            "blocks": engine.config.cache_config.num_gpu_blocks,
        }
    )
    wait_for_turn(rank, spec.row)
    engine.any_rank(False)  # The other rank waits here for the first's turn.
    phases = Phases(spec, rank, engine, report, Kept(Path(spec.out_dir) / f"tokens{rank}.json"))
    if spec.wedge:
        phases.until_stopped()
    phases.run()
    report({"done": True, "memory_gb": engine.ask("bench_memory")})
    engine.any_rank(False)  # No rank ends while another still needs it.


class HasFolder(Protocol):
    """A row's specification: where its ranks report."""

    @property
    def out_dir(self) -> str:
        """That folder."""


S = TypeVar("S", bound=HasFolder)


def run(load_spec: Callable[[Path], S], work_of: Callable[[S, int, Reports], None]) -> NoReturn:
    """Run one rank. Ends at once: libraries that hang while they are torn down are no finding."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    asked = parser.parse_args()
    spec = load_spec(asked.spec)
    report = Reports(Path(spec.out_dir) / f"rank{asked.rank}.jsonl")
    code = 0
    try:
        work_of(spec, asked.rank, report)
    except BaseException as error:  # noqa: BLE001  # whatever it was is the row's result
        traceback.print_exc()
        report({"failed": f"{type(error).__name__}: {error}"[:2000]})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(load, work)
