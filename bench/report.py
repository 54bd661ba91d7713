"""Write the tables of docs/benchmarks.md from the results; no number there is typed by hand.

    python -m bench.report

Each table stands between two markers; a test finds a stale one.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any  # JSON

from bench import batteries
from bench.decode_modes import page as decode_modes
from bench.handoff import page as handoff
from bench.split import page as split

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "bench/results"

PARTS = {
    "router": "router",
    "prefill_worker": "prefill worker",
    "prefill_engines": "prefill engine",
    "decode_worker": "decode worker",
    "decode_engines": "decode engines",
    "server": "vLLM's server",
    "engines": "vLLM's engine",
    "client": "the client",
}
SYSTEMS = {
    "split_1p2d": "split, 1 prefill and 2 decode ranks",
    "split_1p1d": "split, 1 prefill and 1 decode rank",
    "aggregated_1_thread": "vLLM, 1 thread",
    "aggregated_2_threads": "vLLM, 2 threads",
    "splitwave_router": "Splitwave's router",
    "vllm_router": "vllm-router",
}
POLICIES = {
    "vllm_global_minimum": "vLLM's global minimum",
    "two_choices_on_stale_counts": "two choices on stale counts",
    "grants": "grants",
}


def read(name: str) -> dict[str, Any]:
    """One result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is words, the rest figures."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(name: str) -> str:
    """Where a result comes from, in one line."""
    result = read(name)
    dirty = " with changes" if result["git_dirty"] else ""
    loads = [cell["load_average"] for cell in result.get("cells", [])]
    seen = [load for each in loads for load in each]
    load = f", load average {min(seen):.1f} to {max(seen):.1f}" if seen else ""
    return (
        f"`{result['command']}` at {result['git_sha'][:12]}{dirty}, {result['cores']} cores of"
        f" {result['cpu']}, Python {result['python']}{load}."
    )


def speed(name: str) -> str:
    """Latency and throughput of each system."""
    head = [
        "streams, system", "tokens/s", "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "TPOT p50 ms",
        "p95", "goodput/s", "good",
    ]  # fmt: skip
    rows = [
        [
            f"{cell['streams']}, {SYSTEMS[cell['system']]}",
            f"{cell['tokens_per_s']:.0f}",
            *(f"{cell[what][at]:.1f}" for what in _TIMES for at in ("p50", "p95")),
            f"{cell['goodput_per_s']:.2f}",
            f"{cell['good_share']:.0%}",
        ]
        for cell in read(name)["cells"]
    ]
    return table(head, rows)


_TIMES = ("ttft_ms", "itl_ms", "tpot_ms")


def cpu(name: str) -> str:
    """CPU microseconds a completion token, process by process."""
    head = ["streams, system", *PARTS.values(), "all but the client"]
    rows = []
    for cell in read(name)["cells"]:
        used: Mapping[str, float] = cell["cpu_us_per_token"]
        rows.append(
            [
                f"{cell['streams']}, {SYSTEMS[cell['system']]}",
                *(f"{used[part]:.0f}" if part in used else "" for part in PARTS),
                f"{sum(us for part, us in used.items() if part != 'client'):.0f}",
            ]
        )
    return table(head, rows)


ROUTERS = {
    "router_64": "64 streams, 256 tokens each",
    "router_512": "512 streams, 64 tokens each",
    "router_requests": "64 streams, 2 tokens a request",
}


def routers() -> str:
    """What a router costs, beside vLLM's."""
    head = ["workload, router", "CPU us per token", "per request", "ratio", "TTFT p50 ms", "MiB"]
    rows = []
    for name, words in ROUTERS.items():
        result = read(name)
        cells = {cell["system"]: cell for cell in result["cells"]}
        theirs = cells["vllm_router"]["cpu_us_per_token"]["router"]
        for system, cell in cells.items():
            ours = cell["cpu_us_per_token"]["router"]
            rows.append(
                [
                    f"{words}: {SYSTEMS[system]}",
                    f"{ours:.1f}",
                    f"{ours * cell['tokens'] / cell['requests']:.0f}",
                    f"{ours / theirs:.2f}",
                    f"{cell['ttft_ms']['p50']:.0f}",
                    str(result["systems"][system]["rss_mib"]["router"]),
                ]
            )
    return table(head, rows)


