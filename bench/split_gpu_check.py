"""A split on shared devices is right: the tokens of an aggregated run, and nothing outside a mode.

Prefill and decode groups of two ranks each, both on the same two GPUs (or on the CPU, whole, with
the tiny model), behind a router, asked by HTTP and by gRPC. No claim of speed comes from this: the
groups take turns on their devices.

    python -m bench.split_gpu_check --device cpu --work-dir check --out check.json

Ends with 0 if every claim holds; `--faults` breaks something on purpose, which must not.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any  # JSON

import aiohttp

from bench.split_gpu_stack import add_arguments, model_of, plan_of, settings_of
from bench.split_gpu_verdict import Given, Reference, Seen, judge
from services.cli.plan import Plan
from services.cli.stack import Stack, channel, running
from splitwave.core.generation import Sampling
from splitwave.core.worker import WorkerDescription
from splitwave.runtime.tracing_files import read_spans
from splitwave.wire.client import Ask, generate

ROOT = Path(__file__).parents[1]
LENGTHS = {
    "cpu": (2, 31, 32, 33, 64, 100, 257, 600),
    "cuda": (2, 31, 32, 33, 64, 100, 257, 600, 1024, 1500, 2049, 3001),
}
"""Tokens of prompts: around blocks' edges, and as long as microbatches need."""
WAYS = ("http", "http stream", "grpc")
TOKENS = 12
LOGPROBS = 5
ASK_S = 200.0
FREED_S = 10.0
AGGREGATED_S = 400.0


def prompts(device: str) -> dict[str, list[int]]:
    """Prompts of text by name, the same in every run."""
    found = {}
    for length in LENGTHS[device]:
        draw = random.Random(f"split {length}")  # reproducible, not secret
        found[f"length {length}"] = draw.choices(range(ord(" "), ord("~")), k=length)
    return found


def sampling(logprobs: int | None = None) -> Sampling:
    """Greedy, as long as was asked."""
    return Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=logprobs)


def aggregated(asked: argparse.Namespace, model: Path) -> dict[str, Reference]:
    """The tokens that one plain engine gives, in a process of its own."""
    out = asked.work_dir / "aggregated.json"
    settings = settings_of(asked, "prefill")
    told = {
        "model": str(model),
        "dtype": settings.get("dtype", "float32"),
        "block": int(settings.get("block_size_tokens", "32")),
        "device": asked.device,
    }
    if out.exists() and (kept := json.loads(out.read_text(encoding="utf-8")))["told"] == told:
        return references(kept["rows"])  # of an earlier run in this folder
    environment = os.environ | {
        "SPLITWAVE_FORK": "1",
        "SPLITWAVE_FAULTS": "",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "bench.split_gpu_check", "--aggregated", json.dumps(told), str(out)],
        cwd=ROOT, env=environment, timeout=AGGREGATED_S, check=True,
    )  # fmt: skip
    return references(json.loads(out.read_text(encoding="utf-8"))["rows"])


def references(rows: dict[str, Any]) -> dict[str, Reference]:
    """What the aggregated engine's process has written."""
    return {
        name: Reference(
            row["tokens"], [{int(k): v for k, v in each.items()} for each in row["top"]]
        )
        for name, row in rows.items()
    }


def answer_aggregated(told: dict[str, Any], out: Path) -> int:
    """The child's part of `aggregated`."""
    from splitwave.engine.vllm.aggregated import PlainSettings, Question, answer
    from splitwave.engine.vllm.start import preload

    preload()
    asked = prompts(told["device"])
    settings = PlainSettings(
        model_path=Path(told["model"]),
        dtype=told["dtype"],
        block_size_tokens=told["block"],
        length_max_tokens=max(map(len, asked.values())) + 2 * TOKENS,
    )
    questions = [Question(ids, sampling(LOGPROBS)) for ids in asked.values()]
    answers = asyncio.run(answer(settings, questions))
    rows = {
        name: {"tokens": list(one.token_ids), "top": [dict(row) for row in one.logprobs]}
        for name, one in zip(asked, answers, strict=True)
    }
    out.write_text(json.dumps({"told": told, "rows": rows}), encoding="utf-8")
    return 0


