"""What docs/benchmarks.md says of decode modes: tables, and plots as files beside the page."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # results are JSON

from bench.decode_modes.models import SHAPES
from bench.decode_modes.modes import MODES
from bench.decode_modes.plots import plot
from bench.decode_modes.rows import kind_of, reference

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench/results/gpu/decode_modes.json"
PLOTS = ROOT / "docs/plots"
NOTHING = "Nothing has been measured yet."
FLOOR = "memory floor"
KERNELS = 12
OPERATORS = ("aten", "cuda")


def read(path: Path = RESULT) -> dict[str, Any] | None:
    """The result, or None if there is none yet."""
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def text(result: Mapping[str, Any] | None) -> str:
    """The whole generated part of the page."""
    if result is None:
        return NOTHING
    parts = [origin(result)]
    for model in (name for name in SHAPES if _rows(result, name)):
        parts.append(f"### {SHAPES[model].words}")
        if _lines(result, model):
            parts.append(f"![Milliseconds a step: {SHAPES[model].words}](plots/{_file(model)})")
        parts += [times(result, model), others(result, model)]
        parts += [part for part in (gentle(result, model), kernels(result, model)) if part]
    parts += [part for part in (undecided(result), wedges(result), unfinished(result)) if part]
    return "\n\n".join(parts)


def plots(result: Mapping[str, Any] | None) -> dict[str, str]:
    """The plots' files, by name."""
    if result is None:
        return {}
    return {
        _file(model): plot(
            f"Median step, {SHAPES[model].words}", "sequences a rank", "ms a step", lines, FLOOR
        )
        for model in SHAPES
        if (lines := _lines(result, model))
    }


def origin(result: Mapping[str, Any]) -> str:
    """Where and when, in words."""
    runs = result["runs"]
    began = sorted(run["began"] for run in runs)
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    gpus = result["gpus"]
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else f"{result['cores']} cores of {result['cpu']}"
    shas = sorted({str(run["git_sha"])[:12] or "unknown" for run in runs})
    when = began[0] if began[0] == began[-1] else f"{began[0]} to {began[-1]}"
    return f"{hardware}, Python {result['python']}, {packages}; {when}, at {', '.join(shas)}."


