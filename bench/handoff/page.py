"""The part of docs/benchmarks.md on handoffs, made from the results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # results are JSON

ROOT = Path(__file__).parents[2]
RESULTS = {
    "on the CPU": ROOT / "bench/results/handoff_cpu.json",
    "between two GPUs": ROOT / "bench/results/gpu/handoff_gpu.json",
}


def text(results: Mapping[str, Path] = RESULTS) -> str:
    """A table for each place that was measured."""
    parts = [
        f"{_figures(where, json.loads(path.read_text(encoding='utf-8')))}"
        if path.exists()
        else f"Nothing has been measured {where} yet."
        for where, path in results.items()
    ]
    return "\n\n".join(parts)


def _figures(where: str, result: Mapping[str, Any]) -> str:
    head = "| KV cache | blocks | MB | in a row, ms | GB/s | scattered, ms | GB/s |"
    lines = [head, "| --- | --: | --: | --: | --: | --: | --: |"]
    for row in result["rows"].values():
        if row["status"] == "done":
            lines += _lines(row)
    return "\n\n".join([f"Handoffs {where}, medians:", "\n".join(lines), _words(result)])


def _lines(cache: Mapping[str, Any]) -> list[str]:
    by_size: dict[int, dict[str, Any]] = {}
    for row in cache["rows"]:
        by_size.setdefault(row["blocks"], {})[row["pattern"]] = row
    found = []
    for blocks, both in by_size.items():
        cells = [f"{cache['words']}, {cache['dtype']}", str(blocks)]
        cells.append(f"{both['row']['bytes'] / 1e6:.1f}")
        for pattern in ("row", "scattered"):
            one = both[pattern]
            cells += [f"{one['ms_p50']:.2f}", f"{one['gb_per_s_p50']:.2f}"]
        found.append("| " + " | ".join(cells) + " |")
    return found


def _words(result: Mapping[str, Any]) -> str:
    copies = result["link"]["copies"]
    best = max(copies, key=lambda copy: float(copy["gb_per_s"]))
    fence = ", ".join(
        f"{row['p50_ms']:.2f} ms (p99 {row['p99_ms']:.2f}) with {row['at_once']} at once"
        for row in result["fence"]
    )
    host = "; ".join(
        f"{name}: {row['through_host']}"
        for name, row in result["rows"].items()
        if row["status"] == "done"
    )
    cores = f"{result['cores']} cores of {result['cpu']}" if result.get("cpu") else "that machine"
    return (
        f"Plain copies of the same run reach {best['gb_per_s']:.1f} GB/s"
        f" ({best['bytes'] / 1e6:.0f} MB). A fence's answer takes {fence}."
        f" Copies through the host: {host}.\n\n`{result['command']}`, {result['ended']},"
        f" {cores}, load average {result['load_average']:.1f}."
    )