def memory(name: str) -> str:
    """Resident memory, process by process."""
    head = ["system", *(words for part, words in PARTS.items() if part != "client")]
    rows = [
        [
            SYSTEMS[system],
            *(str(told["rss_mib"].get(part, "")) for part in PARTS if part != "client"),
        ]
        for system, told in read(name)["systems"].items()
    ]
    return table(head, rows)


def grants() -> str:
    """What grants are worth."""
    result = read("grants")
    head = ["placement", "64 at once: maximum/mean load", "a minute: p99", "seats overrun"]
    rows = [
        [
            words,
            f"{result['snapshot'][name]['max_over_mean_average']:.3f}",
            f"{result['steady'][name]['max_over_mean_p99']:.3f}",
            _overrun(result["steady"][name]),
        ]
        for name, words in POLICIES.items()
    ]
    return table(head, rows)


def _overrun(steady: Mapping[str, float]) -> str:
    return f"{steady.get('arrivals_with_a_rank_over_its_seats', 0.0):.0%} of arrivals"


def text() -> str:
    """What text costs the router."""
    return _microseconds(read("detokenizer")["cpu_us_per_token"], "text at the router, 64 streams")


def simulator() -> str:
    """What the simulator costs."""
    return _microseconds(read("sim_engine")["engine_cpu_us_per_token"], "simulated engines")


def _microseconds(figures: Mapping[str, float], what: str) -> str:
    rows = [[name.replace("_", " "), f"{us:.2f}"] for name, us in figures.items()]
    return table([what, "CPU us per token"], rows)


def cpu_modes() -> str:
    """What compiled decode is worth on the CPU."""
    head = [
        "a step at 8 requests a rank",
        "eager, CPU ms",
        "compiled, CPU ms",
        "ratio",
        "of rounds",
    ]
    rows = [
        [
            ranks,
            f"{cell['eager_ms']:.1f}",
            f"{cell['compiled_ms']:.1f}",
            f"{cell['ratio']:.2f}",
            f"{cell['ratio_min']:.2f} to {cell['ratio_max']:.2f}",
        ]
        for ranks, cell in read("cpu_modes")["summary"].items()
    ]
    return table(head, rows) + f"\n\nLoad average {read('cpu_modes')['load_average']:.1f}."


def demo() -> str:
    """What the demo costs."""
    result = read("demo")
    head = ["", "wall s", "CPU s"]
    return table(
        head,
        [
            ["the demo", str(result["demo"]["wall_s"]), str(result["demo"]["cpu_s"])],
            ["tiny stack to ready", str(result["boot"]["ready_s"]), str(result["boot"]["cpu_s"])],
        ],
    )


TABLES: dict[str, Callable[[], str]] = {
    **{
        f"{workload} {name}": partial(make, f"serving_{workload}")
        for workload in ("tiny", "demo")
        for name, make in (("origin", origin), ("speed", speed), ("cpu", cpu), ("memory", memory))
    },
    "routers": routers,
    **{f"{name} origin": partial(origin, name) for name in ROUTERS},
    "grants": grants,
    "grants origin": partial(origin, "grants"),
    "text": text,
    "simulator": simulator,
    "demo": demo,
    "cpu modes": cpu_modes,
    "cpu modes origin": partial(origin, "cpu_modes"),
    "batteries": batteries.text,
    "handoff": handoff.text,
    "decode modes": lambda: decode_modes.text(decode_modes.read()),
    "split": lambda: split.text(split.read()),
}
"""By marker."""


def filled(page: str) -> str:
    """The page with its tables as the results have them. ValueError if a marker is missing."""
    for name, make in TABLES.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end: {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE.name}: no lines `{begin.strip()}` and `{end}`; add them")
        page = f"{before}{begin}{make()}\n{end}{after}"
    return page


def main() -> int:
    """Renew the page and its plots."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    plots = decode_modes.plots(decode_modes.read()) | split.plots(split.read())
    for name, svg in plots.items():
        decode_modes.PLOTS.mkdir(exist_ok=True)
        (decode_modes.PLOTS / name).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
