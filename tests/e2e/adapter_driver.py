"""The adapter's e2e run, in a process of its own: `python -m tests.e2e.adapter_driver MODEL DIR`.

Forks vLLM's own engine for the aggregated run, then starts a prefill group and a decode group of
two ranks with expert parallelism, and writes what it saw to DIR/report.json for the tests.
"""

import asyncio
import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any  # JSON

from splitwave.engine.port import EngineDied, EngineRequest, Role
from splitwave.engine.vllm.config import SettingsError
from splitwave.engine.vllm.start import preload, start_group
from tests.e2e.adapter_cases import Case, cases, greedy, prompt, settings
from tests.e2e.adapter_pair import Caller, Pair, flat, going_on, nothing_held, within

LEASE_S = 600
"""So long that a leak cannot be taken for an expiry."""
SETTLE_S = 2.0


async def equality(pair: Pair) -> dict[str, Any]:
    """Generate every case, one after the other, then all at once."""
    one_by_one = {case.name: await pair.generate(case) for case in cases()}
    at_once = await asyncio.gather(*(pair.generate(case) for case in cases()))
    return {"one_by_one": one_by_one, "at_once": dict(zip(one_by_one, at_once, strict=True))}


def long_request(name: str, *, hold: bool = False, length: int = 200) -> EngineRequest:
    """Return a request to a prefill group that would run for long, or hold blocks."""
    return EngineRequest(
        engine_request_id=name,
        rank=0,
        token_ids=prompt(length, 3),
        sampling=greedy(500),
        hold=hold,
    )


async def pulling(prefill: Caller, name: str) -> EngineRequest:
    """Prefill a prompt and return the request with which decode goes on for long."""
    request = long_request(name, hold=True)
    first = await prefill.run(request)
    held = first[-1].held
    assert held is not None
    return going_on(name, 1, Case(name, list(request.token_ids), request.sampling), first, held)


async def aborts(pair: Pair) -> dict[str, Any]:
    """Abort at every stage; nothing may come after, and nothing may stay held."""
    prefill, decode = pair.prefill, pair.decode
    pulled = await bytes_pulled(decode)
    await decode.start(await pulling(prefill, "a"))
    await within(10, lambda: _true(len(decode.seen.get("a", ())) > 5))
    await decode.engine.abort(["a", "never seen"])
    seen = len(decode.seen["a"])
    decode_free = await within(SETTLE_S, lambda: nothing_held(decode.engine))

    for n in range(20):
        await decode.start(await pulling(prefill, f"pulling{n}"))
        await asyncio.sleep(n * 0.004)
        await decode.engine.abort([f"pulling{n}"])
    given_up = [f"pulling{n}" for n in range(20) if f"pulling{n}" not in decode.seen]
    await within(SETTLE_S, lambda: _true(len(decode.pulls_ended) == len(given_up)))
    pulls_free = await within(SETTLE_S, lambda: nothing_held(decode.engine))
    await prefill.engine.release([f"pulling{n}" for n in range(20)])

    for n in range(40):
        request = long_request(f"race{n}", hold=True, length=40)
        await prefill.start(request)
        await asyncio.sleep(n * 0.0005)
        await prefill.engine.abort([request.engine_request_id])
        # What had ended by then was reported as held, and is its owner's to release.
        ended = prefill.seen.get(request.engine_request_id)
        if ended and ended[-1].held:
            await prefill.engine.release([request.engine_request_id])
    return {
        "outputs_after_abort": len(decode.seen["a"]) - seen,
        "decode_free": decode_free,
        "given_up_while_pulling": len(given_up),
        "pulls_ended_as_given_up": sorted(decode.pulls_ended) == sorted(given_up),
        "pulls_free": pulls_free,
        "bytes_pulled": await bytes_pulled(decode) - pulled,
        "prefill_free": await within(SETTLE_S, lambda: nothing_held(prefill.engine)),
    }


async def bytes_pulled(decode: Caller) -> int:
    """Return what all pulls of a group have moved."""
    return sum(counts.bytes_pulled for counts in await decode.engine.counters())


async def _true(value: bool) -> bool:
    return value


