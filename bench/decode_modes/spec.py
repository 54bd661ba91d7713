"""What one row's rank processes are told, as a JSON file."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

BRANCH_GAIN = "SPLITWAVE_BENCH_BRANCH_GAIN"
"""Variable with what each layer's outputs are scaled by; 1 if it is not set."""
TOKENS_KEPT = 32
"""Tokens of each sequence that are compared."""
PHASES_MORE = 16
"""Tokens beyond the timed ones, so that a batch stays whole until its stretch is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """How to build a row's engines, whatever they are measured at."""

    row: str
    model_dir: str
    arguments: dict[str, object]
    """Engine arguments that depend on the mode."""
    dtype: str
    vocabulary: int
    kv_token_bytes: int
    """Bytes of KV cache a token, all layers."""
    out_dir: str
    seed: int = 1

    def save(self, path: Path) -> None:
        """Write it."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(RowSpec):
    """One row: how to build its engines and what to decode with them."""

    batches: list[int]
    warm: int
    timed: int
    ragged: list[int]
    """Sequences of each rank in the ragged batch; empty: none."""
    ragged_s: float
    """Seconds of the random walk; 0: none."""
    profile: bool = False
    wedge: bool = False
    """Only the first batch, without an end: it waits to be stopped."""

    @property
    def tokens(self) -> int:
        """Tokens of each sequence of a full batch."""
        return self.warm + self.timed + PHASES_MORE


def load(path: Path) -> Spec:
    """Read what `save` wrote."""
    return Spec(**json.loads(path.read_text(encoding="utf-8")))
