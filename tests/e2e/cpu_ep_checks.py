"""Checks of expert parallelism over data-parallel CPU ranks in lock-step; see `checks.py`."""

import asyncio
import sys
from pathlib import Path
from typing import Any  # the connector's parameters

from tests.e2e.checks import collect
from tests.e2e.connector_checks import GUARD, blocks_used, ending
from tests.e2e.raw_engine import Outcome, RawEngine, counted_prompt, transfer

RANKS = 2
PROMPTS = 24
LENGTHS = (1, 3, 17, 31, 32, 33, 64, 127, 128, 129, 300, 511)


class Stack:
    """One engine as the reference; a prefill and a decode group of two ranks each."""

    def __init__(self, model: str) -> None:
        ranks: dict[str, object] = {
            "data_parallel_size": RANKS,
            "enable_expert_parallel": True,
            "all2all_backend": "allgather_reducescatter",
        }
        self.model, self.ranks = model, ranks
        self.reference = RawEngine(model, 25700)
        self.prefill = RawEngine(
            model, 25710, kv_transfer_config=transfer("kv_producer", kv_lease_duration=600), **ranks
        )
        self.decode = RawEngine(
            model,
            25720,
            kv_transfer_config=transfer("kv_consumer", kv_lease_duration=600),
            scheduler_cls=GUARD,
            **ranks,
        )

    def close(self) -> None:
        for engine in (self.reference, self.prefill, self.decode):
            engine.close()


def prompts() -> list[list[int]]:
    return [counted_prompt(LENGTHS[i % len(LENGTHS)], seed=100 + i) for i in range(PROMPTS)]


async def warm(stack: Stack) -> list[dict[str, Any]]:
    """Idle ranks take one step together when all are asked to, and only once."""
    await stack.decode.call_all("splitwave_warm")
    await stack.decode.call_all("splitwave_warm")
    return await stack.decode.call_all("splitwave_counters")


async def aggregated(stack: Stack) -> list[list[list[int]]]:
    """All prompts at once, whole requests: tokens of one engine, and of two ranks."""
    tokens: list[list[list[int]]] = []
    for engine in (stack.reference, stack.prefill):
        ranks = len(engine.client.core_engines)
        outcomes = await asyncio.gather(
            *(
                engine.run(f"whole-{i}", prompt, 24, rank=i % RANKS if ranks > 1 else None)
                for i, prompt in enumerate(prompts())
            )
        )
        tokens.append([outcome.tokens for outcome in outcomes])
    return tokens


async def handed_over(stack: Stack) -> dict[str, Any]:
    """All prompts at once, prefilled on one rank and decoded on each: tokens and bytes."""
    facts = await stack.decode.call_all("splitwave_facts")

    async def one(i: int, prompt: list[int]) -> Outcome:
        first = await stack.prefill.prefill(f"first-{i}", prompt, rank=i % RANKS)
        rest = await stack.decode.run(
            f"rest-{i}", prompt + first.tokens, 23, params=first.params, rank=i // 2 % RANKS
        )
        rest.tokens[:0] = first.tokens
        return rest

    outcomes = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts())))
    return {
        "tokens": [outcome.tokens for outcome in outcomes],
        "pulled": [outcome.pulled for outcome in outcomes],
        "lengths": [len(prompt) for prompt in prompts()],
        "block_bytes": [fact["block_bytes"] for fact in facts],
    }


async def refused_in_lock_step(stack: Stack) -> dict[str, Any]:
    """Refusals on an idle group, and on one rank while the other works: each said once."""
    idle = [await stack.decode.run(f"refused-{r}", [5] * 9, 4, rank=r) for r in range(RANKS)]
    first = await stack.prefill.prefill("busy", counted_prompt(60), rank=0)
    busy = await stack.decode.add(
        "busy-rest", counted_prompt(60) + first.tokens, 200, params=first.params, rank=0
    )
    await asyncio.wait_for(busy.began.wait(), 10)
    beside = [await stack.decode.run(f"beside-{i}", [5] * 9, 4, rank=i % RANKS) for i in range(6)]
    still_busy = not busy.done.done()
    await asyncio.wait_for(busy.done, 30)
    await asyncio.sleep(0.2)
    return {
        "refused": [ending(outcome) for outcome in idle + beside],
        "busy": ending(busy),
        "beside_work": still_busy,
        "in_flight": len(stack.decode.client.reqs_in_flight),
    }


async def released(stack: Stack) -> list[int]:
    """Releases reach the rank that holds, idle as it is."""
    for rank in range(RANKS):
        await stack.prefill.prefill(f"held-{rank}", counted_prompt(40), rank=rank)
        await stack.prefill.call("splitwave_release", [f"held-{rank}"], rank=rank)
    await asyncio.sleep(0.3)
    assert await blocks_used(stack.prefill) == 0
    counters = await stack.prefill.call_all("splitwave_counters")
    return [rank["blocks_used"] for rank in counters]


async def counters(stack: Stack) -> dict[str, list[dict[str, Any]]]:
    """What each rank counted over all of the above."""
    return {
        "prefill": await stack.prefill.call_all("splitwave_counters"),
        "decode": await stack.decode.call_all("splitwave_counters"),
    }


async def compiled(stack: Stack) -> dict[str, Any]:
    """The same prompts, handed over to decode ranks whose model is compiled."""
    engine = RawEngine(
        stack.model,
        25730,
        enforce_eager=False,
        max_num_batched_tokens=32,
        kv_transfer_config=transfer("kv_consumer", kv_lease_duration=600),
        scheduler_cls=GUARD,
        **stack.ranks,
    )

    async def one(i: int, prompt: list[int]) -> list[int]:
        first = await stack.prefill.prefill(f"compiled-first-{i}", prompt, rank=i % RANKS)
        rest = await engine.run(
            f"compiled-{i}", prompt + first.tokens, 23, params=first.params, rank=i % RANKS
        )
        return first.tokens + rest.tokens

    try:
        return {
            "tokens": await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts()))),
            "counters": await engine.call_all("splitwave_counters"),
        }
    finally:
        engine.close()


CHECKS = [warm, aggregated, handed_over, refused_in_lock_step, released, counters, compiled]


async def main(results: Path, model: str) -> None:
    stack = Stack(model)
    try:
        await collect(results, stack, CHECKS)
    finally:
        stack.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
