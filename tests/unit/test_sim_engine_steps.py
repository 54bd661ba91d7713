"""Steps of a simulated group: together, in order, and none when idle."""

import asyncio
import dataclasses

import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling
from splitwave.engine.port import EngineDied, EngineRequest, RankCounters, Role
from splitwave.engine.sim import SimFabric, SimModel, SimSettings, start_sim_group
from tests.sim.engine_client import pull_of, reading
from tests.sim.virtual_loop import run

ONE = Sampling(max_tokens=1)
TEN = Sampling(max_tokens=10, temperature=0.0)
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", step_fixed_s=0.01)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def steps(counters: RankCounters) -> tuple[int, int]:
    """Executed steps of a rank and how many of them were dummies."""
    return counters.steps_by_kind["eager"], counters.dummy_steps


def test_ranks_of_a_group_step_together_and_the_idle_one_makes_dummy_steps() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, ranks=3)
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("a", [1, 2], TEN, rank=1)
            await client.ended("a")
            counters = await client.engine.counters()
            assert [steps(x) for x in counters] == [(10, 10), (10, 0), (10, 10)]
            assert {batch.rank for batch in client.batches} == {1}

    run(scenario())


def test_without_lock_step_an_idle_rank_makes_no_step() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, ranks=2, lockstep=False)
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("a", [1, 2], TEN, rank=1)
            await client.ended("a")
            assert [steps(x) for x in await client.engine.counters()] == [(0, 0), (10, 0)]

    run(scenario())


def test_the_slowest_rank_sets_the_pace_of_its_group() -> None:
    async def took_s(*, lockstep: bool) -> float:
        settings = dataclasses.replace(
            PREFILL, ranks=2, lockstep=lockstep, step_per_prefill_token_s=0.001
        )
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("long", [1] * 501, ONE, rank=0)
            await client.submit("short", [1], ONE, rank=1)
            await client.ended("short")
            return now_s()

    assert run(took_s(lockstep=True)) == pytest.approx(0.51)
    assert run(took_s(lockstep=False)) == pytest.approx(0.01)


def test_a_step_takes_what_its_batch_says() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(
            PREFILL, step_per_token_s=0.001, step_per_prefill_token_s=0.01
        )
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("a", [1] * 5, Sampling(max_tokens=2))
            await client.submit("b", [1] * 3, ONE)
            await client.ended("a")
            first, second = client.batches
            # Eight tokens, six of them beyond one a request; then one.
            assert first.at_s == pytest.approx(0.01 + 8 * 0.001 + 6 * 0.01)
            assert second.at_s - first.at_s == pytest.approx(0.01 + 0.001)
            assert (await client.engine.counters())[0].prefill_tokens_computed == 6

    run(scenario())


def test_time_scale_stretches_every_simulated_second() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, time_scale=10.0, lease_ttl_s=2.0)
        async with reading(await start_sim_group(settings)) as client:
            got = await client.prefill("a", [1], ONE)
            assert now_s() == pytest.approx(0.1)
            assert got.held is not None
            assert got.held.expires_at_s == pytest.approx(20.1)

    run(scenario())


def test_an_idle_group_makes_no_step_and_wakes_for_the_next_request() -> None:
    async def scenario() -> None:
        async with reading(await start_sim_group(PREFILL)) as client:
            await client.submit("a", [1], TEN)
            await client.ended("a")
            await asyncio.sleep(1_000.0)
            assert steps((await client.engine.counters())[0]) == (10, 0)
            began_s = now_s()
            await client.submit("b", [1], ONE)
            await client.ended("b")
            assert now_s() - began_s == pytest.approx(0.01)

    run(scenario())


def test_a_rank_that_only_pulls_makes_dummy_steps() -> None:
    async def scenario() -> None:
        fabric = SimFabric()
        settings = SimSettings(role=Role.DECODE, step_fixed_s=0.01, pull_fixed_s=0.095)
        async with (
            reading(await start_sim_group(PREFILL, fabric)) as p,
            reading(await start_sim_group(settings, fabric)) as d,
        ):
            prefilled = await p.prefill("a", [1, 2, 3], ONE)
            await d.submit("a", [1, 2, 3], TEN, pull=pull_of(prefilled))
            await d.ended("a")
            assert steps((await d.engine.counters())[0]) == (20, 10)
            assert (await d.engine.counters())[0].prefill_tokens_computed == 0

    run(scenario())


