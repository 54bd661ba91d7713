"""The same long prompt again and again, through the whole system: the n-th as fast as the second.

A client sends it over HTTP to a router with a prefill and a decode group behind it, while short
requests come and go, so that batches are padded to other sizes each time. The first request pays
for connections and caches; those from the second on are compared with as many at the end, as the
battery compares them: by bootstrap, the interval's upper end below the bound. Times are the
client's to its first token, the prefill pool's own from the trace, and a later token's.

    python -m bench.repeated --device cpu --work-dir repeated --out repeated.json

Ends with 0 if it holds. `--control` asks a longer prompt from the middle on, which must be seen.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any  # JSON

import aiohttp

from bench.decode_modes import environment_facts
from bench.load import Sample, request
from bench.split_gpu_stack import add_arguments, mode_of, model_of, plan_of
from bench.workload import Ask
from services.cli.plan import Plan
from services.cli.stack import running
from splitwave.certify.battery.repeats import GROUP_MAX, SAMPLES_MIN
from splitwave.certify.battery.statistics import StepSample, TooFewSamples, at_equal_size
from splitwave.core.mode import lookup
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_files import SpanRecord, read_spans

COUNT = 20
PROMPT_TOKENS = {"cpu": 601, "cuda": 3001}
"""No multiple of a block, a captured size or a batch: steps are padded as much as they can be."""
TOKENS = 16
SHORT_TOKENS = (4, 24)
SHORT_PROMPT_TOKENS = (3, 40)
CROWDS = (0, 5, 1, 3)
"""Short requests beside each long one, in turns: decode steps of other sizes come up each time."""
CONTROL_FACTOR = 1.4
ASK_S = 300.0
JUDGED = ("ttft_ms", "prefill_ms")


@dataclass(frozen=True, slots=True)
class Long:
    """One of the long requests, as its client saw it."""

    ttft_ms: float
    tpot_ms: float


def texts(length: int, count: int, seed: str) -> list[tuple[int, ...]]:
    """Prompts of printable bytes."""
    draw = random.Random(seed)  # reproducible, not secret
    return [tuple(draw.choices(range(ord(" "), ord("~")), k=length)) for _ in range(count)]


def lengths(asked: argparse.Namespace) -> list[int]:
    """Tokens of the long prompts: the same, but for the control's later half."""
    length = asked.prompt_tokens or PROMPT_TOKENS[asked.device]
    longer = int(length * CONTROL_FACTOR) if asked.control else length
    return [length if at < asked.count // 2 else longer for at in range(asked.count)]


async def send(plan: Plan, sizes: Sequence[int]) -> list[Long]:
    """Every long request, each beside its crowd, which has ended before the next."""
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    found = []
    async with aiohttp.ClientSession(f"http://{plan.router_http}", timeout=timeout) as http:
        for at, size in enumerate(sizes):
            draw = random.Random(f"crowd {at % len(CROWDS)}")  # the same crowd in each turn
            crowd = [
                Ask(n, texts(draw.randint(*SHORT_PROMPT_TOKENS), 1, f"{at}/{n}")[0],
                    draw.randint(*SHORT_TOKENS))
                for n in range(CROWDS[at % len(CROWDS)])
            ]  # fmt: skip
            beside = [
                asyncio.create_task(request(http, plan.served_model, short)) for short in crowd
            ]
            long = Ask(0, texts(size, 1, "long")[0], TOKENS)
            sample: Sample = await request(http, plan.served_model, long)
            await asyncio.gather(*beside)
            found.append(Long(sample.ttft_ms, sample.tpot_ms))
    return found


def prefill_ms(spans: Sequence[SpanRecord], sizes: Sequence[int]) -> list[float]:
    """What the prefill pool took for each long request, from its trace, in the order they came."""
    of_long = {
        span.span_id: span
        for span in spans
        if span.name == names.PREFILL_SERVE
        and span.attributes.get("splitwave.prompt_tokens") in set(sizes)
    }
    computed = [
        span for span in spans if span.name == names.PREFILL_COMPUTE and span.parent_id in of_long
    ]
    computed.sort(key=lambda span: span.began_ns)
    return [(span.ended_ns - span.began_ns) / 1e6 for span in computed]


def evened(times_ms: Sequence[float]) -> list[float]:
    """Times over what the first half took beside the same crowd: crowds differ, however late."""
    usual = [
        median(times_ms[at or len(CROWDS) : max(len(CROWDS) + 1, len(times_ms) // 2) : len(CROWDS)])
        for at in range(len(CROWDS))
    ]
    return [ms / usual[at % len(CROWDS)] for at, ms in enumerate(times_ms)]


def compared(times_ms: Sequence[float], bound: float) -> dict[str, Any]:
    """The second to the eighth request beside the last seven; few samples are no proof."""
    size, even = min(GROUP_MAX, (len(times_ms) - 1) // 2), evened(times_ms)
    early, late = even[1 : 1 + size], even[len(even) - size :]
    try:
        found = at_equal_size(
            [StepSample(1, ms) for ms in early],
            [StepSample(1, ms) for ms in late],
            samples_min=SAMPLES_MIN,
        )
    except TooFewSamples as few:
        return {"ok": False, "why": str(few)}
    return {
        "second": round(times_ms[1], 3),
        "last": round(times_ms[-1], 3),
        **{f"ratio_{name}": number for name, number in found.as_json().items()},
        "ratio_max": bound,
        "ok": found.high < bound,
    }


def strays(workers: Mapping[str, Any]) -> dict[str, int]:
    """Steps outside their modes, by role and kind."""
    return {
        f"{role} {kind}": count
        for role, worker in workers.items()
        for rank in worker.rank_counters
        for kind, count in rank.steps_by_kind.items()
        if kind not in lookup(worker.mode).step_kinds and count
    }


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the stack and judge it."""
    asked.work_dir.mkdir(parents=True, exist_ok=True)
    plan = plan_of(asked, model_of(asked))
    sizes, began_s = lengths(asked), time.monotonic()
    async with running(plan, lambda who, what: print(f"{who}: {what}", flush=True)) as stack:
        await stack.ready(asked.ready_s)
        found = await send(plan, sizes)
        workers = {role: await stack.describe(role, counters=True) for role in plan.modes}
    assert plan.trace_dir is not None
    series = {
        "ttft_ms": [one.ttft_ms for one in found],
        "prefill_ms": prefill_ms(list(read_spans(plan.trace_dir)), sizes),
        "tpot_ms": [one.tpot_ms for one in found],
    }
    judged = {name: compared(times, asked.ratio_max) for name, times in series.items()}
    outside = strays(workers)
    whole = all(len(times) == len(sizes) for times in series.values())
    return {
        "device": asked.device,
        "modes": {role: mode_of(asked, role) for role in plan.modes},
        "prompt_tokens": sizes[0],
        "control": asked.control,
        "crowds": CROWDS,
        "steps": {
            role: [dict(rank.steps_by_kind) for rank in worker.rank_counters]
            for role, worker in workers.items()
        },
        "outside_modes": outside,
        "series": {name: [round(ms, 3) for ms in times] for name, times in series.items()},
        "compared": judged,
        "ok": whole and not outside and all(judged[name]["ok"] for name in JUDGED),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.repeated", description=__doc__)
    add_arguments(made)
    add = made.add_argument
    add("--count", type=int, default=COUNT, help="long requests")
    add("--prompt-tokens", type=int, help="of a long request; empty: the device's default")
    add("--ratio-max", type=float, default=1.05, help="late over early, the interval's upper end")
    add("--control", action="store_true", help="longer prompts from the middle on")
    return made


def main(arguments: Sequence[str]) -> int:
    """Measure; 0 if late requests are no slower."""
    asked = parser().parse_args(arguments)
    asked.work_dir = Path(asked.work_dir).resolve()
    found = asyncio.run(measure(asked))
    told = environment_facts.collect(arguments, "bench.repeated") | found
    asked.out.write_text(json.dumps(told, indent=1), encoding="utf-8")
    for name, one in found["compared"].items():
        print(f"{name}: {one}")
    print(f"ok: {found['ok']}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
