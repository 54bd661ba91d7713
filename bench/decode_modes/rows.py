"""Which rows there are, which still have to run and fit, and the file that keeps their results."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # results are JSON

BOOT_S = {"cpu_tiny": 60.0, "small": 80.0, "qwen3_30b_24l": 110.0}
BOOT_DEFAULT_S = 140.0
COMPILED_MORE_S = 90.0
PHASES_S = 30.0
"""What a row's batches take beside its boot, roughly; eager ones of many layers longer."""
EAGER_MORE_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One mode on one model; `kind` is `steps`, `profile`, `wedge` or `gain` with a number."""

    model: str
    mode: str
    kind: str = "steps"

    @property
    def name(self) -> str:
        """Unique in a results file."""
        more = "" if self.kind == "steps" else f"/{self.kind}"
        return f"{self.model}/{self.mode}{more}"


def kind_of(name: str) -> str:
    """The kind of a row by its name."""
    return [*name.split("/"), "steps"][2]


def reference(mode: str) -> str:
    """The mode whose tokens a mode's are compared with."""
    return "cpu_eager" if mode.startswith("cpu_") else "eager_ht"


def peer(mode: str) -> str | None:
    """Another graph mode to compare with: the same padding of batches, another transport."""
    is_graph = mode.startswith(("graph_", "stock_")) and "compiled" not in mode
    return "graph_ag" if is_graph and mode != "graph_ag" else None


def wanted(
    models: Sequence[str], modes: Sequence[str], only: Sequence[str], kind: str = "steps"
) -> list[Row]:
    """Rows in the order they run: by model, its modes as given. `only` names rows to keep."""
    rows = [Row(model, mode, kind) for model in models for mode in modes]
    return [
        row for row in rows if not only or row.name in only or f"{row.model}/{row.mode}" in only
    ]


def seconds_needed(row: Row, ragged_s: float, known: Mapping[str, Any]) -> float:
    """How long a row may well take: as it took before, else a guess."""
    before = known.get(row.name)
    if before is not None and before["status"] == "done":
        return float(before["wall_s"]) * 1.15
    guess = BOOT_S.get(row.model, BOOT_DEFAULT_S) + PHASES_S + ragged_s
    if "compiled" in row.mode:
        guess += COMPILED_MORE_S
    if row.mode.startswith("eager") and row.model != "small":
        guess += EAGER_MORE_S
    return guess


def fits(needed_s: float, left_s: float | None) -> bool:
    """True if a row may start with so much of the budget left; None: no budget."""
    return left_s is None or needed_s <= left_s


class Results:
    """The results file, written anew after each row, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = {"rows": {}}
        if path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    @property
    def rows(self) -> dict[str, Any]:
        """Rows by name, as they came."""
        rows: dict[str, Any] = self.data["rows"]
        return rows

    def is_done(self, row: Row) -> bool:
        """True if the row has run to its end."""
        return bool(self.rows.get(row.name, {}).get("status") == "done")

    def add(self, row: Row, result: Mapping[str, Any]) -> None:
        """Keep a row's result in place of an earlier one. What failed is kept as well."""
        self.rows[row.name] = dict(result)
        self.save()

    def save(self) -> None:
        """Write the file."""
        part = self._path.with_suffix(".part")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        os.replace(part, self._path)
