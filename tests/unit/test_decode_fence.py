"""The fence when things go wrong with it: a handoff read twice, and a question that fails."""

import asyncio
from dataclasses import replace

import pytest

from splitwave.core.errors import Reason
from splitwave.core.handoff import Handoff
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter, submission, tokens_of
from tests.unit.test_decode_attempts import PROMPT, assert_empty, one
from tests.unit.worker_rig import GREEDY, PREFILL, rig, right_answer

SMALL_PREFILL = replace(PREFILL, blocks_per_rank=20, model_len_max_tokens=256)


def test_a_handoff_that_was_pulled_once_is_confirmed_to_no_second_reader() -> None:
    async def main() -> None:
        async with rig(SMALL_PREFILL) as r:
            router = HandRouter()
            r.connect(router)
            result = await r.prefill_one("a/0/1", PROMPT)
            assert result.handoff is not None
            tokens, rest = PROMPT + tokens_of(result), replace(GREEDY, max_tokens=7)
            first = router.submit(
                submission("a/0/1", await router.grant(), result.handoff, tokens, rest)
            )
            await first.over.wait()
            assert first.token_ids == right_answer(PROMPT, GREEDY)[1:]

            for n in range(40):  # What it held is given to others.
                await r.prefill_one(f"other{n}", [n] * 100)
                r.prefill.release(f"other{n}")
            second = router.submit(
                submission("a/0/2", await router.grant(), result.handoff, tokens, rest)
            )
            await second.over.wait()

            assert second.token_ids == []
            assert second.error is not None
            await assert_empty(r)

    run(main())


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
def test_a_question_that_fails_in_any_way_ends_its_attempt(kind: type[BaseException]) -> None:
    """A closed channel raises what is no ServingError; the attempt must not wait for its stall."""

    async def main() -> None:
        async with rig(replace(PREFILL, lease_ttl_s=600.0)) as r:

            async def confirm(handoff: Handoff, traceparent: str = "") -> float:
                raise kind("the channel is closed")

            r.peers.confirm = confirm  # type: ignore[method-assign]  # the one thing that fails
            _, heard = await one(r)
            await asyncio.wait_for(heard.over.wait(), 5.0)

            assert heard.error is not None
            assert heard.error.reason is Reason.HANDOFF_EXPIRED
            assert heard.token_ids == right_answer(PROMPT, GREEDY)[:1]
            assert r.peers.released == ["a/0/1"]
            await assert_empty(r)

    run(main())


def test_a_release_that_fails_in_any_way_is_tried_again() -> None:
    async def main() -> None:
        async with rig(replace(PREFILL, lease_ttl_s=600.0)) as r:
            release, failures = r.peers.release, [RuntimeError("the channel is closed")]

            async def fail_once(handoff: Handoff, traceparent: str = "") -> None:
                if failures:
                    raise failures.pop()
                await release(handoff, traceparent)

            r.peers.release = fail_once  # type: ignore[method-assign]  # the one thing that fails
            r.peers.lost_calls = 1  # So that there is something to release.
            _, heard = await one(r)
            await heard.over.wait()
            await assert_empty(r)

    run(main())
