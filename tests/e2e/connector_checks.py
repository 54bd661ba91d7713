"""Checks of the handoff connector and the guard on real engines over NIXL; see `checks.py`."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any  # the connector's parameters

from tests.e2e.checks import collect
from tests.e2e.raw_engine import Outcome, RawEngine, counted_prompt, transfer

GUARD = "splitwave.engine.vllm.guard.GuardScheduler"
GUARD_ASYNC = "splitwave.engine.vllm.guard.AsyncGuardScheduler"
LENGTHS = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 255, 256, 300)
LEASE_S = 600


class Stack:
    """A prefill and a decode engine; and two of each on which something is different."""

    def __init__(self, model: str) -> None:
        def prefill(port: int, lease_s: int) -> RawEngine:
            config = transfer("kv_producer", kv_lease_duration=lease_s)
            return RawEngine(model, port, kv_transfer_config=config)

        def decode(port: int, scheduler: str) -> RawEngine:
            config = transfer("kv_consumer", kv_lease_duration=LEASE_S)
            return RawEngine(
                model,
                port,
                kv_transfer_config=config,
                scheduler_cls=scheduler,
                num_gpu_blocks_override=24,
                max_model_len=512,
            )

        self.prefill = prefill(25600, LEASE_S)
        self.decode = decode(25610, GUARD)
        self.prefill_short_lease = prefill(25620, 1)
        os.environ["SPLITWAVE_FAULTS"] = "no_release,slow_pulls"
        self.prefill_without_release = prefill(25630, LEASE_S)
        self.decode_slow = decode(25640, GUARD_ASYNC)
        os.environ["SPLITWAVE_FAULTS"] = "no_bytes"
        self.decode_without_bytes = decode(25650, GUARD_ASYNC)

    def close(self) -> None:
        for engine in vars(self).values():
            engine.close()


async def blocks_used(engine: RawEngine) -> int:
    """KV blocks that requests of the engine hold."""
    counters = await engine.call("splitwave_counters")
    return int(counters["blocks_used"])


async def freed_after_s(engine: RawEngine, limit_s: float = 5.0) -> float | None:
    """How long until the engine holds no block; None if not within the limit."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + limit_s:
        if await blocks_used(engine) == 0:
            return time.monotonic() - start_s
        await asyncio.sleep(0.01)
    return None


def ending(outcome: Outcome) -> list[object]:
    """How a request ended: finish, stop reason, number of ends, number of tokens."""
    return [outcome.finish, outcome.stop, outcome.ends, len(outcome.tokens)]


async def warm(stack: Stack) -> list[dict[str, Any]]:
    """A dummy step of an idle engine counts as one; a second call does nothing."""
    await stack.prefill.call("splitwave_warm")
    await stack.prefill.call("splitwave_warm")
    counters: dict[str, Any] = await stack.prefill.call("splitwave_counters")
    return [counters]


async def lengths(stack: Stack) -> list[dict[str, Any]]:
    """Prefill's token is kept: decode continues behind it, at every length around a block."""
    facts = await stack.decode.call("splitwave_facts")
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        prompt = counted_prompt(length)
        whole = await stack.prefill.run(f"whole-{length}", prompt, 8)
        first = await stack.prefill.prefill(f"first-{length}", prompt)
        assert first.params is not None
        rest = await stack.decode.run(
            f"rest-{length}", prompt + first.tokens, 7, params=first.params
        )
        rows.append(
            {
                "length": length,
                "whole": whole.tokens,
                "split": first.tokens + rest.tokens,
                "pulled": rest.pulled,
                "blocks": len(first.params["remote_block_ids"][0]),
                "block_bytes": facts["block_bytes"],
                "lease_left_s": first.params["splitwave_expires_at_s"] - first.at_s,
                "end": ending(rest),
            }
        )
    return rows


async def every_token_from_decode(stack: Stack) -> list[dict[str, Any]]:
    """Prefill's token is discarded: decode computes the last prompt token again."""
    facts = await stack.decode.call("splitwave_facts")
    rows: list[dict[str, Any]] = []
    for length in (2, 32, 33, 100):
        prompt = counted_prompt(length)
        whole = await stack.prefill.run(f"whole2-{length}", prompt, 8)
        first = await stack.prefill.prefill(f"first2-{length}", prompt)
        split = await stack.decode.run(f"all-{length}", prompt, 8, params=first.params)
        rows.append(
            {
                "length": length,
                "whole": whole.tokens,
                "split": split.tokens,
                "pulled": split.pulled,
                "block_bytes": facts["block_bytes"],
            }
        )
    return rows


