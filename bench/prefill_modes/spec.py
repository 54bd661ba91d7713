"""What one row's rank processes are told, as a JSON file."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.decode_modes.spec import RowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec(RowSpec):
    """One row: how to build its engines and what prompts they get."""

    lengths: list[int]
    """Tokens of a prompt."""
    step_max_tokens: int
    """Prompt tokens of one step on each rank."""
    warm: int
    timed: int
    wedge: bool = False


def load(path: Path) -> PrefillSpec:
    """Read what `save` wrote."""
    return PrefillSpec(**json.loads(path.read_text(encoding="utf-8")))


def phases(lengths: list[int], step_max_tokens: int) -> list[tuple[str, int, int]]:
    """(name, tokens of a prompt, prompts a rank and step).

    One prompt a rank, which two microbatches share; and as many as a step holds.
    """
    found = []
    for length in lengths:
        found.append((f"{length} one", length, 1))
        if (many := step_max_tokens // length) > 1:
            found.append((f"{length} full", length, many))
    return found
