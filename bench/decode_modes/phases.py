"""What a rank does with its engine, phase by phase, and what it reports of each."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # reports are JSON

from bench.decode_modes.engine import LockStep
from bench.decode_modes.spec import TOKENS_KEPT, Spec
from bench.decode_modes.traffic import Walk, batch

VOTE_EVERY = 32
"""Iterations between two votes on whether the walk is over."""
DRAIN_VOTE_EVERY = 8
PROFILED = 5
PROFILE_WARM = 30

Report = Callable[[Mapping[str, Any]], None]
Keep = Callable[[str, Mapping[str, Sequence[int]]], None]


@dataclass
class Phases:
    """One rank's run of a row."""

    spec: Spec
    rank: int
    engine: LockStep
    report: Report
    keep: Keep
    """Takes a phase's name and the first tokens of each of its sequences."""

    def run(self) -> None:
        """Run every phase; what it cannot finish takes nothing from what came before."""
        spec = self.spec
        for size in spec.batches:
            self.keep(str(size), self._batch(str(size), size))
        if spec.ragged:
            self.keep("ragged", self._batch("ragged", spec.ragged[self.rank]))
        if spec.ragged_s:
            self.keep("walk", self._walk())
        if spec.profile:
            for size in spec.batches:
                self._profile(size)

    def _batch(self, phase: str, size: int) -> dict[str, list[int]]:
        """Decode a batch from its first token to its last, and time the middle of it."""
        engine, spec = self.engine, self.spec
        requests = batch(phase, self.rank, size, spec.tokens, spec.vocabulary)
        self._together(f"{phase}: {size} sequences")
        before = engine.ask("bench_steps")
        engine.add(requests)
        # One more iteration than tokens where a step's output comes with the next one.
        iterations = range(spec.tokens + 2)
        ends_s = [time.perf_counter() for _ in iterations if engine.step() == size]
        assert not engine.unfinished, f"{len(engine.unfinished)} of {size} did not finish"
        after = engine.ask("bench_steps")
        times_ms = intervals_ms(ends_s)[spec.warm : spec.warm + spec.timed]
        self.report(
            {
                "phase": phase,
                "sequences": size,
                **figures(times_ms),
                "tokens_per_s": size * 1000 / statistics.mean(times_ms),
                **steps_between(before, after),
            }
        )
        return self._take_tokens(phase)

    def _walk(self) -> dict[str, list[int]]:
        """Let the number of running sequences wander until time is up on rank 0, then end."""
        engine, spec = self.engine, self.spec
        running_max = max(spec.batches)
        walk = Walk(
            rank=self.rank, running_max=running_max, vocabulary=spec.vocabulary, seed=spec.seed
        )
        self._together("walk")
        before = engine.ask("bench_steps")
        begun_s, begun, ends_s, tokens = time.perf_counter(), engine.iterations, [], 0
        running: list[int] = []
        joined: list[bool] = []
        while True:
            joining = list(walk.joining(len(engine.unfinished)))
            engine.add(joining)
            joined.append(bool(joining))
            running.append(len(engine.unfinished))
            tokens += engine.step()
            ends_s.append(time.perf_counter())
            if (engine.iterations - begun) % VOTE_EVERY == 0:
                late = self.rank == 0 and ends_s[-1] - begun_s > spec.ragged_s
                if engine.any_rank(late):
                    break
        walked_s = ends_s[-1] - begun_s
        while engine.any_rank(bool(engine.unfinished)):
            for _ in range(DRAIN_VOTE_EVERY):
                engine.step()
        self.report(
            {
                "phase": "walk",
                "sequences": len(engine.tokens),
                "running_min": min(running),
                "running_mean": statistics.mean(running),
                "running_max": max(running),
                "walked_s": walked_s,
                **figures(intervals_ms(ends_s)),
                **quiet(intervals_ms(ends_s), joined),
                "tokens_per_s": tokens / walked_s,
                **steps_between(before, engine.ask("bench_steps")),
            }
        )
        return self._take_tokens("walk")

    def _profile(self, size: int) -> None:
        """Record a few steps of a full batch on rank 0."""
        engine, phase = self.engine, f"profile{size}"
        length = PROFILE_WARM + PROFILED + 4
        self._together(f"profile at {size}")
        engine.add(batch(phase, self.rank, size, length, self.spec.vocabulary))
        rows = None
        for at in range(length + 2):
            if self.rank == 0 and at == PROFILE_WARM:
                engine.ask("bench_profile_start")
            engine.step()
            if self.rank == 0 and at == PROFILE_WARM + PROFILED - 1:
                rows = engine.ask("bench_profile_stop")
        self._take_tokens(phase)
        self.report({"phase": phase, "sequences": size, "profiled": PROFILED, "kernels": rows})

    def until_stopped(self) -> None:
        """Decode the first batch over and over: one of the ranks will be stopped."""
        size = self.spec.batches[0]
        for turn in range(1_000_000):
            self._batch(f"wedge{turn}", size)

    def _together(self, words: str) -> None:
        """Begin a phase when every rank is there."""
        self.engine.any_rank(False)
        self.report({"begins": words})

    def _take_tokens(self, phase: str) -> dict[str, list[int]]:
        """First tokens of the phase's sequences; those of every phase are let go."""
        tokens = {name: all_[:TOKENS_KEPT] for name, all_ in self.engine.tokens.items()}
        assert all(name.startswith(phase) for name in tokens)
        self.engine.tokens.clear()
        return tokens


def intervals_ms(ends_s: Sequence[float]) -> list[float]:
    """Milliseconds between the ends of consecutive steps."""
    return [1000 * (b - a) for a, b in itertools.pairwise(ends_s)]


def figures(times_ms: Sequence[float]) -> dict[str, Any]:
    """Median, 99th percentile, slowest, and how many."""
    ordered = sorted(times_ms)
    return {
        "steps": len(ordered),
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max_ms": ordered[-1],
    }


QUIET_AFTER = 2
"""Iterations after a joining one that still wait for what it enqueued."""


def quiet(times_ms: Sequence[float], joined: Sequence[bool]) -> dict[str, Any]:
    """Median of the steps well after any request joined. `joined` begins one step before."""
    kept = [
        ms
        for at, ms in enumerate(times_ms, start=1)
        if not any(joined[max(0, at - QUIET_AFTER) : at + 1])
    ]
    return {"quiet_steps": len(kept), "quiet_median_ms": statistics.median(kept)} if kept else {}


def steps_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Steps by kind, and dummy ones, that the worker has counted in between."""
    was, now = before["steps_by_kind"], after["steps_by_kind"]
    kinds = {kind: count - was.get(kind, 0) for kind, count in now.items()}
    return {
        "steps_by_kind": {kind: count for kind, count in kinds.items() if count},
        "dummy_steps": after["dummy_steps"] - before["dummy_steps"],
    }
