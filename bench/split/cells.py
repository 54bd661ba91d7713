"""Which cells there are, which are done, and the files that keep them."""

import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # results are JSON

from bench.split.settings import Comparison, Load, Shape, SystemSettings


@dataclass(frozen=True, slots=True)
class Cell:
    """One system, one shape, one load."""

    system: str
    shape: Shape
    load: Load

    @property
    def name(self) -> str:
        """Its file's name, and how it is told of."""
        return f"{self.system}.{self.shape.name}.{self.load.name}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was asked for on the command line; empty means all."""

    systems: Collection[str] = ()
    shapes: Collection[str] = ()
    loads: Collection[str] = ()


def wanted(comparison: Comparison, system: SystemSettings, chosen: Chosen) -> list[Cell]:
    """The system's cells, in the order in which they are run: rates ascend."""
    return [
        Cell(system.name, shape, load)
        for shape in comparison.shapes
        for load in shape.loads
        if (not chosen.systems or system.name in chosen.systems)
        and (not chosen.shapes or shape.name in chosen.shapes)
        and (not chosen.loads or load.name in chosen.loads)
    ]


class Store:
    """One JSON file a cell, beside the merged result."""

    def __init__(self, out: Path, comparison: Comparison, engine: str) -> None:
        self.out = out
        self.folder = out.with_suffix(".cells")
        self._comparison = comparison
        self._engine = engine

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What is kept of a cell; None if that is nothing, or was made with other settings."""
        path = self._path(cell)
        if not path.exists():
            return None
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept if kept["settings"] == self._digest(cell) else None

    def is_done(self, cell: Cell) -> bool:
        """True if it was measured to its end."""
        kept = self.read(cell)
        return kept is not None and kept["status"] == "done"

    def keep(
        self, cell: Cell, told: Mapping[str, Any], rows: Mapping[str, Any] | None = None
    ) -> None:
        """Write a cell, whole or not at all; its requests first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if rows is not None:
            with gzip.open(self.folder / f"{cell.name}.rows.json.gz", "wt") as file:
                json.dump(rows, file)
        head = {
            "cell": cell.name,
            "system": cell.system,
            "shape": cell.shape.name,
            "load": cell.load.kind,
            "value": cell.load.value,
            "engine": self._engine,
            "settings": self._digest(cell),
        }
        path = self._path(cell)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(head | dict(told), indent=1), encoding="utf-8")
        fresh.replace(path)

    def beyond(self, cell: Cell) -> float | None:
        """The lowest rate of its shape that the system could not carry, if this cell's is higher;
        None otherwise."""
        if cell.load.kind != "poisson":
            return None
        share = self._comparison.slo.give_up_share
        for rate in cell.shape.rates:
            if rate >= cell.load.value:
                return None
            kept = self.read(Cell(cell.system, cell.shape, Load(kind="poisson", value=rate)))
            if kept is None or kept["status"] != "done" or kept["good_share"] is None:
                continue
            if kept["good_share"] < share:
                return rate
        return None

    def is_pending(self, cell: Cell, *, again: bool = False) -> bool:
        """True if it is still to be run."""
        return (again or not self.is_done(cell)) and self.beyond(cell) is None

    def merge(self, run: Mapping[str, Any]) -> None:
        """Write the result: every cell that is kept, and the runs that made them."""
        before = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        runs = [old for old in before.get("runs", []) if old["began"] != run["began"]]
        made = {
            **{name: run[name] for name in ("command", "git_sha", "git_dirty", "python", "cpu")},
            "cores": run["cores"],
            "engine": self._engine,
            "workload": told_of(self._comparison),
            "runs": [*runs, dict(run)],
            "cells": list(self._kept()),
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.out.with_suffix(".new")
        fresh.write_text(json.dumps(made), encoding="utf-8")
        fresh.replace(self.out)

    def _kept(self) -> Iterator[dict[str, Any]]:
        for system in self._comparison.systems:
            for cell in wanted(self._comparison, system, Chosen()):
                if (kept := self.read(cell)) is not None:
                    yield kept
                elif (rate := self.beyond(cell)) is not None:
                    yield {
                        "cell": cell.name, "system": cell.system, "shape": cell.shape.name,
                        "load": "poisson", "value": cell.load.value, "engine": self._engine,
                        "status": "left out",
                        "reason": f"{rate:g} a second was more than it could carry",
                    }  # fmt: skip

    def _digest(self, cell: Cell) -> str:
        return self._comparison.digest(cell.system, cell.shape.name, self._engine)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"


def told_of(comparison: Comparison) -> dict[str, Any]:
    """What the page needs to know of the workload."""
    slo = comparison.slo
    return {
        "name": comparison.name,
        "words": comparison.words,
        "seed": comparison.seed,
        "slo": {name: getattr(slo, name) for name in slo.__dataclass_fields__},
        "shapes": {
            shape.name: {
                "prompt_tokens": shape.prompt_tokens,
                "completion_tokens": shape.completion_tokens,
                "warm_s": comparison.times_of(shape).warm_s,
                "measure_s": comparison.times_of(shape).measure_s,
            }
            for shape in comparison.shapes
        },
        "systems": {
            system.name: {"words": system.words, "gpus": len(system.devices)}
            for system in comparison.systems
        },
    }
