"""From what a row's ranks reported to the row in the results."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any  # results are JSON

from bench.decode_modes.models import Shape, floor, kv_bytes
from bench.decode_modes.modes import DecodeMode
from bench.decode_modes.rows import peer, reference
from bench.decode_modes.spec import Spec
from bench.decode_modes.tokens import compare, digest_all
from bench.decode_modes.traffic import PROMPT_TOKENS, RANKS
from bench.decode_modes.tree import Outcome

PhaseTokens = dict[str, dict[str, list[int]]]


def tokens_of(out_dir: Path) -> PhaseTokens:
    """First tokens of all ranks' sequences, by phase, of those that every rank came through."""
    paths = [out_dir / f"tokens{rank}.json" for rank in range(RANKS)]
    if not all(path.exists() for path in paths):
        return {}
    ranks: list[PhaseTokens] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    through = [phase for phase in ranks[0] if all(phase in one for one in ranks)]
    return {phase: dict(pair for one in ranks for pair in one[phase].items()) for phase in through}


def row_result(
    spec: Spec, mode: DecodeMode, shape: Shape, outcome: Outcome, tb_per_s: float
) -> dict[str, Any]:
    """All of a row but how its tokens compare."""
    booted = [outcome.first(rank, "booted") for rank in range(RANKS)]
    done = [outcome.first(rank, "done") for rank in range(RANKS)]
    phases = [_phases(outcome, rank) for rank in range(RANKS)]
    both = [name for name in phases[0] if name in phases[1]]
    result: dict[str, Any] = {
        "status": outcome.status,
        "wall_s": outcome.wall_s,
        "exit_codes": outcome.exit_codes,
        "boot_s": max(one["at_s"] for one in booted) if all(booted) else None,
        "boot": booted[0],
        "memory_gb": [one and one["memory_gb"] for one in done],
        "arguments": spec.arguments,
        "env": dict(mode.env),
        "phases": {
            name: _phase(spec, shape, [ranks[name] for ranks in phases], tb_per_s) for name in both
        },
        "steps_of_another_kind": _others(mode, phases),
        "failures": [
            one["failed"] for ranks in outcome.reports for one in ranks if "failed" in one
        ],
    }
    if outcome.log_tails:
        result["log_tails"] = outcome.log_tails
    if outcome.stopped is not None:
        result["stopped"] = outcome.stopped
    if profiles := [report for report in outcome.reports[0] if "kernels" in report]:
        result["profiles"] = {report["phase"]: report for report in profiles}
    return result


def _phases(outcome: Outcome, rank: int) -> dict[str, dict[str, Any]]:
    reports = outcome.reports[rank]
    return {r["phase"]: r for r in reports if "phase" in r and "kernels" not in r}


def _others(mode: DecodeMode, phases: list[dict[str, dict[str, Any]]]) -> int:
    """Steps of all ranks that the mode does not name, over all phases."""
    counts = [p["steps_by_kind"] for ranks in phases for p in ranks.values()]
    return sum(n for kinds in counts for kind, n in kinds.items() if kind not in mode.kinds)


def _phase(
    spec: Spec, shape: Shape, ranks: list[dict[str, Any]], tb_per_s: float
) -> dict[str, Any]:
    """One phase: times of the slower rank, and both ranks' records."""
    slower = max(ranks, key=lambda one: float(one["median_ms"]))
    result: dict[str, Any] = {
        name: slower[name] for name in ("steps", "median_ms", "p99_ms", "max_ms")
    }
    result["tokens_per_s"] = sum(float(one["tokens_per_s"]) for one in ranks)
    result["ranks"] = ranks
    if ranks[0]["phase"].isdigit():
        size = int(ranks[0]["sequences"])
        least = floor(shape, batch=size, ranks=RANKS, tb_per_s=tb_per_s)
        length = PROMPT_TOKENS + spec.warm + spec.timed // 2
        result["floor"] = {
            "ms": least.floor_ms,
            "weight_gb": least.total_bytes / 1e9,
            "attention_gb": least.attention_bytes / 1e9,
            "experts_gb": least.expert_bytes / 1e9,
            "dense_gb": least.dense_bytes / 1e9,
            "head_gb": least.head_bytes / 1e9,
            "experts_hit": least.experts_hit,
            "kv_gb": kv_bytes(shape, batch=size, length_tokens=length) / 1e9,
            "tb_per_s": tb_per_s,
        }
        result["times_floor"] = float(slower["median_ms"]) / least.floor_ms
    return result


def compared(ours: PhaseTokens, eager: PhaseTokens) -> dict[str, Any]:
    """How each phase's tokens compare with the eager row's."""
    return {
        phase: compare(tokens, eager[phase]).report() | {"digest": digest_all(tokens)}
        for phase, tokens in ours.items()
        if phase in eager
    }


def across_batches(ours: PhaseTokens) -> dict[str, Any] | None:
    """How the same sequences compare in the smallest and the largest batch of one row.

    Kernels round otherwise in another batch, so this is how far tokens part for rounding alone.
    """
    sizes = sorted((phase for phase in ours if phase.isdigit()), key=int)
    if len(sizes) < 2:
        return None
    small, large = ({_place(name): ids for name, ids in ours[at].items()} for at in _ends(sizes))
    return {"batches": [int(size) for size in _ends(sizes)]} | compare(small, large).report()


def _ends(sizes: list[str]) -> tuple[str, str]:
    return sizes[0], sizes[-1]


def _place(name: str) -> str:
    return name.partition("/")[2]


def token_facts(
    mode: str, ours: PhaseTokens, tokens_of_mode: Callable[[str], PhaseTokens]
) -> dict[str, Any]:
    """How a row's tokens compare: with the eager row, another graph row, and each other."""
    facts: dict[str, Any] = {"across_batches": across_batches(ours)}
    if mode != reference(mode):
        facts["equality"] = compared(ours, tokens_of_mode(reference(mode)))
    if (other := peer(mode)) is not None:
        facts["equality_to_peer"] = compared(ours, tokens_of_mode(other))
    return facts


def brief(row: Mapping[str, Any]) -> str:
    """The row in one line."""
    phases = ", ".join(f"{name} {p['median_ms']:.2f} ms" for name, p in row["phases"].items())
    equal = ", ".join(f"{name} {e['fraction']:.1%}" for name, e in row.get("equality", {}).items())
    return (
        f"{row['status']} after {row['wall_s']} s; {phases or 'no phase'};"
        f" steps of another kind {row['steps_of_another_kind']}; equal {equal or 'not compared'}"
    )