async def releases(pair: Pair) -> dict[str, Any]:
    """Release what is held, what runs, and what has not come yet."""
    prefill = pair.prefill
    held = (await prefill.run(long_request("held", hold=True)))[-1].held
    used = (await prefill.engine.counters())[0].blocks_used
    began_s = time.monotonic()
    await prefill.engine.release(["held"])
    await prefill.engine.release(["held"])
    freed = await within(SETTLE_S, lambda: nothing_held(prefill.engine))
    freed_after_s = time.monotonic() - began_s

    await prefill.engine.release(["early"])
    early = (await prefill.run(long_request("early", hold=True, length=40)))[-1]

    for n in range(20):
        await prefill.start(long_request(f"running{n}", hold=True, length=40))
        await asyncio.sleep(n * 0.0005)
        await prefill.engine.release([f"running{n}"])
    eos = next(case for case in cases() if case.name == "eos at the first token")
    stopped = await pair.generate(eos)
    return {
        "held_blocks": held.block_count if held else None,
        "used_while_held": used,
        "freed": freed,
        "freed_after_s": freed_after_s,
        "early_holds": early.held is not None,
        "early_tokens": len(early.token_ids),
        "stopped": stopped["finish"],
        "free_at_last": await within(SETTLE_S, lambda: nothing_held(prefill.engine)),
    }


async def refusals(pair: Pair) -> dict[str, Any]:
    """Submit what must not reach an engine; each ends with a reason and nothing else suffers."""
    good = long_request("x")
    bad = {
        "no token": dataclasses.replace(good, token_ids=[]),
        "too long": dataclasses.replace(good, token_ids=[1] * 1024),
        "unknown token": dataclasses.replace(good, token_ids=[1, 100_000]),
        "rank": dataclasses.replace(good, rank=7),
        "temperature": dataclasses.replace(good, sampling=greedy(temperature=9.0)),
        "logit bias": dataclasses.replace(good, sampling=greedy(logit_bias={100_000: 1.0})),
        "logprobs": dataclasses.replace(good, sampling=greedy(logprobs=5000)),
    }
    found = {
        why: flat(await pair.prefill.run(dataclasses.replace(request, engine_request_id=why)))
        for why, request in bad.items()
    }
    found["no pull"] = flat(
        await pair.decode.run(dataclasses.replace(good, engine_request_id="no pull"))
    )
    one = await pair.generate(Case("one token", [5], greedy(temperature=0.8, seed=1)))
    found["one token from decode"] = one
    await pair.prefill.start(long_request("twice"))
    await within(10, lambda: _true(len(pair.prefill.seen.get("twice", ())) > 3))
    found["used twice"] = flat(await pair.prefill.run(long_request("twice")))
    after = len(pair.prefill.seen["twice"])
    await asyncio.sleep(0.2)
    found["used twice"]["outputs_after"] = len(pair.prefill.seen["twice"]) - after
    found["afterwards"] = await pair.generate(cases()[3])
    return found


async def speed(pair: Pair, count: int, tokens: int = 100) -> dict[str, float]:
    """Measure decode steps a second and the front's CPU a token, with `count` requests."""
    before, batches = time.process_time(), pair.decode.batches
    began_s = time.monotonic()
    many = [Case(f"speed{count}", prompt(40, 4), greedy(tokens)) for _ in range(count)]
    await asyncio.gather(*(pair.generate(case) for case in many))
    wall_s = time.monotonic() - began_s
    return {
        "wall_s": wall_s,
        "steps_per_s": (pair.decode.batches - batches) / wall_s / min(2, count),
        "front_cpu_us_per_token": (time.process_time() - before) / (count * tokens) * 1e6,
    }


async def deaths(model: Path, out: Path, pair: Pair) -> dict[str, Any]:
    """Kill a rank, and groups that still start."""
    decode, found = pair.decode, dict[str, Any]()
    pids = decode.engine.process_ids
    found["rank"] = await killed(decode, pids[1])
    try:
        await decode.engine.counters()
    except EngineDied as died:
        found["call after death"] = str(died.rank)
    await decode.engine.close()

    found["starts"] = await failed_starts(model, out)
    found["left"] = alive(pids)
    return found


