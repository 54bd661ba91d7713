"""Prefill and decode over real gRPC: the same tokens as one engine, and nothing left behind."""

import asyncio
from dataclasses import replace

from splitwave.core.generation import FinishReason
from tests.integration.worker_stack import GREEDY, eventually, stack
from tests.unit.hand_router import HandRouter
from tests.unit.worker_rig import right_answer


async def test_split_tokens_equal_aggregated_tokens() -> None:
    async with stack() as s:
        router = HandRouter()
        s.connect(router)
        prompts = {f"r{n}": list(range(1, 2 + n * 7)) for n in range(1, 25)}
        sampling = replace(GREEDY, max_tokens=20, logprobs=2)
        async with asyncio.timeout(20.0):
            heard = {
                name: await s.start_one(router, f"{name}/0/1", prompt, sampling)
                for name, prompt in prompts.items()
            }
            for name, prompt in prompts.items():
                await heard[name].over.wait()
                assert heard[name].error is None, heard[name].error
                assert heard[name].token_ids == right_answer(prompt, sampling)
                assert heard[name].offsets == list(range(20))
                assert heard[name].finish is FinishReason.LENGTH
                assert len(heard[name].logprobs) == 19
        await eventually(s.is_empty)
        s.prefill.engine.check()
        s.decode.engine.check()