def times(result: Mapping[str, Any], model: str) -> str:
    """Times of full batches, beside eager steps and the floor."""
    eager = result["rows"].get(f"{model}/{_eager(result, model)}", {})
    head = "| sequences a rank, mode | median ms | p99 ms | tokens/s | times as fast as eager |"
    head += " times the floor | equal sequences | differences a token |"
    lines = [head, "| --- | --: | --: | --: | --: | --: | --: | --: |"]
    for size in _sizes(result, model):
        for row in _rows(result, model):
            phase = row["phases"].get(size)
            if phase is None:
                continue
            was = eager.get("phases", {}).get(size)
            faster = f"{was['median_ms'] / phase['median_ms']:.1f}" if was else ""
            cells = [f"{size}, `{row['mode']}`", f"{phase['median_ms']:.2f}"]
            cells += [f"{phase['p99_ms']:.2f}", f"{phase['tokens_per_s']:.0f}", faster]
            cells += [f"{phase['times_floor']:.2f}", *_equal(row, size)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append(_floor_line(result, model, size))
    return "\n".join(lines)


def _floor_line(result: Mapping[str, Any], model: str, size: str) -> str:
    least = next(r["phases"][size]["floor"] for r in _rows(result, model) if size in r["phases"])
    words = f"{size}, {FLOOR}: {least['weight_gb']:.1f} GB at {least['tb_per_s']:g} TB/s"
    return f"| {words} | {least['ms']:.2f} | | | | 1 | | |"


def others(result: Mapping[str, Any], model: str) -> str:
    """Ragged batches, what was run, how tokens compare there, memory and boot."""
    lines = [
        "| mode | ragged median ms | walk median ms | walk p99 ms | equal in the walk: to eager |"
        " to `graph_ag` | apart for rounding, a token | steps by kind | of another kind |"
        " weights GB | torch's peak GB | boot s |",
        "| --- | --: | --: | --: | --: | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in _rows(result, model):
        ragged, walk = row["phases"].get("ragged"), row["phases"].get("walk")
        memory = (row["memory_gb"][0] or {}) if row["memory_gb"] else {}
        apart = row.get("across_batches")
        kinds = ", ".join(f"{kind} {count}" for kind, count in _kinds(row).items())
        cells = [f"`{row['mode']}`", _ms(ragged, "median_ms"), _quiet_ms(walk)]
        cells += [_ms(walk, "p99_ms"), _equal(row, "walk")[0]]
        cells += [_equal(row, "walk", "equality_to_peer")[0]]
        cells += ["" if apart is None else f"{apart['differences_a_token']:.3f}", kinds]
        cells += [str(row["steps_of_another_kind"])]
        cells += [_gb(memory, "weights"), _gb(memory, "allocated_peak")]
        cells.append("" if row["boot_s"] is None else f"{row['boot_s']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gentle(result: Mapping[str, Any], model: str) -> str:
    """Modes that round otherwise, on weights that part less for it; empty without such rows."""
    lines = []
    for name, row in sorted(result["rows"].items()):
        kind = kind_of(name)
        if row["model"] != model or not kind.startswith("gain"):
            continue
        apart = row.get("across_batches")
        for phase, told in row.get("equality", {}).items():
            cells = [f"{phase}, `{row['mode']}`", kind.removeprefix("gain")]
            cells += [f"{told['equal']} of {told['sequences']}"]
            cells += [f"{told['differences_a_token']:.4f}"]
            cells += ["" if apart is None else f"{apart['differences_a_token']:.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
    head = "| sequences a rank, mode | what layers add is scaled by | equal sequences |"
    head += " differences a token | apart for rounding, a token |"
    return "\n".join([head, "| --- | --: | --: | --: | --: |", *lines]) if lines else ""


def kernels(result: Mapping[str, Any], model: str) -> str:
    """Where the time of a step goes, by kernel, in the smallest batch profiled; empty if none."""
    taken: dict[str, dict[str, float]] = {}
    size = 0
    for row in result["rows"].values():
        found = sorted(row.get("profiles", {}).values(), key=lambda one: int(one["sequences"]))
        if row["model"] == model and found and found[0]["kernels"]:
            size = int(found[0]["sequences"])
            taken[str(row["mode"])] = _by_kernel(found[0])
    if not taken:
        return ""
    names = {name for times in taken.values() for name in times}
    most = sorted(names, key=lambda name: -max(times.get(name, 0.0) for times in taken.values()))
    lines = [
        f"| microseconds a step at {size}, by kernel | {' | '.join(f'`{m}`' for m in taken)} |",
        f"| --- | {' | '.join('--:' for _ in taken)} |",
    ]
    for name in most[:KERNELS]:
        cells = [f"{times[name]:.0f}" if name in times else "" for times in taken.values()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    all_ = [f"{sum(times.values()):.0f}" for times in taken.values()]
    return "\n".join([*lines, f"| all that were recorded | {' | '.join(all_)} |"])


def _by_kernel(profile: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds a step by a kernel's bare name; operators, which hold kernels, left out."""
    times: dict[str, float] = {}
    for kernel in profile["kernels"]:
        name = bare(kernel["name"])
        if not name.startswith(OPERATORS):
            times[name] = times.get(name, 0.0) + kernel["us"] / profile["profiled"]
    return times


def bare(name: str) -> str:
    """A kernel's name without what the compiler adds to it."""
    if "flash::" in name:
        return "flash attention"
    if name.startswith("std::enable_if"):
        name = name.partition("::type ")[2] or name
    found = re.search(r"(?:^|[ :>])(\w+)(?:<|\()", name)
    word = found.group(1) if found else name.split()[-1]
    return "dense GEMM" if word.startswith(("nvjet", "cutlass", "gemm")) else word


def undecided(result: Mapping[str, Any]) -> str:
    """Modes whose tokens part from eager ones more than rounding explains, as far as was seen."""
    lines = []
    for name, row in sorted(result["rows"].items()):
        apart = row.get("across_batches")
        told = row.get("equality", {})
        batches = [float(told[size]["differences_a_token"]) for size in told if size.isdigit()]
        most = max(batches, default=0.0)
        if kind_of(name) != "steps" or apart is None or most <= apart["differences_a_token"]:
            continue
        words = SHAPES[row["model"]].words
        lines.append(
            f"- `{row['mode']}`, {words}: tokens part from eager ones more than the same sequences"
            f" do in two batches ({most:.3f} a token against {apart['differences_a_token']:.3f}),"
            " so rounding alone does not explain it yet."
        )
    return "\n".join(lines)


def wedges(result: Mapping[str, Any]) -> str:
    """What the other rank did when one was stopped."""
    rows = [row for row in result["rows"].values() if "stopped" in row]
    lines = []
    for row in rows:
        told = row["stopped"]
        ended = f"the other ended by itself after {told['seconds']:.1f} s"
        if not told["ended_by_itself"]:
            ended = f"the other did not end within {told['bound_s']:g} s and was killed"
        lines.append(f"- `{row['mode']}`, {SHAPES[row['model']].words}: one rank stopped; {ended}.")
    return "\n".join(lines)


def unfinished(result: Mapping[str, Any]) -> str:
    """Rows that did not come to their end, so that a gap in a table says why."""
    lines = []
    for name, row in sorted(result["rows"].items()):
        if row["status"] == "done":
            continue
        ended = "hit its time limit" if row["status"] == "late" else "failed"
        after = ", ".join(row["phases"]) or "none"
        why = f": {row['failures'][0][:200]}" if row["failures"] else ""
        lines.append(
            f"- `{name}` {ended} after {row['wall_s']:.0f} s; phases it finished: {after}{why}"
        )
    return "\n".join(["Did not come to its end:", "", *lines]) if lines else ""


def _rows(result: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """The model's rows with any phase, in the order of the modes; no wedges."""
    rows = result["rows"]
    found = [rows[name] for mode in MODES if (name := f"{model}/{mode}") in rows]
    return [row for row in found if row["phases"]]


def _eager(result: Mapping[str, Any], model: str) -> str:
    return reference(str(_rows(result, model)[0]["mode"]))


def _sizes(result: Mapping[str, Any], model: str) -> list[str]:
    sizes = {size for row in _rows(result, model) for size in row["phases"] if size.isdigit()}
    return sorted(sizes, key=int)


def _lines(result: Mapping[str, Any], model: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    floor: dict[str, float] = {}
    for row in _rows(result, model):
        phases = {
            size: row["phases"][size] for size in _sizes(result, model) if size in row["phases"]
        }
        if phases:
            lines[str(row["mode"])] = [(float(s), p["median_ms"]) for s, p in phases.items()]
            floor |= {size: phase["floor"]["ms"] for size, phase in phases.items()}
    if lines:
        lines[FLOOR] = [(float(size), floor[size]) for size in sorted(floor, key=int)]
    return lines


def _file(model: str) -> str:
    return f"decode_modes_{model}.svg"


def _equal(row: Mapping[str, Any], phase: str, to: str = "equality") -> tuple[str, str]:
    told = row.get(to, {}).get(phase)
    if told is None or not told["sequences"]:
        return "", ""
    return f"{told['equal']} of {told['sequences']}", f"{told['differences_a_token']:.4f}"


def _kinds(row: Mapping[str, Any]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for phase in row["phases"].values():
        for rank in phase["ranks"]:
            for kind, count in rank["steps_by_kind"].items():
                kinds[kind] = kinds.get(kind, 0) + count
    return kinds


def _ms(phase: Mapping[str, Any] | None, name: str) -> str:
    return "" if phase is None else f"{phase[name]:.2f}"


def _quiet_ms(walk: Mapping[str, Any] | None) -> str:
    """Of the walk's steps that no request joined in; empty where those were not told apart."""
    quiet = (
        []
        if walk is None
        else [r["quiet_median_ms"] for r in walk["ranks"] if "quiet_median_ms" in r]
    )
    return f"{max(quiet):.2f}" if quiet else ""


def _gb(memory: Mapping[str, float], name: str) -> str:
    return f"{memory[name]:.1f}" if name in memory else ""
