"""Run rows and add them to the results file."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.decode_modes import environment_facts
from bench.decode_modes.models import SHAPES, kv_bytes, write
from bench.decode_modes.rows import Results
from bench.decode_modes.tree import started
from bench.prefill_modes.rows import equal_share, first_tokens, judged, rates_of
from bench.prefill_modes.spec import PrefillSpec
from bench.prefill_modes.variants import Variant, ratio_to_whole, variants

MODULE = "bench.prefill_modes.rank"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.prefill_modes", description=__doc__)
    add = made.add_argument
    add("--out", type=Path, required=True, help="results file")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--models", default="qwen3_30b_24l", help=f"of {', '.join(SHAPES)}")
    add("--sms", default="8,12,16,20", help="SMs for dispatch and combine, a row each")
    add("--threshold", type=int, help="tokens from which steps are split; empty: the mode's")
    add("--lengths", default="256,512,1024,2048,4096,8192", help="tokens of a prompt")
    add("--step-max-tokens", type=int, default=8192)
    add("--warm", type=int, default=3)
    add("--timed", type=int, default=10)
    add("--only", default="", help="names of rows, comma between: whole, dbo_sms20 and so on")
    add("--row-limit-s", type=float, default=240.0, help="kill a row after this")
    add("--budget-s", type=float, help="start no row after this")
    add("--memory-share", type=float, help="gpu_memory_utilization; empty: vLLM's")
    add("--again", action="store_true", help="run finished rows too")
    add("--seed", type=int, default=1)
    add("--work-dir", type=Path, help="logs, model folders and kernel caches; kept")
    return made


class Run:
    """One call of the command."""

    def __init__(self, asked: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.asked, self.began_s = asked, time.monotonic()
        work_dir = asked.work_dir or Path(tempfile.mkdtemp(prefix="prefill_modes_"))
        self.work_dir = work_dir.resolve()
        self.results = Results(asked.out)
        self.results.data.setdefault("runs", []).append(
            environment_facts.collect(arguments, "bench.prefill_modes")
        )

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.began_s:7.1f} s] {text}", flush=True)

    def all(self) -> bool:
        """Run the rows that are wanted; True if each has now run to its end, as was due."""
        asked = self.asked
        wanted = variants(asked.device, [int(x) for x in _split(asked.sms)], asked.threshold)
        only, well = _split(asked.only), True
        for model in _split(asked.models):
            for variant in wanted:
                name = f"{model}/{variant.name}"
                if only and variant.name not in only:
                    continue
                if self._status(name) == "done" and not asked.again:
                    self.say(f"{name}: finished before")
                    continue
                if asked.budget_s and time.monotonic() - self.began_s > asked.budget_s:
                    self.say(f"{name}: no time is left")
                else:
                    self._one(model, variant, name)
                well = well and self._status(name) == "done"
            self._compare(model)
        return well

    def _compare(self, model: str) -> None:
        rates = rates_of(self.results.rows, model)
        self.results.data.setdefault("ratio_to_whole", {})[model] = ratio_to_whole(rates)
        self.results.save()

    def _status(self, name: str) -> str | None:
        found = self.results.rows.get(name)
        return None if found is None else str(found["status"])

    def _one(self, model: str, variant: Variant, name: str) -> None:
        spec = self._spec(model, variant, name)
        shutil.rmtree(spec.out_dir, ignore_errors=True)
        self.say(f"{name}: starts")
        with started(spec, variant.env, self.work_dir / "caches" / variant.name, MODULE) as tree:  # type: ignore[arg-type]  # what both specs have
            outcome = tree.wait(self.asked.row_limit_s, self.say)
        result = judged(variant, outcome)
        if not all(phase["as_due"] for phase in result["phases"].values()):
            result["status"] = "wrong kinds"
        whole = self.work_dir / "rows" / f"{model}.whole"
        tokens = first_tokens(Path(spec.out_dir))
        result["first_tokens_equal_to_whole"] = equal_share(tokens, first_tokens(whole))
        result["ended"] = time.strftime("%F %T UTC", time.gmtime())
        self.results.rows[name] = result
        self.results.save()
        self.say(f"{name}: {result['status']}")

    def _spec(self, model: str, variant: Variant, name: str) -> PrefillSpec:
        asked, shape = self.asked, SHAPES[model]
        arguments = variant.arguments
        if asked.memory_share is not None:
            arguments["gpu_memory_utilization"] = asked.memory_share
        return PrefillSpec(
            row=name, model_dir=str(write(shape, self.work_dir / "models")), arguments=arguments,
            dtype=shape.dtype, vocabulary=shape.vocabulary,
            kv_token_bytes=kv_bytes(shape, batch=1, length_tokens=1),
            out_dir=str(self.work_dir / "rows" / name.replace("/", ".")),
            lengths=[int(x) for x in _split(asked.lengths)],
            step_max_tokens=asked.step_max_tokens, warm=asked.warm, timed=asked.timed,
            seed=asked.seed,
        )  # fmt: skip


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(arguments: Sequence[str]) -> int:
    """Run; 0 if every row that was asked for is now finished as was due, 1 otherwise."""
    asked = parser().parse_args(arguments)
    if unknown := set(_split(asked.models)) - SHAPES.keys():
        print(f"unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    run = Run(asked, arguments)
    run.say(f"logs are in {run.work_dir}")
    return 0 if run.all() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
