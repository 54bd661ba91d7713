"""Sessions of a decode worker: grants, refusals, breaks, reattachment, drain."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.decode.sessions import HELLO_WAIT_S
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.session import AskGrant, Cancel, Submit
from splitwave.wire.session import BadSubmission
from tests.sim.virtual_loop import VirtualLoop, run
from tests.unit.hand_router import HandRouter, Heard, submission, tokens_of
from tests.unit.worker_rig import (
    DECODE,
    DECODE_CONFIG,
    GREEDY,
    PREFILL,
    Rig,
    rig,
    right_answer,
)

PROMPT = list(range(40, 60))
LONG_LEASE = replace(PREFILL, lease_ttl_s=600.0)
SLOW_STEPS = replace(DECODE, ranks=2, step_fixed_s=0.02)


async def prepared(r: Rig, router: HandRouter, attempt_id: str, **changes: object) -> Submit:
    """A good submission, but for `changes`."""
    granted = await router.grant()
    result = await r.prefill_one(attempt_id, PROMPT)
    assert result.handoff is not None
    tokens = PROMPT + tokens_of(result)
    rest = replace(GREEDY, max_tokens=7)
    submit = submission(attempt_id, granted, result.handoff, tokens, rest)
    return replace(submit, **changes)  # type: ignore[arg-type]  # the test's own fields


async def ended_with(session: "asyncio.Task[None]") -> Reason:
    """Why a session ended."""
    with pytest.raises(ServingError) as ended:
        await session
    return ended.value.reason


def test_what_cannot_be_decoded_is_refused_by_name_and_stays_with_its_router() -> None:
    changes: list[tuple[dict[str, object], Reason, str]] = [
        ({"grant_id": "g999"}, Reason.GRANT_UNKNOWN, "grant"),
        ({"token_ids": PROMPT[:10]}, Reason.INVALID_REQUEST, "prompt_tokens"),
        ({"sampling": Sampling(max_tokens=4090)}, Reason.INVALID_REQUEST, "max_tokens"),
        ({"remaining_s": 0.0}, Reason.DEADLINE_EXCEEDED, "remaining"),
        ({"stall_max_s": 0.0}, Reason.INVALID_REQUEST, "stall_max"),
    ]

    async def main() -> None:
        async with rig(LONG_LEASE) as r:
            router = HandRouter()
            r.connect(router)
            for n, (change, reason, word) in enumerate(changes):
                heard = router.submit(await prepared(r, router, f"a/{n}", **change))
                await heard.over.wait()
                assert heard.refused is not None
                assert (heard.refused.reason, word in heard.refused.message) == (reason, True)
            assert r.prefill.outstanding() == len(changes)
            assert r.peers.released == []
            await assert_no_seat(r)

    run(main())


async def assert_no_seat(r: Rig) -> None:
    """Nobody sits, and what is granted is but the floats and what waits for its ttl."""
    await asyncio.sleep(2.5)
    r.check()
    assert sum(r.decode.room.table.seats_held) == 0
    floats = sum(r.decode.room.table.floats().values())
    assert sum(r.decode.room.table.seats_used) == floats


def test_a_handoff_of_another_layout_or_size_is_refused() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE) as r:
            router = HandRouter()
            r.connect(router)
            good = await prepared(r, router, "a/0")
            other = replace(good.handoff, kv_layout="other")
            heard = router.submit(replace(good, handoff=other))
            await heard.over.wait()
            assert heard.refused is not None
            assert heard.refused.reason is Reason.KV_LAYOUT_MISMATCH

            small = await router.grant(1)
            heard = router.submit(replace(good, attempt_id="a/1", grant_id=small.grant_id))
            await heard.over.wait()
            assert heard.refused is not None
            assert heard.refused.reason is Reason.KV_CAPACITY_EXHAUSTED

            alone = replace(good.handoff, prompt_tokens=1, block_count=1)
            grant = (await router.grant()).grant_id
            heard = router.submit(
                replace(good, attempt_id="a/2", grant_id=grant, token_ids=[5], handoff=alone)
            )
            await heard.over.wait()
            assert heard.refused is not None
            assert "position 0" in heard.refused.message
            await assert_no_seat(r)

    run(main())


def test_a_bad_submission_ends_its_attempt_alone() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            r.connect(router)
            good = router.submit(await prepared(r, router, "good/0/1"))
            error = ServingError(Reason.INVALID_REQUEST, "submit_chunk.data: too large")
            router.send(BadSubmission("bad/0/1", error))  # type: ignore[arg-type]  # the wire reads it so
            await good.over.wait()

            assert good.error is None
            assert router.heard["bad/0/1"].refused is error

    run(main())


def test_a_submission_that_comes_again_is_answered_as_before() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            r.connect(router)
            submit = await prepared(r, router, "a/0/1")
            heard = router.submit(submit)
            router.send(submit)
            await heard.over.wait()
            assert heard.token_ids == right_answer(PROMPT, GREEDY)[1:]
            first_end, heard.ended = heard.ended, None

            router.send(submit)
            await asyncio.sleep(0.1)
            assert heard.ended == first_end
            assert len(heard.token_ids) == 7
            assert (await r.decode_engine.counters())[0].pulls == 1

    run(main())


def test_a_cancel_right_behind_its_submission_is_answered_first() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE) as r:
            router = HandRouter()
            r.connect(router)
            heard = router.submit(await prepared(r, router, "a/0/1"))
            router.send(Cancel(("a/0/1", "never heard of")))
            await asyncio.sleep(1.0)

            assert heard.accepted is not None
            assert heard.ended is None
            assert r.prefill.outstanding() == 0
            await assert_no_seat(r)

    run(main())


def test_a_slot_is_used_again_and_never_for_two_at_once() -> None:
    async def main() -> None:
        async with rig(PREFILL, replace(DECODE, ranks=2)) as r:
            router = HandRouter()
            r.connect(router)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            heard: dict[str, Heard] = {}
            for n in range(60):
                name = f"a{n}/0/1"
                heard[name] = await r.start_one(router, name, [n + 1] * 20)
                if loop.rng.random() < 0.3:
                    await asyncio.sleep(loop.rng.random() * 0.01)
                    router.send(Cancel((name,)))
            await asyncio.sleep(1.0)

            for n, each in enumerate(heard.values()):
                right = right_answer([n + 1] * 20, GREEDY)
                assert each.token_ids == right[: len(each.token_ids)]
                assert each.offsets == list(range(len(each.token_ids)))
            assert len(router.slots) < 20

    run(main(), seed=7)


def test_one_frame_carries_a_whole_lock_step() -> None:
    async def main() -> None:
        async with rig(PREFILL, SLOW_STEPS) as r:
            router = HandRouter()
            r.connect(router)
            sampling = replace(GREEDY, max_tokens=50)
            heard = [await r.start_one(router, f"a{n}/0/1", PROMPT, sampling) for n in range(8)]
            for each in heard:
                await each.over.wait()
            ranks = {each.accepted.rank for each in heard if each.accepted}
            steps = (await r.decode_engine.counters())[0].steps_by_kind["eager"]

            assert ranks == {0, 1}
            # A frame a step, and one for the confirmation of each attempt.
            assert router.frames <= steps + len(heard)

    run(main())


def test_a_reattached_session_goes_on_without_loss_or_repeat_under_64_streams() -> None:
    async def main() -> None:
        config = replace(DECODE_CONFIG, grant_float_max=0)
        async with rig(PREFILL, SLOW_STEPS, decode_config=config) as r:
            router = HandRouter()
            session = r.connect(router)
            sampling = replace(GREEDY, max_tokens=100)
            prompts = {f"a{n}/0/1": [n + 1] * 20 for n in range(64)}
            heard = {x: await r.start_one(router, x, p, sampling) for x, p in prompts.items()}
            for break_s in (0.1, 1.0, 1.9):
                await asyncio.sleep(0.2)
                session.cancel()
                await asyncio.sleep(break_s)
                session = r.connect(router, reattach=True)
                await router.welcomed.wait()
                assert router.welcome is not None
                assert router.welcome.reattached
                assert all(known for _, known in router.welcome.known)
            for name, prompt in prompts.items():
                await heard[name].over.wait()
                assert heard[name].token_ids == right_answer(prompt, sampling)
                assert heard[name].offsets == list(range(100))
            assert r.prefill.lease_counts().started == 64
            assert r.decode.sessions.reattached == 3

    run(main())


def test_what_was_said_while_the_connection_was_down_arrives_after_it() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE) as r:
            router = HandRouter()
            session = r.connect(router)
            submit = await prepared(r, router, "a/0/1")
            session.cancel()
            await asyncio.sleep(0.5)
            heard = router.submit(submit)
            r.connect(router, reattach=True)
            await router.welcomed.wait()
            assert router.welcome is not None
            assert router.welcome.known == (("a/0/1", False),)
            await heard.over.wait()
            assert heard.error is None

    run(main())


def test_a_session_that_does_not_come_back_loses_all_that_it_owned() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, SLOW_STEPS) as r:
            router = HandRouter()
            session = r.connect(router)
            sampling = replace(GREEDY, max_tokens=2000)
            for n in range(8):
                await r.start_one(router, f"a{n}/0/1", PROMPT, sampling)
            router.send(AskGrant("too much", 1024, 60.0))
            await asyncio.sleep(0.5)
            assert sum(r.decode.room.table.seats_held) == 8
            session.cancel()
            await asyncio.sleep(1.9)
            assert sum(r.decode.room.table.seats_held) == 8
            await asyncio.sleep(0.5)

            assert r.decode.sessions.by_id == {}
            assert r.decode.room.table.seats_used == [0, 0]
            assert r.decode.room.load().asks_waiting == 0
            assert r.is_empty()
            assert [c.blocks_used for c in await r.decode_engine.counters()] == [0, 0]
            late = r.connect(router, reattach=True)
            assert await ended_with(late) is Reason.EPOCH_MISMATCH

    run(main())


def test_a_new_connection_takes_the_session_over() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            old = r.connect(router)
            heard = await r.start_one(router, "a/0/1", PROMPT)
            r.connect(router, reattach=True)
            assert await ended_with(old) is Reason.CANCELLED
            await heard.over.wait()
            assert heard.token_ids == right_answer(PROMPT, GREEDY)
            await asyncio.sleep(3.0)
            assert list(r.decode.sessions.by_id) == ["s1"]

    run(main())


def test_a_router_that_does_not_read_loses_its_session() -> None:
    async def main() -> None:
        config = replace(DECODE_CONFIG, kept_max=50)
        async with rig(LONG_LEASE, decode_config=config) as r:
            router = HandRouter(acks=False)
            session = r.connect(router)
            await r.start_one(router, "a/0/1", PROMPT, replace(GREEDY, max_tokens=500))

            assert await ended_with(session) is Reason.OVERLOADED
            assert r.decode.sessions.by_id == {}
            await asyncio.sleep(0.5)
            assert r.is_empty()

    run(main())


def test_a_gap_in_the_numbers_ends_the_session() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            session = r.connect(router)
            await router.welcomed.wait()
            router.link.sent = 5
            router.send(AskGrant("a", 1, 1.0))

            assert await ended_with(session) is Reason.INVALID_REQUEST

    run(main())


def test_the_first_message_is_hello_and_a_taken_session_is_refused() -> None:
    async def main() -> None:
        async with rig() as r:
            router = HandRouter()
            r.connect(router)
            await router.welcomed.wait()
            assert await ended_with(r.connect(HandRouter())) is Reason.INVALID_REQUEST

            async def rude() -> AsyncIterator[tuple[int, Cancel]]:
                yield 1, Cancel(())

            task = asyncio.create_task(r.decode.session(rude(), router.write))
            assert await ended_with(task) is Reason.INVALID_REQUEST

    run(main())


def test_a_connection_that_never_says_hello_is_ended() -> None:
    async def main() -> None:
        async with rig() as r:

            async def silent() -> AsyncIterator[tuple[int, Cancel]]:
                await asyncio.Event().wait()
                yield 1, Cancel(())

            task = asyncio.create_task(r.decode.session(silent(), HandRouter().write))
            await asyncio.sleep(HELLO_WAIT_S + 0.1)

            assert task.done()
            assert await ended_with(task) is Reason.INVALID_REQUEST

    run(main())


def test_a_drain_refuses_new_work_finishes_the_old_and_then_ends_the_sessions() -> None:
    async def main() -> None:
        async with rig(LONG_LEASE, SLOW_STEPS) as r:
            router = HandRouter()
            session = r.connect(router)
            heard = await r.start_one(router, "a/0/1", PROMPT, replace(GREEDY, max_tokens=50))
            late = await prepared(r, router, "b/0/1")
            router.send(AskGrant("waits", 1024 * 16, 60.0))
            r.decode.refuse()
            drained = asyncio.create_task(r.decode.drained())
            refused = router.submit(late)
            router.send(AskGrant("new", 1, 60.0))
            await refused.over.wait()
            assert refused.refused is not None
            assert refused.refused.reason is Reason.WORKER_DRAINING
            await heard.over.wait()
            assert not drained.done()

            assert len(heard.token_ids) == 50
            assert router.ask_refusals["new"].reason is Reason.WORKER_DRAINING
            assert router.load is not None
            assert router.load.draining
            assert await ended_with(session) is Reason.WORKER_DRAINING
            await drained
            assert await ended_with(r.connect(HandRouter("s2"))) is Reason.WORKER_DRAINING

    run(main())