async def release_when_idle(stack: Stack) -> dict[str, Any]:
    """A lease of 600 s ends at once by release, also of several; repeats do nothing."""
    names = [f"held-{i}" for i in range(4)]
    for name in names:
        await stack.prefill.prefill(name, counted_prompt(200))
    held = await stack.prefill.call("splitwave_counters")
    await stack.prefill.call("splitwave_release", [*names[:2], "nobody"])
    await asyncio.sleep(0.2)
    half = await blocks_used(stack.prefill)
    await stack.prefill.call("splitwave_release", names)
    await stack.prefill.call("splitwave_release", names)
    freed_s = await freed_after_s(stack.prefill)
    await stack.prefill.call("splitwave_release", names)
    after = await stack.prefill.run("alive-after-release", counted_prompt(5), 1)
    return {
        "held": [held["blocks_used"], held["leases_live"]],
        "half": half,
        "freed_s": freed_s,
        "after": ending(after),
    }


async def release_when_running(stack: Stack) -> dict[str, Any]:
    """A request that still runs is aborted by its release: no output, no lease."""
    running = await stack.prefill.add("long", counted_prompt(100), 800)
    await asyncio.sleep(0.2)
    await stack.prefill.call("splitwave_release", ["long"])
    freed_s = await freed_after_s(stack.prefill)
    return {"ends": running.ends, "freed_s": freed_s}


async def release_crossing_a_pull(stack: Stack) -> dict[str, Any]:
    """Releases at any moment of a pull crash nobody, and nothing stays held."""
    finishes: dict[str, int] = {}
    for i in range(24):
        first = await stack.prefill.prefill(f"cross-{i}", counted_prompt(60, seed=i))
        rest = await stack.decode.add(
            f"crossed-{i}", counted_prompt(60, seed=i) + first.tokens, 2, params=first.params
        )
        await asyncio.sleep(i % 8 * 0.002)
        await stack.prefill.call("splitwave_release", [f"cross-{i}"])
        await asyncio.wait_for(rest.done, 20)
        finishes[str(rest.finish)] = finishes.get(str(rest.finish), 0) + 1
    return {
        "finishes": finishes,
        "prefill_freed_s": await freed_after_s(stack.prefill),
        "decode_freed_s": await freed_after_s(stack.decode),
    }


async def pull_from_an_idle_prefill(stack: Stack) -> list[object]:
    """A pull that comes after the lease still ends: as it would at the fence, which refuses it."""
    prompt = counted_prompt(100)
    first = await stack.prefill.prefill("idle", prompt)
    await stack.prefill.call("splitwave_release", ["idle"])
    await asyncio.sleep(0.3)
    rest = await stack.decode.add("idle-rest", prompt + first.tokens, 2, params=first.params)
    await asyncio.wait_for(rest.done, 5)
    return ending(rest)


async def release_crossing_expiry(stack: Stack) -> dict[str, Any]:
    """Releases around the moment of expiry crash nobody; no lease ends before its time."""
    engine = stack.prefill_short_lease
    firsts = [await engine.prefill(f"short-{i}", counted_prompt(40)) for i in range(12)]
    ends_s = [first.params["splitwave_expires_at_s"] for first in firsts if first.params]
    early: list[float] = []
    for i, end_s in enumerate(ends_s):
        while time.monotonic() < end_s - 0.02:
            leases = (await engine.call("splitwave_counters"))["leases_live"]
            if leases < len(ends_s) - i and time.monotonic() < end_s:
                early.append(end_s - time.monotonic())
            await asyncio.sleep(0.002)
        await asyncio.sleep(i % 5 * 0.01)
        await engine.call("splitwave_release", [f"short-{i}"])
    freed_s = await freed_after_s(engine)
    after = await engine.run("alive-after-expiry", counted_prompt(5), 1)
    return {"ended_early_s": early, "freed_s": freed_s, "after": ending(after)}


async def release_forgotten(stack: Stack) -> dict[str, Any]:
    """Control: with releases forgotten on purpose, blocks stay held."""
    engine = stack.prefill_without_release
    await engine.prefill("kept", counted_prompt(40))
    await engine.call("splitwave_release", ["kept"])
    await asyncio.sleep(1.0)
    return {"blocks_used": await blocks_used(engine)}


async def guard_refusals(stack: Stack) -> dict[str, Any]:
    """What cannot decode here ends at once, with the reason, and the engine goes on."""
    decode = stack.decode
    prompt = counted_prompt(70)
    first = await stack.prefill.prefill("guarded", prompt)
    one = await stack.prefill.prefill("guarded-one", prompt[:1])
    assert first.params is not None
    few_blocks = first.params | {"remote_block_ids": [first.params["remote_block_ids"][0][:1]]}
    no_host = first.params | {"remote_host": None}
    extra = prompt + first.tokens
    tried = {
        "no handoff": await decode.run("no-handoff", prompt, 4),
        "two tokens to compute": await decode.run("two", [*extra, 7], 4, params=first.params),
        "position 0": await decode.run("zero", prompt[:1], 4, params=one.params),
        "too few blocks": await decode.run("few", extra, 4, params=few_blocks),
        "no host": await decode.run("no-host", extra, 4, params=no_host),
        "prompt shorter than the handoff": await decode.run(
            "cut", prompt[:60], 4, params=first.params
        ),
    }
    good = await decode.run("good", extra, 4, params=first.params)
    await stack.prefill.call("splitwave_release", ["guarded-one"])
    return {what: ending(outcome) for what, outcome in tried.items()} | {"good": ending(good)}


