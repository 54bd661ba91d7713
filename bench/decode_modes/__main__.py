"""Run rows and add them to the results file."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.decode_modes import environment_facts
from bench.decode_modes.models import COPY_TB_PER_S, SHAPES, Shape, kv_bytes, write
from bench.decode_modes.modes import MODES, DecodeMode, engine_arguments, overridden
from bench.decode_modes.result import brief, row_result, token_facts, tokens_of
from bench.decode_modes.rows import Results, Row, fits, seconds_needed, wanted
from bench.decode_modes.spec import BRANCH_GAIN, Spec
from bench.decode_modes.tokens import TokenFile
from bench.decode_modes.tree import started

MARGIN_S = 5.0
GPU_MODES = [name for name, mode in MODES.items() if mode.device == "gpu"]
GPU_MODELS = [name for name in SHAPES if not name.startswith("cpu_")]
CPU_WEDGE_S = 20
"""On the CPU nothing watches the collectives but their own timeout."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.decode_modes", description=__doc__)
    add = made.add_argument
    add("--out", type=Path, required=True, help="results file; tokens go beside it, as .tokens.zip")
    add("--modes", default=",".join(GPU_MODES), help=f"of {', '.join(MODES)}")
    add("--models", default=",".join(GPU_MODELS), help=f"of {', '.join(SHAPES)}")
    add("--only", default="", help="MODEL/MODE, comma between: run these rows alone")
    add("--again", action="store_true", help="run finished rows too")
    add("--budget-s", type=float, help="start no row that does not fit into what is left of it")
    add("--row-limit-s", type=float, default=400.0, help="kill a row after this")
    add("--batches", default="64,128,256", help="sequences a rank")
    add("--warm", type=int, default=20, help="steps of a batch before those that are timed")
    add("--timed", type=int, default=200, help="timed steps of a batch")
    add("--ragged", default="64,47", help="sequences of each rank in the ragged batch; empty: none")
    add("--ragged-s", type=float, default=20.0, help="seconds of the random walk; 0: none")
    add("--capture-sizes", default="", help="in place of the sizes chosen from the batches")
    add("--override", action="append", default=[], help="MODE:ARGUMENT=JSON or MODE:env:NAME=VALUE")
    add("--tb-per-s", type=float, default=COPY_TB_PER_S, help="memory bandwidth for the floor")
    add("--seed", type=int, default=1)
    add("--branch-gain", type=float, default=1.0, help="scale what each layer adds; see the docs")
    add("--profile", action="store_true", help="record the kernels of 5 steps a batch on rank 0")
    add("--wedge", action="store_true", help="stop one rank and see what the other reports")
    add("--wedge-bound-s", type=float, default=60.0, help="the other rank must end within this")
    add("--work-dir", type=Path, help="logs, model folders and kernel caches; kept")
    return made


@dataclass
class Run:
    """One call of the command."""

    asked: argparse.Namespace
    work_dir: Path
    results: Results
    tokens: TokenFile
    modes: dict[str, DecodeMode]
    began_s: float

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.began_s:7.1f} s] {text}", flush=True)

    def left_s(self) -> float | None:
        """What is left of the budget; None without one."""
        if self.asked.budget_s is None:
            return None
        spent_s = time.monotonic() - self.began_s
        return float(self.asked.budget_s) - spent_s - MARGIN_S

    def all(self) -> bool:
        """Run the rows that are wanted; True if each has now run to its end."""
        asked = self.asked
        rows = wanted(_split(asked.models), _split(asked.modes), _split(asked.only), kind(asked))
        whole = True
        for row in rows:
            if self.results.is_done(row) and not asked.again:
                self.say(f"{row.name}: finished before")
                continue
            needed_s, left_s = seconds_needed(row, asked.ragged_s, self.results.rows), self.left_s()
            if not fits(needed_s, left_s):
                self.say(f"{row.name}: needs about {needed_s:.0f} s, {left_s:.0f} s are left")
                whole = False
                continue
            self.say(f"{row.name}: starts")
            self.one(row)
            whole = whole and self.results.is_done(row)
        return whole

    def one(self, row: Row) -> None:
        """Run one row and keep its result."""
        mode, shape = self.modes[row.mode], SHAPES[row.model]
        spec = self.spec(row, mode, shape)
        left_s = self.left_s()
        limit_s = self.asked.row_limit_s if left_s is None else min(self.asked.row_limit_s, left_s)
        shutil.rmtree(spec.out_dir, ignore_errors=True)
        caches = self.work_dir / "caches"
        env = dict(mode.env) | {BRANCH_GAIN: str(self.asked.branch_gain)}
        with started(spec, env, caches) as tree:
            if spec.wedge:
                outcome = tree.wait_wedged(limit_s, self.asked.wedge_bound_s, self.say)
            else:
                outcome = tree.wait(limit_s, self.say)
        result = row_result(spec, mode, shape, outcome, self.asked.tb_per_s)
        result |= {
            "model": row.model,
            "mode": row.mode,
            "ended": time.strftime("%F %T UTC", time.gmtime()),
        }
        ours = tokens_of(Path(spec.out_dir))
        if ours and row.kind != "wedge":
            self.tokens.add(row.name, ours)
            result |= token_facts(
                row.mode, ours, lambda mode: self.tokens.read(Row(row.model, mode, row.kind).name)
            )
        self.results.add(row, result)
        self.say(f"{row.name}: {brief(result)}")

    def spec(self, row: Row, mode: DecodeMode, shape: Shape) -> Spec:
        """What the row's ranks are told."""
        asked = self.asked
        batches = [int(size) for size in _split(asked.batches)]
        sizes = [int(size) for size in _split(asked.capture_sizes)]
        ragged = [int(size) for size in _split(asked.ragged)]
        arguments = engine_arguments(mode, batches, sizes)
        if asked.wedge and mode.device == "cpu":
            arguments |= {"distributed_timeout_seconds": CPU_WEDGE_S}
        return Spec(
            row=row.name, model_dir=str(write(shape, self.work_dir / "models")),
            arguments=arguments, dtype=shape.dtype, vocabulary=shape.vocabulary,
            kv_token_bytes=kv_bytes(shape, batch=1, length_tokens=1),
            out_dir=str(self.work_dir / "rows" / row.name.replace("/", ".")), batches=batches,
            warm=asked.warm, timed=asked.timed, ragged=ragged, ragged_s=asked.ragged_s,
            seed=asked.seed, profile=asked.profile, wedge=asked.wedge,
        )  # fmt: skip


def kind(asked: argparse.Namespace) -> str:
    """The kind of row that was asked for."""
    if asked.wedge:
        return "wedge"
    if asked.branch_gain != 1.0:
        return f"gain{asked.branch_gain:g}"
    return "profile" if asked.profile else "steps"


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(arguments: Sequence[str]) -> int:
    """Run; 0 if every row that was asked for is now finished, 1 otherwise."""
    asked = parser().parse_args(arguments)
    unknown = set(_split(asked.models)) - SHAPES.keys() | set(_split(asked.modes)) - MODES.keys()
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    work_dir = (asked.work_dir or Path(tempfile.mkdtemp(prefix="decode_modes_"))).resolve()
    results = Results(asked.out)
    results.data.setdefault("runs", []).append(environment_facts.collect(arguments))
    run = Run(
        asked, work_dir, results, TokenFile(asked.out.with_suffix(".tokens.zip")),
        overridden(MODES, asked.override), time.monotonic(),
    )  # fmt: skip
    run.say(f"logs are in {work_dir}")
    return 0 if run.all() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
