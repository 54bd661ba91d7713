"""One attempt at a decode worker: its tokens, its fence, its ends, and what is left behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason
from splitwave.core.session import Cancel
from splitwave.engine.port import StepOutputs
from splitwave.engine.sim import RankDeath, RankPause, SimEngine, SimFaults, SimSettings
from tests.sim.virtual_loop import run
from tests.unit.hand_router import HandRouter, Heard, submission, tokens_of
from tests.unit.worker_rig import DECODE, GREEDY, PREFILL, Rig, rig, right_answer

PROMPT = list(range(40, 60))
LONG_LEASE = replace(PREFILL, lease_ttl_s=600.0)
LONG = replace(GREEDY, max_tokens=2000)
SLOW_PULL = replace(DECODE, faults=SimFaults(pull_delay_rate=1.0, pull_delay_s=0.5))


async def assert_empty(r: Rig, within_s: float = 2.0) -> None:
    """Both pools, and both engines, are as they were before anyone came."""
    await asyncio.sleep(within_s)
    r.check()
    assert r.is_empty()
    for engine in (r.prefill_engine, r.decode_engine):
        counters = (await engine.counters())[0]
        assert (counters.leases_live, counters.blocks_used) == (0, 0)


async def one(r: Rig, attempt_id: str = "a/0/1") -> tuple[HandRouter, Heard]:
    """A router whose only attempt has just been submitted."""
    router = HandRouter()
    r.connect(router)
    return router, await r.start_one(router, attempt_id, PROMPT)


@pytest.mark.parametrize("keep", [True, False])
def test_split_tokens_equal_aggregated_tokens(keep: bool) -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            r.connect(router)
            heard = await r.start_one(router, "a/0/1", PROMPT, keep=keep)
            await heard.over.wait()

            assert heard.token_ids == right_answer(PROMPT, GREEDY)
            assert heard.offsets == list(range(8))
            assert heard.finish is FinishReason.LENGTH
            assert heard.ended is not None
            assert heard.ended.handoff_bytes == 2 * DECODE.block_bytes
            assert heard.ended.handoff_s > 0
            # Told once and before decode's first token, since a router that cancels hears no end.
            ((shown, pulled),) = heard.pulled
            assert shown == int(keep)
            assert pulled.handoff_bytes == heard.ended.handoff_bytes
            assert pulled.handoff_s == pytest.approx(heard.ended.handoff_s)
            assert (r.peers.confirmed, r.peers.released) == (["a/0/1"], [])
            await assert_empty(r)
            assert r.prefill.lease_counts().pulled == 1

    run(main())


def test_no_token_is_shown_before_the_handoff_is_confirmed() -> None:
    async def main() -> None:
        async with rig() as r:
            r.peers.delay_s = 1.0
            _, heard = await one(r)
            await asyncio.sleep(0.9)
            assert (heard.token_ids, heard.ended) == (right_answer(PROMPT, GREEDY)[:1], None)
            assert sum(r.decode.room.table.seats_held) == 0  # The engine has ended it long ago.

            await heard.over.wait()
            assert heard.token_ids == right_answer(PROMPT, GREEDY)
            assert heard.offsets == list(range(8))
            await assert_empty(r)

    run(main())


async def read_reused_blocks(r: Rig) -> Heard:
    """Let the lease run out during the pull, and the blocks be used for other prompts."""
    _, heard = await one(r)
    await asyncio.sleep(1.5)
    for n in range(40):
        await r.prefill_one(f"other{n}", [n] * 100)
        r.prefill.release(f"other{n}")
    await heard.over.wait()
    return heard


REUSED = (
    replace(PREFILL, lease_ttl_s=1.2, blocks_per_rank=20, model_len_max_tokens=256),
    replace(DECODE, faults=SimFaults(pull_delay_rate=1.0, pull_delay_s=3.0)),
)


def test_a_pull_from_an_expired_lease_shows_no_token() -> None:
    async def main() -> None:
        async with rig(*REUSED) as r:
            heard = await read_reused_blocks(r)

            assert heard.error is not None
            assert heard.error.reason is Reason.HANDOFF_EXPIRED
            assert heard.token_ids == right_answer(PROMPT, GREEDY)[:1]
            assert r.peers.released == []
            await assert_empty(r)

    run(main())


def test_without_the_fence_the_wrong_tokens_would_be_shown() -> None:
    async def main() -> None:
        async with rig(*REUSED) as r:
            r.decode.decoding.is_fenced = False
            heard = await read_reused_blocks(r)

            assert heard.finish is FinishReason.LENGTH
            assert heard.token_ids != right_answer(PROMPT, GREEDY)

    run(main())


def test_an_unreachable_prefill_worker_ends_the_attempt_and_is_told_to_release() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE) as r:
            r.peers.lost_calls = 1
            _, heard = await one(r)
            await heard.over.wait()

            assert heard.error is not None
            assert heard.error.reason is Reason.HANDOFF_EXPIRED
            assert r.peers.released == ["a/0/1"]
            await assert_empty(r)

    run(main())


@pytest.mark.parametrize("decode", [DECODE, SLOW_PULL], ids=["fast pull", "slow pull"])
def test_cancelled_at_any_time_an_attempt_leaves_nothing(
    decode: SimSettings,
) -> None:
    async def cancelled_after(wait_s: float) -> Heard:
        async with rig(LONG_LEASE, decode) as r:
            r.peers.delay_s = 0.002
            router, heard = await one(r)
            await asyncio.sleep(wait_s)
            router.send(Cancel(("a/0/1",)))
            await assert_empty(r)
            ends = r.prefill.lease_counts()
            assert ends.pulled + ends.released == 1
            return heard

    for tenths_ms in range(0, 160, 3):
        heard = run(cancelled_after(tenths_ms * 1e-4))
        assert heard.accepted is not None


def test_a_handoff_is_never_released_while_it_is_pulled() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, SLOW_PULL) as r:
            router, heard = await one(r)
            await asyncio.sleep(0.1)
            router.send(Cancel(("a/0/1",)))
            await asyncio.sleep(0.3)
            assert r.peers.released == []
            assert sum(r.decode.room.table.seats_held) == 1  # The transfer writes into its blocks.
            assert r.decode.outstanding() == 1

            await asyncio.sleep(0.2)
            assert r.peers.released == ["a/0/1"]
            assert heard.ended is None
            await assert_empty(r)

    run(main())


class SilentEngine(SimEngine):
    """Never says that a pull has ended."""

    async def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        async for batch in super().steps():
            yield [replace(step, pulls_ended=()) for step in batch]


def test_an_engine_that_does_not_say_that_a_pull_has_ended_is_waited_for_a_second() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, SLOW_PULL, decode_engine=SilentEngine) as r:
            router, _ = await one(r)
            await asyncio.sleep(0.1)
            router.send(Cancel(("a/0/1",)))
            await asyncio.sleep(0.95)
            assert r.peers.released == []
            await assert_empty(r)
            assert r.peers.released == ["a/0/1"]

    run(main())


class EmptyPulls(SimEngine):
    """Says that its pulls moved nothing."""

    async def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        async for batch in super().steps():
            for output in (output for step in batch for output in step.outputs):
                if output.pulled is not None:
                    output.pulled = replace(output.pulled, bytes_moved=0)
            yield batch


def test_a_pull_that_moved_nothing_is_a_failure() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, decode_engine=EmptyPulls) as r:
            _, heard = await one(r)
            await heard.over.wait()

            assert heard.error is not None
            assert heard.error.reason is Reason.HANDOFF_FAILED
            assert r.peers.confirmed == []
            await assert_empty(r)

    run(main())


def test_a_failed_pull_releases_the_handoff() -> None:
    async def main() -> None:
        faults = SimFaults(pull_failure_rate=1.0)
        async with rig(LONG_LEASE, replace(DECODE, faults=faults)) as r:
            _, heard = await one(r)
            await heard.over.wait()

            assert heard.error is not None
            assert heard.error.reason is Reason.HANDOFF_FAILED
            assert (r.peers.confirmed, r.peers.released) == ([], ["a/0/1"])
            await assert_empty(r)

    run(main())


def test_a_preempted_attempt_ends_with_what_it_had() -> None:
    async def main() -> None:
        scarce = replace(DECODE, blocks_per_rank=24, model_len_max_tokens=384)
        async with rig(PREFILL, scarce) as r:
            router = HandRouter()
            r.connect(router)
            heard = []
            for n in range(2):
                granted = await router.grant(3)
                result = await r.prefill_one(f"a/{n}", PROMPT, LONG)
                assert result.handoff is not None
                rest = replace(LONG, max_tokens=300)
                tokens = PROMPT + tokens_of(result)
                heard.append(
                    router.submit(submission(f"a/{n}", granted, result.handoff, tokens, rest))
                )
            for each in heard:
                await each.over.wait()

            errors = [each.error for each in heard if each.error is not None]
            assert [error.reason for error in errors] == [Reason.PREEMPTED]
            for each in heard:
                assert each.token_ids == right_answer(PROMPT, LONG)[1 : 1 + len(each.token_ids)]
                assert each.offsets == list(range(1, 1 + len(each.token_ids)))
            await assert_empty(r)

    run(main())


def test_time_and_patience_end_an_attempt() -> None:
    async def main() -> None:
        pause = SimFaults(pauses=(RankPause(rank=0, at_step=20, pause_s=5.0),))
        async with rig(LONG_LEASE, replace(DECODE, faults=pause, step_fixed_s=0.01)) as r:
            router = HandRouter()
            r.connect(router)
            for name, remaining_s, stall_max_s, reason in (
                ("a/0/1", 30.0, 1.0, Reason.STALLED),
                ("b/0/1", 0.5, 10.0, Reason.DEADLINE_EXCEEDED),
            ):
                granted = await router.grant(200)
                result = await r.prefill_one(name, PROMPT, LONG)
                assert result.handoff is not None
                tokens = PROMPT + tokens_of(result)
                rest = replace(LONG, max_tokens=1500)
                submit = submission(name, granted, result.handoff, tokens, rest)
                began_s = r.now_s()
                heard = router.submit(
                    replace(submit, remaining_s=remaining_s, stall_max_s=stall_max_s)
                )
                await heard.over.wait()
                assert heard.error is not None
                assert heard.error.reason is reason
                assert r.now_s() - began_s < 2.0
            await assert_empty(r, within_s=6.0)

    run(main())


def test_a_dead_engine_ends_every_session_and_releases_what_it_had_not_read() -> None:
    async def main() -> None:
        faults = SimFaults(death=RankDeath(rank=0, at_step=1))
        async with rig(LONG_LEASE, replace(DECODE, faults=faults)) as r:
            router = HandRouter()
            session = r.connect(router)
            await r.start_one(router, "a/0/1", PROMPT)
            with pytest.raises(ServingError, match="gone") as ended:
                await session
            assert ended.value.reason is Reason.EPOCH_MISMATCH, "there is nothing to reattach to"
            assert not r.decode.healthy()
            await asyncio.sleep(0.1)
            assert r.peers.released == ["a/0/1"]
            assert r.prefill.outstanding() == 0

    run(main())


def test_a_worker_that_closes_releases_what_its_engine_was_still_reading() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, SLOW_PULL) as r:
            await one(r)
            await asyncio.sleep(0.1)
            r.decode_runs.cancel()  # As a drain that was cut short ends it.
            await r.decode.close()
            await asyncio.sleep(0.1)

            assert r.peers.released == ["a/0/1"]
            assert r.is_empty()

    run(main())
