"""Where prompts go when the prefill groups are not certified for the same ones."""

import asyncio
from dataclasses import replace

import pytest

from splitwave.core.errors import Reason, ServingError
from tests.fakes import now_s
from tests.unit.test_router_prefill_pool import Pool, play

LONG = 80


def test_a_prompt_whose_only_worker_is_full_holds_up_none_that_another_may_take() -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        await pool.report(0, 390)
        long = pool.start("long", tokens=LONG)
        await asyncio.sleep(1.0)
        short = pool.start("short", tokens=5)
        await asyncio.sleep(0.1)

        assert short.done()
        assert pool.called() == [1, 0]
        await pool.report(0, 0)
        await long
        assert pool.called() == [1, 1]

    play(2, scenario)


def test_who_waits_is_placed_past_one_whose_only_worker_is_full() -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        await pool.report(395, 390)
        long, short = pool.start("long", tokens=LONG), pool.start("short", tokens=20)
        await asyncio.sleep(1.0)
        assert pool.called() == [0, 0]
        await pool.report(0, 390)
        await short

        assert pool.called() == [1, 0]
        assert not long.done()
        await pool.report(0, 0)
        await long

    play(2, scenario)


def test_what_one_waits_for_is_not_taken_by_those_behind_it() -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        await pool.report(395, 330)
        long = pool.start("long", tokens=LONG)
        short = pool.start("short", tokens=20)  # There is room for it, where the long one waits.
        await asyncio.sleep(1.0)
        assert pool.called() == [0, 0]
        await pool.report(395, 300)
        await asyncio.gather(long, short)
        assert [call.handoff_id for call in pool.workers[1].calls] == ["long", "short"]

    play(2, scenario)


@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.WORKER_DRAINING])
def test_a_refusal_by_the_only_worker_that_is_certified_for_a_prompt_is_told_at_once(
    reason: Reason,
) -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        await pool.report(0, 0)
        pool.workers[1].answers = [ServingError(reason, "no")]
        with pytest.raises(ServingError) as refused:
            await pool.start(tokens=LONG)

        assert (refused.value.reason, now_s()) == (reason, 0.0)
        assert pool.called() == [0, 1]

    play(2, scenario)


def test_a_prompt_that_no_worker_is_certified_for_is_outside_the_envelope() -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        await pool.report(0)
        with pytest.raises(ServingError) as refused:
            await pool.start(tokens=LONG)
        assert refused.value.reason is Reason.OUTSIDE_ENVELOPE

    play(1, scenario)


def test_a_layout_that_only_workers_with_a_shorter_limit_have_is_a_mismatch() -> None:
    async def scenario(pool: Pool) -> None:
        pool.certified.prompt_max_tokens["p0:1"] = LONG - 1
        pool.workers[1].description = replace(pool.workers[1].description, kv_layout="other")
        await pool.report(0, 0)
        with pytest.raises(ServingError) as refused:
            await pool.start(tokens=LONG)
        assert (refused.value.reason, now_s()) == (Reason.KV_LAYOUT_MISMATCH, 0.0)

    play(2, scenario)
