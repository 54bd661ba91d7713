"""Each fault of the simulator does what it says, when its seed says so."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import EngineDied, Role
from splitwave.engine.sim import (
    RankDeath,
    RankPause,
    SimEngine,
    SimFabric,
    SimFaults,
    SimModel,
    SimSettings,
    start_sim_group,
)
from splitwave.engine.sim.faults import strikes
from splitwave.engine.sim.rank import SimRank
from tests.sim.engine_client import Client, Got, pull_of, reading
from tests.sim.virtual_loop import run

ONE = Sampling(max_tokens=1)
GREEDY = Sampling(max_tokens=30, temperature=0.0)
PROMPT = list(range(65, 65 + 40))
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", step_fixed_s=0.01)
DECODE = SimSettings(role=Role.DECODE, group_id="d", step_fixed_s=0.01)


@asynccontextmanager
async def decoding(faults: SimFaults) -> AsyncIterator[tuple[SimEngine, Client, Client]]:
    fabric = SimFabric()
    held_by = await start_sim_group(PREFILL, fabric)
    pulls = await start_sim_group(dataclasses.replace(DECODE, faults=faults), fabric)
    async with reading(held_by) as p, reading(pulls) as d:
        yield held_by, p, d
        pulls.check()


async def generations(p: Client, d: Client, count: int) -> list[Got]:
    for i in range(count):
        prefilled = await p.prefill(f"r{i}", PROMPT, ONE)
        await d.submit(f"r{i}", PROMPT, GREEDY, pull=pull_of(prefilled))
    return [await d.ended(f"r{i}") for i in range(count)]


def test_a_draw_hangs_on_the_seed_and_on_what_it_strikes() -> None:
    faults = SimFaults(seed=7)
    hits = [strikes(faults, 0.3, "kind", i) for i in range(2_000)]

    assert 500 < sum(hits) < 700
    assert hits == [strikes(faults, 0.3, "kind", i) for i in range(2_000)]
    assert hits != [strikes(SimFaults(seed=8), 0.3, "kind", i) for i in range(2_000)]
    assert hits != [strikes(faults, 0.3, "other", i) for i in range(2_000)]
    assert not any(strikes(faults, 0.0, i) for i in range(100))
    assert all(strikes(faults, 1.0, i) for i in range(100))


async def step_times_s(faults: SimFaults) -> list[float]:
    settings = dataclasses.replace(PREFILL, ranks=2, faults=faults)
    async with reading(await start_sim_group(settings)) as client:
        await client.submit("a", [1], Sampling(max_tokens=200))
        await client.ended("a")
        ends_s = [0.0, *(batch.at_s for batch in client.batches)]
        return [round(b - a, 6) for a, b in itertools.pairwise(ends_s)]


def test_slow_steps_hold_up_the_whole_group_at_their_rate() -> None:
    took_s = run(step_times_s(SimFaults(slow_step_rate=0.1, slow_step_factor=5.0)))

    # Either of two ranks slows a step: about 19 in a hundred.
    assert set(took_s) == {0.01, 0.05}
    assert 20 < took_s.count(0.05) < 60


def test_pauses_hold_up_the_whole_group_at_their_rate() -> None:
    took_s = run(step_times_s(SimFaults(pause_rate=0.05, pause_s=3.0)))

    assert set(took_s) == {0.01, 3.01}
    assert 8 < took_s.count(3.01) < 35


def test_a_pause_comes_at_its_step_also_of_a_rank_without_requests() -> None:
    took_s = run(step_times_s(SimFaults(pauses=(RankPause(rank=1, at_step=5, pause_s=2.0),))))

    assert took_s[4] == 2.01
    assert set(took_s[:4] + took_s[5:]) == {0.01}


def test_a_death_ends_the_group_with_rank_and_log() -> None:
    async def scenario() -> None:
        fabric = SimFabric()
        settings = dataclasses.replace(
            PREFILL, ranks=2, faults=SimFaults(death=RankDeath(rank=1, at_step=3))
        )
        engine = await start_sim_group(settings, fabric)
        client = Client(engine)
        await client.submit("a", [1], GREEDY)
        with pytest.raises(EngineDied, match="p#1 died") as caught:
            await client.read()
        assert caught.value.rank == 1
        assert "rank 1 ended in its step 3, as its faults say" in caught.value.log_tail
        # What came before it was delivered.
        assert len(client.got("a").token_ids) == 2
        for call in (engine.submit([]), engine.counters(), anext(aiter(engine.steps()))):
            with pytest.raises(EngineDied):
                await call
        await engine.abort(["a"])
        await engine.release(["a"])
        await engine.close()
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_what_a_group_made_before_its_death_is_delivered_first() -> None:
    async def scenario() -> None:
        faults = SimFaults(death=RankDeath(rank=0, at_step=3))
        client = Client(await start_sim_group(dataclasses.replace(PREFILL, faults=faults)))
        await client.submit("a", [1], GREEDY)
        await asyncio.sleep(1.0)
        with pytest.raises(EngineDied):
            await client.read()
        assert len(client.got("a").token_ids) == 2

    run(scenario())


def test_without_lock_step_one_ranks_death_is_the_groups() -> None:
    async def scenario() -> None:
        faults = SimFaults(death=RankDeath(rank=1, at_step=3))
        settings = dataclasses.replace(PREFILL, ranks=2, lockstep=False, faults=faults)
        engine = await start_sim_group(settings)
        client = Client(engine)
        await client.submit("a", [1], GREEDY, rank=0)
        await client.submit("b", [1], GREEDY, rank=1)
        with pytest.raises(EngineDied):
            await client.read()
        assert len(asyncio.all_tasks()) == 1

    run(scenario())


def test_a_broken_invariant_ends_the_group_and_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_rank: SimRank, _step: object = None) -> None:
        raise AssertionError("B2: 3 taken, 2 held")

    monkeypatch.setattr(SimRank, "check", broken)

    async def scenario() -> None:
        client = Client(await start_sim_group(PREFILL))
        await client.submit("a", [1], GREEDY)
        with pytest.raises(EngineDied) as caught:
            await client.read()
        assert caught.value.rank is None
        assert "B2: 3 taken, 2 held" in caught.value.log_tail

    run(scenario())


def test_a_pull_from_a_group_that_died_fails() -> None:
    async def scenario() -> None:
        fabric = SimFabric()
        death = RankDeath(rank=0, at_step=2)
        held_by = await start_sim_group(
            dataclasses.replace(PREFILL, faults=SimFaults(death=death)), fabric
        )
        p = Client(held_by)
        reader = asyncio.create_task(p.read())
        async with reading(await start_sim_group(DECODE, fabric)) as d:
            prefilled = await p.prefill("a", PROMPT, ONE)
            await p.submit("b", PROMPT, ONE)
            with pytest.raises(EngineDied):
                await reader
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            assert (await d.ended("a")).failure is Reason.HANDOFF_FAILED

    run(scenario())


def test_failed_pulls_end_their_request_alone_and_leave_the_lease() -> None:
    async def scenario() -> None:
        async with decoding(SimFaults(seed=1, pull_failure_rate=0.3)) as (engine, p, d):
            got = await generations(p, d, 50)
            failed = [x for x in got if x.failure is not None]
            assert 5 < len(failed) < 25
            for one in failed:
                assert (one.failure, one.token_ids) == (Reason.HANDOFF_FAILED, [])
                assert one.message == "the pull failed: the transfer broke off"
            right = SimModel().complete(PROMPT, GREEDY).token_ids
            assert all(x.token_ids == right for x in got if x.failure is None)
            assert engine.lease_ends[LeaseEnd.PULLED] == 50 - len(failed)
            counters = (await d.engine.counters())[0]
            assert (counters.pulls, counters.blocks_used) == (50 - len(failed), 0)

    run(scenario())


def test_an_aborted_request_whose_pull_fails_is_still_silent_and_frees_its_blocks() -> None:
    async def scenario() -> None:
        async with decoding(SimFaults(pull_failure_rate=1.0)) as (_, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            await asyncio.sleep(0.001)
            await d.engine.abort(["a"])
            await asyncio.sleep(1.0)
            assert not d.got("a").ended.is_set()
            assert (await d.engine.counters())[0].blocks_used == 0

    run(scenario())


def test_delayed_pulls_take_longer_and_are_right_within_the_lease() -> None:
    async def scenario() -> None:
        faults = SimFaults(pull_delay_rate=1.0, pull_delay_s=20.0)
        async with decoding(faults) as (engine, p, d):
            (got,) = await generations(p, d, 1)
            assert 20.0 < asyncio.get_running_loop().time() < 21.0
            assert got.token_ids == SimModel().complete(PROMPT, GREEDY).token_ids
            assert engine.lease_ends[LeaseEnd.PULLED] == 1

    run(scenario())


def test_stale_pulls_give_wrong_tokens_and_no_sign() -> None:
    async def scenario() -> None:
        async with decoding(SimFaults(seed=2, stale_pull_rate=0.3)) as (engine, p, d):
            got = await generations(p, d, 50)
            right = SimModel().complete(PROMPT, GREEDY).token_ids
            assert 5 < sum(x.token_ids != right for x in got) < 25
            assert {x.finish for x in got} == {FinishReason.LENGTH}
            assert engine.lease_ends[LeaseEnd.PULLED] == 50

    run(scenario())


def test_the_same_fault_strikes_the_same_request_whatever_else_runs() -> None:
    async def failed(count: int) -> set[int]:
        async with decoding(SimFaults(seed=1, pull_failure_rate=0.3)) as (_, p, d):
            got = await generations(p, d, count)
            return {i for i, x in enumerate(got) if x.failure is not None}

    assert run(failed(10)) == {i for i in run(failed(30)) if i < 10}


def test_an_odd_step_is_told_once_with_its_requests_and_counted_as_odd() -> None:
    async def scenario() -> None:
        async with decoding(SimFaults(out_of_mode_step=5)) as (_, p, d):
            await generations(p, d, 2)
            (told,) = [found for batch in d.batches for found in batch.violations]
            assert (told.rank, told.step, told.kind) == (0, 5, "odd")
            assert {x.engine_request_id for x in told.requests} <= {"r0", "r1"}
            assert told.tokens == len(told.requests) > 0
            (rank,) = await d.engine.counters()
            assert rank.steps_by_kind["odd"] == 1
            assert rank.steps_by_kind["eager"] > 20

    run(scenario())


def test_a_worker_that_has_started_over_has_no_odd_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with decoding(SimFaults(out_of_mode_step=5)) as (_, p, d):
            await generations(p, d, 1)
            assert [found for batch in d.batches for found in batch.violations] == []

    monkeypatch.setenv("SPLITWAVE_RESTARTS", "1")
    run(scenario())
