"""What a row's processes have reported, as a result."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # results are JSON

from bench.decode_modes.traffic import RANKS
from bench.decode_modes.tree import Outcome
from bench.prefill_modes.variants import Variant


def judged(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    """A row's result: rates of both ranks together, and whether steps were of their kind."""
    phases = [report for report in outcome.reports[0] if "phase" in report]
    others = {r["phase"]: r for ranks in outcome.reports[1:] for r in ranks if "phase" in r}
    result: dict[str, Any] = {
        "status": outcome.status,
        "wall_s": outcome.wall_s,
        "mode": variant.mode.name,
        "comm_sms": variant.comm_sms,
        "v2_runner": outcome.first(0, "v2_runner"),
        "phases": {},
    }
    for one in phases:
        due = variant.kind_of(one["prompts"] * one["prompt_tokens"])
        # A step's outputs may come with a step after it, in which nothing runs but dummies.
        wrong = {k: n for k, n in one["steps_by_kind"].items() if k not in (due, "eager")}
        other = others.get(one["phase"])
        slower_ms = max(one["median_ms"], other["median_ms"]) if other else one["median_ms"]
        result["phases"][one["phase"]] = {
            "prompts": one["prompts"],
            "prompt_tokens": one["prompt_tokens"],
            "median_ms": slower_ms,
            "p99_ms": one["p99_ms"],
            "tokens_per_s": RANKS * one["prompts"] * one["prompt_tokens"] * 1000 / slower_ms,
            "kind_due": due,
            "steps_by_kind": one["steps_by_kind"],
            "dummy_steps": one["dummy_steps"],
            "as_due": not wrong and one["steps_by_kind"].get(due, 0) >= one["steps"],
        }
    if outcome.status != "done":
        failed = [r["failed"] for ranks in outcome.reports for r in ranks if "failed" in r]
        result |= {"why": failed[:1] or [outcome.status], "log_tails": outcome.log_tails}
    return result


def first_tokens(out_dir: Path) -> dict[str, list[int]]:
    """Of every prompt of a row, by its name."""
    found: dict[str, list[int]] = {}
    for path in sorted(out_dir.glob("tokens*.json")):
        for phase in json.loads(path.read_text(encoding="utf-8")).values():
            found |= phase
    return found


def equal_share(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    """Share of the prompts of both rows with equal first tokens; None if there are none."""
    names = ours.keys() & theirs.keys()
    return sum(ours[name] == theirs[name] for name in names) / len(names) if names else None


def rates_of(rows: Mapping[str, Any], model: str) -> dict[str, dict[str, float]]:
    """Tokens/s of a model's rows, by row and phase."""
    return {
        name.partition("/")[2]: {
            phase: float(told["tokens_per_s"]) for phase, told in row["phases"].items()
        }
        for name, row in rows.items()
        if name.startswith(f"{model}/") and "phases" in row
    }
