"""One rank's process of a row: builds its engine, prefills, reports as JSON lines."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any  # reports are JSON

from bench.decode_modes.engine import BLOCK_STEP_TOKENS, KV_BYTES_MORE, LockStep, row_arguments
from bench.decode_modes.phases import figures, steps_between
from bench.decode_modes.rank import Kept, run
from bench.decode_modes.traffic import FIRST_ID, RANKS, Request
from bench.decode_modes.turn import wait_for_turn
from bench.prefill_modes.spec import PrefillSpec, load, phases

SEATS_MAX = 64


def arguments(spec: PrefillSpec) -> dict[str, Any]:
    """vLLM's engine arguments of a row."""
    longest = max(spec.lengths) + BLOCK_STEP_TOKENS
    kv_tokens = 2 * (spec.step_max_tokens + SEATS_MAX * BLOCK_STEP_TOKENS + longest)
    own = {
        "max_num_seqs": SEATS_MAX,
        "max_num_batched_tokens": spec.step_max_tokens,
        "max_model_len": longest + -longest % BLOCK_STEP_TOKENS,
        "kv_cache_memory_bytes": kv_tokens * spec.kv_token_bytes + KV_BYTES_MORE,
    }
    return row_arguments(spec) | own | spec.arguments


class Prefills:
    """One rank's run of a row."""

    def __init__(
        self,
        spec: PrefillSpec,
        rank: int,
        engine: LockStep,
        report: Callable[..., None],
        keep: Kept,
    ) -> None:
        self._spec, self._rank, self._engine = spec, rank, engine
        self._report, self._keep = report, keep

    def run(self) -> None:
        """Every phase, each with its own prompts."""
        for name, length, count in phases(self._spec.lengths, self._spec.step_max_tokens):
            self._phase(name, length, count)

    def _phase(self, name: str, length: int, count: int) -> None:
        engine, spec = self._engine, self._spec
        self._report({"begins": f"{name}: {count} prompts of {length}"})
        times_ms, before = [], engine.ask("bench_steps")
        for turn in range(spec.warm + spec.timed):
            if turn == spec.warm:
                before = engine.ask("bench_steps")
            times_ms.append(self._step([self._prompt(name, length, turn, n) for n in range(count)]))
        times_ms = times_ms[spec.warm :]
        self._report(
            {
                "phase": name,
                "prompts": count,
                "prompt_tokens": length,
                **figures(times_ms),
                "tokens_per_s": count * length * 1000 / statistics.median(times_ms),
                **steps_between(before, engine.ask("bench_steps")),
            }
        )
        self._keep(name, dict(engine.tokens))
        engine.tokens.clear()

    def _step(self, requests: list[Request]) -> float:
        """Milliseconds until this rank has the first token of each of its prompts."""
        engine = self._engine
        engine.any_rank(False)
        began_s = time.perf_counter()
        engine.add(requests)
        while engine.any_rank(bool(engine.unfinished)):
            engine.step()
        return (engine.answered_s - began_s) * 1e3

    def _prompt(self, phase: str, length: int, turn: int, number: int) -> Request:
        """The same in every row, another on each rank and in each turn."""
        name = f"{phase}/{turn}/{self._rank}/{number}"
        draw = random.Random(f"{self._spec.seed}/{name}")  # reproducible, not secret
        ids = tuple(draw.choices(range(FIRST_ID, self._spec.vocabulary), k=length))
        return Request(name, ids, 1)


def work(spec: PrefillSpec, rank: int, report: Callable[[Mapping[str, Any]], None]) -> None:
    """Build the engine and run the row."""
    assert 0 <= rank < RANKS
    report({"begins": "engine"})
    engine = LockStep(arguments(spec), rank)
    compilation = engine.config.compilation_config
    report(
        {
            "booted": True,
            "memory_gb": engine.ask("bench_memory"),
            "v2_runner": bool(getattr(engine.config, "use_v2_model_runner", False)),
            "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
            "comm_sms": os.environ.get("VLLM_DBO_COMM_SMS"),
        }
    )
    wait_for_turn(rank, spec.row)
    engine.any_rank(False)  # The other rank waits here for the first's turn.
    Prefills(spec, rank, engine, report, Kept(Path(spec.out_dir) / f"tokens{rank}.json")).run()
    report({"done": True, "memory_gb": engine.ask("bench_memory")})
    engine.any_rank(False)  # No rank ends while another still needs it.


if __name__ == "__main__":
    run(load, work)