async def failed_pull(stack: Stack) -> dict[str, Any]:
    """A pull from an engine that is not there ends the request, and the decode engine goes on."""
    prompt = counted_prompt(70)
    first = await stack.prefill.prefill("failing", prompt)
    assert first.params is not None
    stale = first.params | {"remote_engine_id": "somebody-else"}
    failed = await stack.decode.run("failed", prompt + first.tokens, 4, params=stale)
    good = await stack.decode.run("good-again", prompt + first.tokens, 4, params=first.params)
    return {"failed": ending(failed), "good": ending(good)}


async def preemption(stack: Stack) -> list[dict[str, Any]]:
    """More than fits: some end with the tokens so far, and can be resumed from them."""
    prompts = [counted_prompt(100, seed=40 + i) for i in range(4)]
    firsts = [await stack.prefill.prefill(f"many-{i}", p) for i, p in enumerate(prompts)]
    running = [
        await stack.decode.add(f"rest-many-{i}", prompt + first.tokens, 199, params=first.params)
        for i, (prompt, first) in enumerate(zip(prompts, firsts, strict=True))
    ]
    await asyncio.wait_for(asyncio.gather(*(outcome.done for outcome in running)), 40)
    rows: list[dict[str, Any]] = []
    for i, (prompt, first, rest) in enumerate(zip(prompts, firsts, running, strict=True)):
        so_far = first.tokens + rest.tokens
        if len(so_far) < 200:
            again = await stack.prefill.prefill(f"again-{i}", prompt + so_far)
            so_far += again.tokens
            last = await stack.decode.run(
                f"last-{i}", prompt + so_far, 200 - len(so_far), params=again.params
            )
            so_far += last.tokens
        whole = await stack.prefill.run(f"whole-many-{i}", prompt, 200)
        rows.append({"end": ending(rest), "whole": whole.tokens, "split": so_far})
    return rows


async def abort_while_waiting(stack: Stack) -> dict[str, Any]:
    """Abort right after submission: the end of the pull is said once, and both sides are empty."""
    ends: list[int] = []
    for i in range(8):
        first = await stack.prefill.prefill(f"left-{i}", counted_prompt(60))
        rest = await stack.decode.add(
            f"left-rest-{i}", counted_prompt(60) + first.tokens, 50, params=first.params
        )
        await stack.decode.abort(f"left-rest-{i}")
        await asyncio.sleep(0.15)
        ends.append(rest.pull_ends if rest.outputs == 0 else 1)
    return {
        "pull_ends": ends,
        "prefill_freed_s": await freed_after_s(stack.prefill),
        "decode_freed_s": await freed_after_s(stack.decode),
    }


async def abort_during_the_pull(stack: Stack) -> dict[str, Any]:
    """Blocks of a running transfer stay held until it ends, and only then its end is said."""
    prompt = counted_prompt(60)
    first = await stack.prefill.prefill("slow", prompt)
    rest = await stack.decode_slow.add("slow-rest", prompt + first.tokens, 8, params=first.params)
    await asyncio.sleep(0.7)
    await stack.decode_slow.abort("slow-rest")
    await asyncio.sleep(0.15)
    during = [await blocks_used(stack.decode_slow), rest.pull_ends]
    freed_s = await freed_after_s(stack.decode_slow)
    await asyncio.sleep(0.1)
    return {
        "during": during,
        "freed_s": freed_s,
        "pull_ends": rest.pull_ends,
        "outputs": rest.outputs,
    }


async def nothing_moved(stack: Stack) -> list[object]:
    """A pull without bytes ends the request before its first step."""
    prompt = counted_prompt(60)
    first = await stack.prefill.prefill("empty", prompt)
    rest = await stack.decode_without_bytes.run(
        "empty-rest", prompt + first.tokens, 8, params=first.params
    )
    return ending(rest)


async def counters(stack: Stack) -> dict[str, Any]:
    """What the engines counted over all of the above."""
    return {
        "prefill": await stack.prefill.call("splitwave_counters"),
        "decode": await stack.decode.call("splitwave_counters"),
        "facts": await stack.decode.call("splitwave_facts"),
    }


CHECKS = [
    warm,
    lengths,
    every_token_from_decode,
    release_when_idle,
    release_when_running,
    release_crossing_a_pull,
    pull_from_an_idle_prefill,
    release_crossing_expiry,
    release_forgotten,
    guard_refusals,
    failed_pull,
    preemption,
    abort_while_waiting,
    abort_during_the_pull,
    nothing_moved,
    counters,
]


async def main(results: Path, model: str) -> None:
    stack = Stack(model)
    try:
        await collect(results, stack, CHECKS)
    finally:
        stack.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