def test_long_prompts_are_chunked_by_the_batch_in_their_order() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, batch_max_tokens=100, seats_per_rank=10)
        async with reading(await start_sim_group(settings)) as client:
            for i, length in enumerate((250, 30, 60)):
                await client.submit(f"r{i}", [1] * length, ONE)
            for i in range(3):
                await client.ended(f"r{i}")
            # 100, 100, 50 + 30 + 20 of the last, its other 40.
            ends = {o.engine_request_id: b.step for b in client.batches for o in b.outputs}
            assert ends == {"r0": 3, "r1": 3, "r2": 4}
            assert [batch.running for batch in client.batches] == [1, 1, 1, 0]

    run(scenario())


def test_smaller_priority_goes_first_and_equals_in_their_order() -> None:
    async def scenario() -> list[str]:
        settings = dataclasses.replace(PREFILL, batch_max_tokens=64)
        async with reading(await start_sim_group(settings)) as client:
            for request_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
                await client.submit(request_id, [1] * 64, ONE, priority=priority)
            for request_id in "abcd":
                await client.ended(request_id)
            return [o.engine_request_id for b in client.batches for o in b.outputs]

    assert run(scenario()) == ["d", "b", "a", "c"]


def test_who_finds_no_seat_waits() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, seats_per_rank=2)
        async with reading(await start_sim_group(settings)) as client:
            for i in range(5):
                await client.submit(f"r{i}", [1], TEN)
            for i in range(5):
                await client.ended(f"r{i}")
            assert max(b.running or 0 for b in client.batches) == 2
            assert client.batches[0].waiting == 3
            assert len(client.batches) == 30

    run(scenario())


def test_the_newest_is_preempted_when_blocks_run_out_and_the_others_are_not_harmed() -> None:
    async def scenario() -> None:
        # 3 blocks of 4 tokens: two requests of 4 tokens grow to 12 only one after the other.
        settings = dataclasses.replace(
            PREFILL, blocks_per_rank=3, block_size_tokens=4, model_len_max_tokens=12
        )
        sampling = dataclasses.replace(TEN, max_tokens=8)
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("old", [1, 2, 3, 4], sampling)
            await client.submit("new", [5, 6, 7, 8], sampling)
            old, new = await client.ended("old"), await client.ended("new")
            model = SimModel(length_max_tokens=12)
            assert old.token_ids == model.complete([1, 2, 3, 4], sampling).token_ids
            assert (new.failure, new.finish) == (Reason.PREEMPTED, None)
            assert "no free KV block" in new.message
            # What it had made by then was right: the router goes on from there.
            assert len(new.token_ids) == 1
            assert new.token_ids == model.complete([5, 6, 7, 8], sampling).token_ids[:1]
            assert (await client.engine.counters())[0].blocks_used == 0

    run(scenario())


def test_blocks_grow_with_the_tokens() -> None:
    async def scenario() -> list[int | None]:
        settings = dataclasses.replace(PREFILL, block_size_tokens=4)
        async with reading(await start_sim_group(settings)) as client:
            await client.submit("a", [1, 2, 3], TEN)
            await client.ended("a")
            return [batch.blocks_used for batch in client.batches]

    # The step that computes position n needs room for n + 1 tokens.
    assert run(scenario()) == [1, 1, 2, 2, 2, 2, 3, 3, 3, 0]


def test_an_aborted_request_gives_no_more_output_and_its_blocks_within_a_step() -> None:
    async def scenario() -> None:
        async with reading(await start_sim_group(PREFILL)) as client:
            await client.submit("a", [1] * 20, Sampling(max_tokens=1_000))
            await asyncio.sleep(0.035)
            await client.engine.abort(["a", "never seen"])
            assert (await client.engine.counters())[0].blocks_used == 2
            await asyncio.sleep(0.01)
            assert (await client.engine.counters())[0].blocks_used == 0
            assert len(client.got("a").token_ids) == 3
            assert not client.got("a").ended.is_set()
            await asyncio.sleep(10.0)
            assert steps((await client.engine.counters())[0])[0] == 4

    run(scenario())


