"""What docs/benchmarks.md says of the comparison: tables and plots, from the results alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any  # results are JSON

from bench.decode_modes.plots import plot

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
PLOTS = ROOT / "docs/plots"
PREFIX = "split-"
SIM = "sim: "
"""Before every title of what simulated engines made."""
OFFERED, LIMIT = "offered", "limit"
PICTURES = {
    "goodput": ("goodput by rate", "good a second"),
    "ttft": ("TTFT by rate, p90 of served requests", "ms"),
    "itl": ("p99 of a request's ITL by rate, p90 of served requests", "ms"),
}
"""By part of the file's name: title and axis. Nine in ten must keep a limit to be carried."""
NOTHING = "Nothing has been measured on GPUs yet."

Result = Mapping[str, Any]
Cell = Mapping[str, Any]


def read(folder: Path = RESULTS) -> dict[str, Result]:
    """Every result by the name of its file; real engines first."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob(f"{PREFIX}*.json"))
    }
    return dict(sorted(found.items(), key=lambda item: item[1]["engine"] == "sim"))


def text(results: Mapping[str, Result]) -> str:
    """The generated part of the page."""
    real = any(result["engine"] != "sim" for result in results.values())
    parts = [] if real else [NOTHING]
    for name, result in results.items():
        parts += [heading(result), origin(result), carried(result)]
        for shape in result["workload"]["shapes"]:
            parts += [f"{mark(result)}{_words(result, shape)}{_measured(result, shape)}:"]
            parts.append(table(result, shape))
            shown = [what for what in PICTURES if _lines(result, shape, what)]
            parts += [
                f"![{_title(result, shape, what)}](plots/{_file(name, shape, what)})"
                for what in shown
            ]
        parts += [part for part in (unserved(result),) if part]
    return "\n\n".join(parts)


def plots(results: Mapping[str, Result]) -> dict[str, str]:
    """The plots' files, by name."""
    return {
        _file(name, shape, what): plot(
            _title(result, shape, what), "requests a second", axis, lines,
            OFFERED if what == "goodput" else LIMIT,
        )
        for name, result in results.items()
        for shape in result["workload"]["shapes"]
        for what, (_, axis) in PICTURES.items()
        if (lines := _lines(result, shape, what))
    }  # fmt: skip


def mark(result: Result) -> str:
    """What a title of simulated engines begins with."""
    return SIM if result["engine"] == "sim" else ""


def heading(result: Result) -> str:
    """The result's title."""
    if result["engine"] == "sim":
        return (
            "### sim: simulated engines\n\nA timing model with made-up paces: these figures test\n"
            "the comparison and say nothing of how fast anything is. The clock is real, so the\n"
            "stalls of a machine that other work shares are in them too, and decide some cells."
        )
    return f"### {result['workload']['words']}"


def origin(result: Result) -> str:
    """Where a result comes from."""
    runs = sorted(result["runs"], key=lambda run: str(run["began"]))
    last, began = runs[-1], [str(run["began"]) for run in runs]
    gpus = f"{len(last['gpus'])} x {last['gpus'][0]}, " if last["gpus"] else ""
    shas = sorted({_sha(cell) for cell in result["cells"] if "git_sha" in cell})
    when = began[0] if began[0] == began[-1] else f"{began[0]} to {began[-1]}"
    slo = result["workload"]["slo"]
    loads = sorted({f"{run['load_average']:.1f}" for run in runs}, key=float)
    load = " to ".join(dict.fromkeys((loads[0], loads[-1])))
    return (
        f"`{last['command']}` at {', '.join(shas) or 'no cell yet'}, {gpus}{last['cores']} cores of"
        f" {last['cpu']}, Python {last['python']}; {when}, load average {load}"
        f" before. Good: TTFT within {slo['ttft_ms']:g} ms, the request's p99 of"
        f" ITL within {slo['itl_p99_ms']:g} ms, TPOT within {slo['tpot_ms']:g} ms."
    )


def carried(result: Result) -> str:
    """Goodput of each system: the highest rate that it carries."""
    shapes = result["workload"]["shapes"]
    share = result["workload"]["slo"]["attained_share"]
    head = [f"{mark(result)}highest rate with {share:.0%} good", *shapes]
    rows = []
    for system, told in result["workload"]["systems"].items():
        cells = [_carried(result, system, shape, int(told["gpus"])) for shape in shapes]
        rows.append([told["words"], *cells])
    return _table(head, rows)


def _carried(result: Result, system: str, shape: str, gpus: int) -> str:
    rates = _cells(result, system, shape, "poisson")
    if not any(cell["status"] == "done" for cell in rates):
        return "not measured"
    best, why = highest(rates, float(result["workload"]["slo"]["attained_share"]))
    if best is None:
        return f"below {rates[0]['value']:g}" if why == "found" else "unknown"
    mark_ = {"found": "", "open": ">= ", "unknown": ">= "}[why]
    return f"{mark_}{best:g}/s, {best / gpus:.3g} a GPU"


def highest(rates: Sequence[Cell], share: float) -> tuple[float | None, str]:
    """The highest rate below which every rate was carried, and whether the next one was not.

    `found`: a higher one was measured and not carried; `open`: none higher was to be run;
    `unknown`: the next one was not measured.
    """
    best: float | None = None
    for cell in sorted(rates, key=lambda cell: float(cell["value"])):
        if cell["status"] == "left out":
            return best, "found"
        if cell["status"] != "done":
            return best, "unknown"
        if (cell["good_share"] or 0.0) < share:
            return best, "found"
        best = float(cell["value"])
    return best, "open"