async def failed_starts(model: Path, out: Path) -> dict[str, Any]:
    """Start groups that take too long, cannot load their weights, or are given up."""
    broken = out / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    found: dict[str, Any] = {}
    unknown = out / "unknown"
    unknown.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NoSuchModel"]
    (unknown / "config.json").write_text(json.dumps(config))
    for why, where, changes in (
        ("late", model, {"start_timeout_s": 0.3}),
        ("broken weights", broken, {"ranks": 2}),
        ("unknown architecture", unknown, {}),
    ):
        asked = settings(Role.PREFILL, where, out, 5740, group_id=why.replace(" ", "-"), **changes)
        try:
            await start_group(asked)
        except EngineDied as died:
            found[why] = [str(died), died.rank, died.log_tail]
        except SettingsError as refused:
            found[why] = [str(refused), None, ""]
    given_up = asyncio.create_task(start_group(settings(Role.PREFILL, model, out, 5740, epoch=4)))
    await asyncio.wait({given_up}, timeout=0.5)
    given_up.cancel()
    await asyncio.wait({given_up}, timeout=10)
    found["cancelled"] = given_up.cancelled()
    return found


async def killed(caller: Caller, pid: int) -> dict[str, Any]:
    """Kill a process and report how the group's end was told, and how soon."""
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    told = await caller.ended()
    return {"told": told, "after_s": time.monotonic() - began_s, "pid": pid}


def alive(pids: list[int]) -> list[int]:
    """Return which of these processes still exist."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def children() -> list[str]:
    """Return the names of this process's children, whoever started them."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in own]


async def drive(model: Path, out: Path) -> dict[str, Any]:
    """Start both groups, run every scenario, stop everything."""
    report: dict[str, Any] = {"progress": []}
    began_s = time.monotonic()
    prefill = Caller(
        await start_group(
            settings(Role.PREFILL, model, out, 5700, lease_ttl_s=LEASE_S, prefix_caching=True),
            on_progress=lambda rank, words: report["progress"].append(f"{rank}: {words}"),
        )
    )
    middle_s = time.monotonic()
    decode = Caller(
        await start_group(settings(Role.DECODE, model, out, 5710, ranks=2, expert_parallel=True))
    )
    report["boot_s"] = {"prefill": middle_s - began_s, "decode": time.monotonic() - middle_s}
    report["layouts"] = [prefill.engine.description.kv_layout, decode.engine.description.kv_layout]
    report["versions"] = dict(decode.engine.description.versions)
    pair = Pair(prefill, decode)
    report["equality"] = await equality(pair)
    report["aborts"] = await aborts(pair)
    report["releases"] = await releases(pair)
    report["refusals"] = await refusals(pair)
    report["speed"] = {count: await speed(pair, count) for count in (1, 8, 16)}
    report["counters"] = [dataclasses.asdict(c) for c in await decode.engine.counters()]
    cached = [o.cached_tokens for outputs in prefill.seen.values() for o in outputs]
    report["cached_tokens_max"] = max(cached)
    report["block_bytes"] = decode.engine.description.block_bytes
    report["blocks_handed_over"] = pair.blocks_handed_over
    report["first_position_min"] = min(pair.first_positions)
    report["deaths"] = await deaths(model, out, pair)
    pids = prefill.engine.process_ids
    began_s = time.monotonic()
    await prefill.engine.close()
    await prefill.engine.close()
    report["close"] = {
        "told": await prefill.ended(),
        "after_s": time.monotonic() - began_s,
        "left": alive(pids),
        "children": children(),
    }
    return report


def aggregated(model: Path, out: Path) -> None:
    """Fork, and run every case on one plain vLLM engine behind vLLM's own front end."""
    pid = os.fork()
    if pid == 0:
        from tests.e2e.adapter_oracle import run

        os._exit(run(model, out / "aggregated.json"))
    assert os.waitpid(pid, 0)[1] == 0, "the aggregated run failed"


def main() -> None:
    """Run everything and write the report."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    began_s = time.monotonic()
    preload()
    preload_s = time.monotonic() - began_s
    threads = len(list(Path("/proc/self/task").iterdir()))
    aggregated(model, out)
    report = asyncio.run(drive(model, out))
    own = resource.getrusage(resource.RUSAGE_SELF)
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    report["preload"] = {"wall_s": preload_s, "threads": threads}
    report["cpu_s"] = {
        "front": own.ru_utime + own.ru_stime,
        "engines": others.ru_utime + others.ru_stime,
    }
    report["wall_s"] = time.monotonic() - began_s
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