def test_an_abort_in_the_queue_wakes_nobody_and_hides_nobody() -> None:
    async def scenario() -> None:
        settings = dataclasses.replace(PREFILL, seats_per_rank=1)
        async with reading(await start_sim_group(settings)) as client:
            for request_id in "abc":
                await client.submit(request_id, [1], TEN)
            await client.engine.abort(["b"])
            await client.ended("c")
            assert client.got("b").token_ids == []
            assert steps((await client.engine.counters())[0]) == (20, 0)

    run(scenario())


@pytest.mark.parametrize(
    ("token_ids", "sampling", "says"),
    [
        ([], ONE, "token_ids is empty"),
        ([1] * 4096, ONE, "leaves no room to generate within the model's 4096"),
        ([1, -1], ONE, "no id of 0 or more"),
        ([-1, 1], ONE, "no id of 0 or more"),
        ([1], Sampling(max_tokens=0), "sampling.max_tokens is 0: set it to at least 1"),
    ],
    ids=str,
)
def test_a_bad_request_ends_alone(token_ids: list[int], sampling: Sampling, says: str) -> None:
    async def scenario() -> None:
        async with reading(await start_sim_group(PREFILL)) as client:
            await client.submit("good", [1], TEN)
            await client.submit("bad", token_ids, sampling)
            bad = await client.ended("bad")
            assert bad.failure is Reason.INVALID_REQUEST
            assert says in bad.message
            assert (await client.ended("good")).finish is FinishReason.LENGTH

    run(scenario())


def test_a_prefill_group_refuses_what_it_cannot_hold_or_pull() -> None:
    async def scenario() -> None:
        async with reading(await start_sim_group(PREFILL)) as client:
            await client.submit("many", [1], TEN, hold=True)
            many = await client.ended("many")
            assert (many.failure, "max_tokens is 10 with hold" in many.message) == (
                Reason.INTERNAL,
                True,
            )
            held = await client.prefill("held", [1], ONE)
            await client.submit("pulls", [1], ONE, pull=pull_of(held))
            assert (await client.ended("pulls")).failure is Reason.INTERNAL

    run(scenario())


def test_batches_that_are_ready_come_together_and_are_numbered() -> None:
    async def scenario() -> None:
        engine = await start_sim_group(dataclasses.replace(PREFILL, ranks=2))
        for rank in (0, 1):
            request = EngineRequest(
                engine_request_id=f"r{rank}", rank=rank, token_ids=[1], sampling=TEN
            )
            await engine.submit([request])
        await asyncio.sleep(0.055)
        async for batches in engine.steps():
            assert [(b.rank, b.step) for b in batches] == [
                (r, s) for s in range(1, 6) for r in (0, 1)
            ]
            break
        await engine.close()

    run(scenario())


def test_close_ends_the_batches_and_is_idempotent() -> None:
    async def scenario() -> None:
        fabric = SimFabric()
        engine = await start_sim_group(PREFILL, fabric)
        request = EngineRequest(engine_request_id="a", rank=0, token_ids=[1], sampling=TEN)
        await engine.submit([request])
        await engine.close()
        await engine.close()
        assert [batch async for batch in engine.steps()] == []
        assert len(asyncio.all_tasks()) == 1
        with pytest.raises(EngineDied, match="p#1 is closed"):
            await engine.submit([request])
        # Its name is free again.
        await (await start_sim_group(PREFILL, fabric)).close()

    run(scenario())


def test_one_name_is_one_start_of_one_group() -> None:
    async def scenario() -> None:
        fabric = SimFabric()
        engine = await start_sim_group(PREFILL, fabric)
        with pytest.raises(ValueError, match="'p#1' are taken in this fabric: raise the epoch"):
            await start_sim_group(PREFILL, fabric)
        await engine.close()

    run(scenario())


def test_the_same_requests_give_the_same_run() -> None:
    async def scenario() -> list[str]:
        settings = dataclasses.replace(PREFILL, ranks=2, seats_per_rank=3, step_per_token_s=0.001)
        async with reading(await start_sim_group(settings)) as client:
            for i in range(30):
                await client.submit(f"r{i}", [1] * (1 + i * 7 % 40), TEN, rank=i % 2)
                await asyncio.sleep(0.003)
            for i in range(30):
                await client.ended(f"r{i}")
            return [repr(batch) for batch in client.batches]

    assert run(scenario()) == run(scenario())
