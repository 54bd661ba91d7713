"""One attempt at a decode worker: its tokens, its fence, its ends, and what is left behind."""

import asyncio

from splitwave.core.generation import FinishReason
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter
from tests.unit.worker_rig import GREEDY, rig, right_answer

PROMPT = list(range(40, 60))


def test_split_tokens_equal_aggregated_tokens() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            r.connect(router)
            for keep in (True, False):
                heard = await r.start_one(router, f"a/{keep}/1", PROMPT, keep=keep)
                await heard.over.wait()
                assert heard.token_ids == right_answer(PROMPT, GREEDY)
                assert heard.offsets == list(range(8))
                assert heard.finish is FinishReason.LENGTH
            await asyncio.sleep(0.5)
            r.check()
            assert r.is_empty()
            assert r.peers.confirmed == ["a/True/1", "a/False/1"]
            assert r.peers.released == []

    run(main())