async def ask_all(plan: Plan, device: str, rounds: int) -> list[Given]:
    """Each prompt each way: one after the other, and then all at once, so often."""
    asked = prompts(device)
    async with (
        aiohttp.ClientSession(
            f"http://{plan.router_http}", timeout=aiohttp.ClientTimeout(total=ASK_S)
        ) as http,
        channel(plan.router_grpc) as grpc_channel,
    ):

        async def one(name: str, way: str) -> Given:
            if way == "grpc":
                ask = Ask(prompt=asked[name], sampling=sampling())
                parts = [part async for part in generate(grpc_channel, ask, ASK_S)]
                ids = [token for part in parts for token in part.token_ids]
            else:
                ids = await _by_http(http, plan.served_model, asked[name], way.endswith("stream"))
            return Given(name, way, len(asked[name]), ids)

        alone = [await one(name, WAYS[at % len(WAYS)]) for at, name in enumerate(asked)]
        for _ in range(rounds):
            alone += await asyncio.gather(*(one(name, way) for name in asked for way in WAYS))
        return alone


async def _by_http(
    http: aiohttp.ClientSession, model: str, prompt: Sequence[int], streamed: bool
) -> list[int]:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream": streamed,
    }  # fmt: skip
    async with http.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        if not streamed:
            ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return ids
        found: list[int] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"a stream failed: {event['error']}")
                for choice in event["choices"]:
                    found += choice.get("token_ids", [])
        return found


async def _settled(stack: Stack) -> dict[str, WorkerDescription]:
    """Both workers once nothing is held, or after a while."""
    until_s = time.monotonic() + FREED_S
    while True:
        found = {role: await stack.describe(role, counters=True) for role in ("prefill", "decode")}
        held = sum(
            rank.blocks_used + rank.leases_live
            for worker in found.values()
            for rank in worker.rank_counters
        )
        if not held or time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.1)


async def check(asked: argparse.Namespace) -> dict[str, Any]:
    """Run everything and judge it."""
    asked.work_dir.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()

    def say(who: str, what: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f}s] {who}: {what}", flush=True)

    model = model_of(asked)
    references: dict[str, Reference] = {}
    if asked.engine == "vllm":
        references = await asyncio.to_thread(aggregated, asked, model)
        say("aggregated", f"{len(references)} answers")
    plan = plan_of(asked, model)
    if asked.faults:
        plan = replace(plan, environment_more={"SPLITWAVE_FAULTS": asked.faults})
    async with running(plan, say) as stack:
        await stack.ready(asked.ready_s)
        given = await ask_all(plan, asked.device, asked.rounds)
        workers = await _settled(stack)
    say("asked", f"{len(given)} answers")
    if asked.engine == "sim":  # Nothing to compare with but one way with the others.
        references = {x.name: Reference(x.token_ids, ()) for x in given if x.way == "grpc"}
    assert plan.trace_dir is not None
    seen = Seen(
        dtype=settings_of(asked, "prefill").get("dtype", "float32"),
        references=references,
        given=given,
        workers=workers,
        spans=list(read_spans(plan.trace_dir)),
    )
    checks = judge(seen)
    return {
        "device": asked.device,
        "modes": dict(plan.modes),
        "engine": asked.engine,
        "faults": asked.faults,
        "versions": dict(workers["decode"].versions),
        "ok": not any(each.wrong for each in checks),
        "checks": [each.as_json() for each in checks],
        "seconds": round(time.monotonic() - began_s, 1),
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="bench.split_gpu_check", description=__doc__)
    add_arguments(made)
    made.add_argument("--rounds", type=int, default=1, help="of all prompts all ways at once")
    made.add_argument("--faults", default="", help="in the workers; see docs on SPLITWAVE_FAULTS")
    return made


def main(arguments: Sequence[str]) -> int:
    """Check; 0 if all holds."""
    if arguments[:1] == ["--aggregated"]:
        return answer_aggregated(json.loads(arguments[1]), Path(arguments[2]))
    asked = parser().parse_args(arguments)
    asked.work_dir = asked.work_dir.resolve()
    found = asyncio.run(check(asked))
    asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for each in found["checks"]:
        wrong = "; ".join(each["wrong"][:3])
        print(f"{'ok  ' if each['ok'] else 'FAIL'} {each['name']}{': ' if wrong else ''}{wrong}")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