def table(result: Result, shape: str) -> str:
    """Every load of a shape, the systems beneath one another."""
    head = [
        f"{mark(result)}load, system", "tokens/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99",
        "TPOT p50 ms", "total p50 ms", "p99", "goodput/s", "good", "dropped", "of another kind",
    ]  # fmt: skip
    found = [cell for cell in result["cells"] if cell["shape"] == shape]
    loads = list(dict.fromkeys((cell["load"], cell["value"]) for cell in found))
    loads.sort(key=lambda load: (load[0] != "poisson", load[1]))
    rows = [
        _row(cell, f"{_load(load)}, {told['words']}", len(head))
        for load in loads
        for system, told in result["workload"]["systems"].items()
        for cell in found
        if (cell["load"], cell["value"]) == load and cell["system"] == system
    ]
    return _table(head, rows)


def _row(cell: Cell, words: str, width: int) -> list[str]:
    if cell["status"] != "done":
        return [f"{words}: {cell['status']}", *[""] * (width - 1)]
    steps = cell["steps"].values()
    out_of_mode = f"{sum(each['out_of_mode'] for each in steps)}" if steps else ""
    return [
        words,
        f"{cell['tokens_per_s']:.0f}",
        _ms(cell, "ttft_ms", "p50"),
        _ms(cell, "ttft_ms", "p99"),
        _ms(cell, "itl_ms", "p50"),
        _ms(cell, "itl_ms", "p99"),
        _ms(cell, "tpot_ms", "p50"),
        _ms(cell, "total_ms", "p50"),
        _ms(cell, "total_ms", "p99"),
        f"{cell['goodput_per_s']:.2f}",
        "" if cell["good_share"] is None else f"{cell['good_share']:.0%}",
        str(cell["failed"] + cell["unfinished"]),
        out_of_mode,
    ]


def _ms(cell: Cell, name: str, at: str) -> str:
    return "" if cell[name] is None else f"{cell[name][at]:.1f}"


def unserved(result: Result) -> str:
    """Cells without figures and requests without answers, so that a gap says why."""
    lines = []
    for cell in result["cells"]:
        if cell["status"] != "done":
            why = str(cell["reason"]).strip().splitlines()
            lines.append(f"- `{cell['cell']}` {cell['status']}: {why[0][:200] if why else ''}")
        elif cell["dropped_why"]:
            whys = ", ".join(f"{n} x {why[:120]}" for why, n in cell["dropped_why"].items())
            first = ", ".join(map(str, cell["dropped"][:8]))
            lines.append(f"- `{cell['cell']}` dropped {whys}; requests {first} ...")
    title = f"{mark(result)}Left out, failed or dropped:"
    return "\n".join([title, "", *lines]) if lines else ""


def _lines(result: Result, shape: str, what: str) -> dict[str, list[tuple[float, float]]]:
    """A system's figure by rate; a logarithmic axis has no place for none."""
    lines: dict[str, list[tuple[float, float]]] = {}
    rates: set[float] = set()
    for system in result["workload"]["systems"]:
        done = [c for c in _cells(result, system, shape, "poisson") if c["status"] == "done"]
        points = [(float(c["value"]), _height(c, what)) for c in done]
        if seen := [(rate, height) for rate, height in points if height > 0]:
            lines[system] = seen
        rates |= {rate for rate, _ in points}
    slo = result["workload"]["slo"]
    limits = {"ttft": slo["ttft_ms"], "itl": slo["itl_p99_ms"]}
    if lines and what == "goodput":
        lines[OFFERED] = [(rate, rate) for rate in sorted(rates)]
    elif lines:
        lines[LIMIT] = [(rate, limits[what]) for rate in sorted(rates)]
    return lines


def _height(cell: Cell, what: str) -> float:
    if what == "goodput":
        return float(cell["goodput_per_s"])
    told = cell["ttft_ms" if what == "ttft" else "itl_p99_of_requests_ms"]
    return float(told["p90"]) if told else 0.0


def _title(result: Result, shape: str, what: str) -> str:
    return f"{mark(result)}{PICTURES[what][0]}, {_words(result, shape)}"


def _cells(result: Result, system: str, shape: str, load: str) -> list[Cell]:
    found = [
        cell
        for cell in result["cells"]
        if (cell["system"], cell["shape"], cell["load"]) == (system, shape, load)
    ]
    return sorted(found, key=lambda cell: float(cell["value"]))


def _words(result: Result, shape: str) -> str:
    told = result["workload"]["shapes"][shape]
    return f"{told['prompt_tokens']} tokens in, {told['completion_tokens']} out"


def _measured(result: Result, shape: str) -> str:
    told = result["workload"]["shapes"][shape]
    return f", measured for {told['measure_s']:g} s after {told['warm_s']:g} s of the same load"


def _load(load: tuple[str, float]) -> str:
    kind, value = load
    return f"{value:g} a second" if kind == "poisson" else f"{value:g} streams"


def _sha(cell: Cell) -> str:
    return str(cell["git_sha"])[:12] + (" with changes" if cell["git_dirty"] else "")


def _file(name: str, shape: str, what: str) -> str:
    return f"{name.replace('-', '_')}_{shape}_{what}.svg"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
