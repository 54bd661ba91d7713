"""One prompt at a prefill worker: its token, its lease, and what is left when it ends early."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.engine.sim import RankDeath, SimFaults
from tests.sim.virtual_loop import run
from tests.unit.worker_rig import DECODE, GREEDY, PREFILL, Rig, rig, right_answer

PROMPT = list(range(40, 60))
FIRST = right_answer(PROMPT, GREEDY)[0]
SLOW = replace(PREFILL, step_fixed_s=0.1)
"""Steps long enough to interrupt."""


def started(r: Rig, handoff_id: str) -> "asyncio.Task[PrefillResult]":
    """A prefill under way."""
    return asyncio.create_task(r.prefill_one(handoff_id, PROMPT))


async def refused(doing: Awaitable[object]) -> ServingError:
    """The error that something must end with."""
    with pytest.raises(ServingError) as caught:
        await doing
    return caught.value


async def assert_nothing_held(r: Rig) -> None:
    """Nothing is held or queued, in the worker and in the engine."""
    await asyncio.sleep(1.0)
    assert r.prefill.outstanding() == 0
    assert r.prefill.floor.queues.tokens == [0]
    counters = (await r.prefill_engine.counters())[0]
    assert (counters.leases_live, counters.blocks_used) == (0, 0)
    r.check()


def test_a_kept_token_is_returned_and_its_prompt_held() -> None:
    async def main() -> None:
        async with rig() as r:
            result = await r.prefill_one("h1", PROMPT)

            assert result.token_id == FIRST
            assert result.finish_reason is None
            assert result.handoff is not None
            assert result.handoff.prompt_tokens == len(PROMPT)
            assert 8.5 < result.handoff.lease_remaining_s <= 9.0
            assert result.computed_s > 0
            assert r.prefill.load().blocks_used == (2,)

    run(main())


def test_a_token_that_is_not_kept_is_dropped_whatever_it_is() -> None:
    async def main() -> None:
        async with rig() as r:
            stops = replace(GREEDY, seed=1, temperature=1.0, stop_token_ids=tuple(range(256)))
            result = await r.prefill_one("h1", PROMPT, stops, keep=False)

            assert (result.token_id, result.finish_reason) == (None, None)
            assert result.handoff is not None

    run(main())


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        (replace(GREEDY, max_tokens=1), FinishReason.LENGTH),
        (replace(GREEDY, stop_token_ids=(FIRST,)), FinishReason.STOP),
        (replace(GREEDY, eos_token_ids=(FIRST,)), FinishReason.STOP),
    ],
)
def test_a_generation_that_ends_at_its_first_token_holds_nothing(
    sampling: Sampling, finish: FinishReason
) -> None:
    async def main() -> None:
        async with rig() as r:
            result = await r.prefill_one("h1", PROMPT, sampling)

            assert (result.token_id, result.finish_reason) == (FIRST, finish)
            assert result.stop_token_id == (FIRST if finish is FinishReason.STOP else None)
            assert result.handoff is None
            await assert_nothing_held(r)

    run(main())


def test_a_prompt_that_leaves_room_for_one_token_ends_with_it() -> None:
    async def main() -> None:
        longest = list(range(1, 64))
        small = replace(PREFILL, model_len_max_tokens=64)
        async with rig(small) as r:
            result = await r.prefill_one("h1", longest)

            assert result.finish_reason is FinishReason.LENGTH
            await assert_nothing_held(r)

    run(main())


def test_a_repeat_joins_the_running_call_and_later_gets_the_same_handoff() -> None:
    async def main() -> None:
        async with rig(SLOW) as r:
            first, second = await asyncio.gather(started(r, "h1"), started(r, "h1"))
            assert first == second
            await asyncio.sleep(1.0)
            third = await r.prefill_one("h1", PROMPT)

            assert first.handoff is not None
            assert third.handoff is not None
            waited_s = first.handoff.lease_remaining_s - third.handoff.lease_remaining_s
            assert waited_s == pytest.approx(1.0)
            assert replace(third, handoff=first.handoff) == first
            assert (await r.prefill_engine.counters())[0].prefill_tokens_computed == 19

    run(main())


def test_a_call_that_leaves_takes_everything_with_it_unless_another_waits() -> None:
    async def main() -> None:
        async with rig(SLOW) as r:
            leaves, stays = started(r, "h1"), started(r, "h1")
            await asyncio.sleep(0.05)
            leaves.cancel()
            assert (await stays).handoff is not None
            r.prefill.release("h1")

            alone = started(r, "h2")
            await asyncio.sleep(0.05)
            alone.cancel()
            await assert_nothing_held(r)

    run(main())


def test_cancelled_at_any_turn_of_the_loop_a_call_leaves_nothing() -> None:
    async def cancelled_at(tenths_ms: int, turns: int) -> bool:
        async with rig(replace(PREFILL, lease_ttl_s=600.0)) as r:
            task = started(r, "h1")
            await asyncio.sleep(tenths_ms * 1e-4)
            for _ in range(turns):
                await asyncio.sleep(0)
            was_cancelled = task.cancel()
            if was_cancelled:
                await assert_nothing_held(r)
            return was_cancelled

    answers = [run(cancelled_at(at, turns)) for at in range(12) for turns in range(8)]

    assert answers[0] is True
    assert answers[-1] is False, "the last one was answered, so all turns were covered"


def test_a_call_without_time_left_is_freed() -> None:
    async def main() -> None:
        async with rig(SLOW) as r:
            call = PrefillCall(
                request_id="r",
                handoff_id="h1",
                token_ids=PROMPT,
                sampling=GREEDY,
                keep_first_token=True,
                kv_layout=r.decode.group.kv_layout,
            )
            error = await refused(r.prefill.prefill(call, Deadline(r.now_s() + 0.05)))

            assert error.reason is Reason.DEADLINE_EXCEEDED
            assert r.now_s() == pytest.approx(0.05)
            await assert_nothing_held(r)

    run(main())


def test_a_release_may_overtake_its_prefill() -> None:
    async def main() -> None:
        async with rig(SLOW) as r:
            assert r.prefill.release("h1") is True
            assert r.prefill.release("h1") is False
            assert (await refused(started(r, "h1"))).reason is Reason.CANCELLED

            running = started(r, "h2")
            await asyncio.sleep(0.05)
            assert r.prefill.release("h2") is True
            assert (await refused(running)).reason is Reason.CANCELLED
            assert r.now_s() == pytest.approx(0.05)  # Long before its step would have ended.
            await assert_nothing_held(r)

    run(main())


def test_a_released_handoff_is_freed_and_stays_ended() -> None:
    async def main() -> None:
        async with rig() as r:
            await r.prefill_one("h1", PROMPT)
            assert r.prefill.release("h1") is True
            assert r.prefill.release("h1") is False
            assert (await refused(started(r, "h1"))).reason is Reason.CANCELLED
            with pytest.raises(ServingError, match="had ended"):
                r.prefill.confirm("h1", r.prefill.group.epoch)
            await assert_nothing_held(r)
            assert r.prefill.lease_counts().released == 1

    run(main())


def test_a_lease_ends_by_time_and_cannot_be_confirmed_then() -> None:
    async def main() -> None:
        async with rig() as r:
            result = await r.prefill_one("h1", PROMPT)
            assert result.handoff is not None
            await asyncio.sleep(result.handoff.lease_remaining_s + 0.2)

            with pytest.raises(ServingError) as late:
                r.prefill.confirm("h1", r.prefill.group.epoch)
            assert late.value.reason is Reason.HANDOFF_EXPIRED
            assert (await refused(started(r, "h1"))).reason is Reason.INVALID_REQUEST
            await assert_nothing_held(r)
            assert r.prefill.lease_counts().expired == 1

    run(main())


def test_a_confirmation_ends_the_lease_as_pulled_and_there_is_no_second_one() -> None:
    async def main() -> None:
        async with rig() as r:
            await r.prefill_one("h1", PROMPT)
            with pytest.raises(ServingError) as wrong:
                r.prefill.confirm("h1", r.prefill.group.epoch + 1)
            assert wrong.value.reason is Reason.EPOCH_MISMATCH

            assert r.prefill.confirm("h1", r.prefill.group.epoch) == pytest.approx(9.0, abs=0.1)
            with pytest.raises(ServingError) as again:
                r.prefill.confirm("h1", r.prefill.group.epoch)
            assert again.value.reason is Reason.HANDOFF_EXPIRED
            await assert_nothing_held(r)
            assert r.prefill.lease_counts().pulled == 1

    run(main())


def test_while_a_handoff_can_be_confirmed_the_engine_holds_its_blocks() -> None:
    async def main() -> None:
        async with rig() as r:
            result = await r.prefill_one("h1", PROMPT)
            assert result.handoff is not None
            await asyncio.sleep(result.handoff.lease_remaining_s - 1e-6)

            assert (await r.prefill_engine.counters())[0].leases_live == 1
            assert r.prefill.confirm("h1", r.prefill.group.epoch) > 0

    run(main())


def test_what_can_never_succeed_is_refused_by_name() -> None:
    def change(call: PrefillCall, **fields: object) -> PrefillCall:
        return replace(call, **fields)  # type: ignore[arg-type]  # one field each

    async def main() -> None:
        async with rig() as r:
            layout = r.decode.group.kv_layout
            call = PrefillCall(
                request_id="r",
                handoff_id="h1",
                token_ids=PROMPT,
                sampling=GREEDY,
                keep_first_token=True,
                kv_layout=layout,
            )
            wrong: list[tuple[PrefillCall, Reason, str]] = [
                (change(call, token_ids=[1] * 4096), Reason.INVALID_REQUEST, "token_ids"),
                (change(call, token_ids=[]), Reason.INVALID_REQUEST, "token_ids"),
                (change(call, kv_layout=""), Reason.INVALID_REQUEST, "kv_layout"),
                (change(call, kv_layout="x"), Reason.KV_LAYOUT_MISMATCH, "kv_layout"),
                (
                    change(call, sampling=replace(GREEDY, max_tokens=0)),
                    Reason.INVALID_REQUEST,
                    "max_tokens",
                ),
            ]
            for bad, reason, field in wrong:
                error = await refused(r.prefill.prefill(bad, Deadline(r.now_s() + 9.0)))
                assert (error.reason, field in error.message) == (reason, True)
            await assert_nothing_held(r)

    run(main())


def test_prompts_go_to_the_rank_with_the_fewest_tokens_and_a_full_queue_sheds() -> None:
    async def main() -> None:
        batch = replace(SLOW, ranks=2, batch_max_tokens=64)
        async with rig(batch, DECODE) as r:
            tasks = [started(r, f"h{n}") for n in range(12)]
            await asyncio.sleep(0)
            assert r.prefill.load().queued_tokens == (120, 120)

            error = await refused(started(r, "one too many"))
            assert error.reason is Reason.OVERLOADED
            assert error.retry_after_s == 1.0  # Nothing was computed yet, so nothing is known.
            await tasks[0]
            assert r.prefill.load().queued_tokens < (120, 120)
            tasks += [started(r, f"h{n}") for n in range(12, 20)]
            later = await refused(started(r, "two too many"))
            assert 0.01 <= (later.retry_after_s or 0) < 1.0
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main())


def test_an_empty_rank_takes_a_prompt_above_its_bound() -> None:
    async def main() -> None:
        async with rig(replace(PREFILL, batch_max_tokens=64)) as r:
            result = await r.prefill_one("h1", [7] * 500)

            assert result.handoff is not None

    run(main())


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new() -> None:
    async def main() -> None:
        async with rig(SLOW) as r:
            running = started(r, "h1")
            await asyncio.sleep(0.05)
            r.prefill.refuse()
            assert not r.prefill.healthy()
            assert (await refused(started(r, "h2"))).reason is Reason.WORKER_DRAINING
            drained = asyncio.create_task(r.prefill.drained())

            handoff = (await running).handoff
            assert handoff is not None
            assert (await started(r, "h1")).handoff is not None  # A repeat is not new.
            assert not drained.done()
            r.prefill.confirm(handoff.handoff_id, handoff.epoch)
            await drained

    run(main())


def test_a_dead_engine_fails_every_call_and_the_worker() -> None:
    async def main() -> None:
        faults = SimFaults(death=RankDeath(rank=0, at_step=1))
        async with rig(replace(SLOW, faults=faults)) as r:
            first = await refused(started(r, "h1"))
            second = await refused(started(r, "h2"))

            assert {first.reason, second.reason} == {Reason.WORKER_LOST}
            assert not r.prefill.healthy()
            with pytest.raises(ServingError, match="gone"):
                r.prefill.load()

    run(main())
