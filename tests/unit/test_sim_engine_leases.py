"""Leases of a simulated prefill group: held, then pulled, released or expired."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import Role
from splitwave.engine.sim import SimEngine, SimFabric, SimFaults, SimModel, SimSettings
from tests.sim.engine_client import Client, pull_of, reading
from tests.sim.virtual_loop import run

ONE = Sampling(max_tokens=1)
GREEDY = Sampling(max_tokens=30, temperature=0.0)
PROMPT = list(range(65, 65 + 40))
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", ranks=2, lease_ttl_s=30.0, step_fixed_s=0.01)
DECODE = SimSettings(role=Role.DECODE, group_id="d", step_fixed_s=0.01)


@asynccontextmanager
async def pair(
    prefill: SimSettings = PREFILL, decode: SimSettings = DECODE
) -> AsyncIterator[tuple[SimEngine, Client, Client]]:
    fabric = SimFabric()
    held_by, pulls = SimEngine(prefill, fabric), SimEngine(decode, fabric)
    held_by.start()
    pulls.start()
    async with reading(held_by) as p, reading(pulls) as d:
        yield held_by, p, d
        held_by.check()
        pulls.check()


async def live_and_used(engine: SimEngine, rank: int = 0) -> tuple[int, int]:
    counters = (await engine.counters())[rank]
    return counters.leases_live, counters.blocks_used


def test_a_held_prompt_says_what_is_held_and_until_when() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, _):
            got = await p.prefill("a", PROMPT, ONE, rank=1)
            assert (got.finish, got.failure) == (FinishReason.LENGTH, None)
            assert got.held is not None
            assert (got.held.block_count, got.held.remote_tokens) == (3, 40)
            assert got.held.expires_at_s == p.batches[-1].at_s + 30.0
            assert await live_and_used(engine, rank=1) == (1, 3)

    run(scenario())


def test_a_prompt_that_was_not_to_be_held_is_not() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, _):
            await p.submit("a", PROMPT, ONE)
            assert (await p.ended("a")).held is None
            assert await live_and_used(engine) == (0, 0)

    run(scenario())


def test_a_prompt_whose_first_token_stops_it_holds_nothing() -> None:
    (first,) = SimModel().complete(PROMPT, ONE).token_ids

    async def scenario() -> None:
        async with pair() as (engine, p, _):
            got = await p.prefill("a", PROMPT, dataclasses.replace(ONE, stop_token_ids=(first,)))
            assert (got.finish, got.stop_token_id, got.held) == (FinishReason.STOP, first, None)
            assert await live_and_used(engine) == (0, 0)

    run(scenario())


def test_a_lease_expires_though_nothing_steps() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, _):
            await p.prefill("a", PROMPT, ONE)
            await asyncio.sleep(29.9)
            assert await live_and_used(engine) == (1, 3)
            await asyncio.sleep(0.2)
            assert await live_and_used(engine) == (0, 0)
            assert engine.lease_ends[LeaseEnd.EXPIRED] == 1

    run(scenario())


def test_a_release_frees_at_once_and_only_once() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, _):
            await p.prefill("a", PROMPT, ONE, rank=1)
            await p.prefill("b", PROMPT, ONE, rank=1)
            await engine.release(["a"])
            assert await live_and_used(engine, rank=1) == (1, 3)
            await engine.release(["a", "a"])
            await asyncio.sleep(60.0)
            assert engine.lease_ends == {
                LeaseEnd.PULLED: 0,
                LeaseEnd.RELEASED: 1,
                LeaseEnd.EXPIRED: 1,
            }

    run(scenario())


def test_a_release_that_overtakes_its_prefill_is_remembered_for_one_lease() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, _):
            await engine.release(["a", "late"])
            got = await p.prefill("a", PROMPT, ONE)
            assert (got.finish, got.held) == (FinishReason.LENGTH, None)
            assert await live_and_used(engine) == (0, 0)
            await asyncio.sleep(31.0)
            assert (await p.prefill("late", PROMPT, ONE)).held is not None

    run(scenario())


@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.025], ids=["queued", "begun", "chunked"])
def test_a_release_of_a_running_prefill_aborts_it(wait_s: float) -> None:
    async def scenario() -> None:
        prefill = dataclasses.replace(PREFILL, batch_max_tokens=64)
        async with pair(prefill) as (engine, p, _):
            await p.submit("a", PROMPT * 10, ONE, hold=True)
            await asyncio.sleep(wait_s)
            await engine.release(["a"])
            await asyncio.sleep(1.0)
            assert not p.got("a").ended.is_set()
            assert await live_and_used(engine) == (0, 0)

    run(scenario())


def test_the_mutant_that_never_releases_keeps_the_blocks() -> None:
    async def scenario() -> None:
        prefill = dataclasses.replace(PREFILL, faults=SimFaults(release_ignored=True))
        async with pair(prefill) as (engine, p, _):
            await p.prefill("a", PROMPT, ONE)
            await engine.release(["a"])
            assert await live_and_used(engine) == (1, 3)

    run(scenario())


def test_waiting_prompts_get_the_blocks_of_ended_leases() -> None:
    async def scenario() -> None:
        prefill = dataclasses.replace(PREFILL, blocks_per_rank=4, model_len_max_tokens=64)
        async with pair(prefill) as (engine, p, _):
            await p.prefill("a", PROMPT, ONE)
            await p.submit("b", PROMPT, ONE, hold=True)
            await asyncio.sleep(5.0)
            assert not p.got("b").ended.is_set()
            await engine.release(["a"])
            await asyncio.sleep(0.03)
            assert p.got("b").ended.is_set()
            began_s = asyncio.get_running_loop().time()
            await p.prefill("c", PROMPT, ONE)
            assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0, abs=0.1)
            assert engine.lease_ends[LeaseEnd.EXPIRED] == 1

    run(scenario())


async def late_text(*, reuse: bool) -> list[int]:
    """Text of a generation whose pull came after its lease."""
    prefill = dataclasses.replace(PREFILL, blocks_per_rank=4, model_len_max_tokens=64)
    async with pair(prefill) as (engine, p, d):
        prefilled = await p.prefill("a", PROMPT, ONE)
        await asyncio.sleep(31.0)
        if reuse:
            await p.submit("b", PROMPT, ONE)
            await p.ended("b")
        await d.submit(
            "a", PROMPT, dataclasses.replace(GREEDY, max_tokens=20), pull=pull_of(prefilled)
        )
        got = await d.ended("a")
        assert (got.finish, got.failure) == (FinishReason.LENGTH, None)
        assert got.pulled[0].bytes_moved == 3 * PREFILL.block_bytes
        assert engine.late_pulls == 1
        return got.token_ids


def test_a_late_pull_reads_wrong_tokens_silently_if_the_blocks_were_reused() -> None:
    right = SimModel().complete(PROMPT, dataclasses.replace(GREEDY, max_tokens=20)).token_ids

    assert run(late_text(reuse=True)) != right
    assert run(late_text(reuse=False)) == right


def test_a_pull_that_outlasts_the_lease_reads_what_is_there_at_its_end() -> None:
    async def scenario() -> list[int]:
        prefill = dataclasses.replace(PREFILL, blocks_per_rank=4, model_len_max_tokens=64)
        faults = SimFaults(pull_delay_rate=1.0, pull_delay_s=40.0)
        async with pair(prefill, dataclasses.replace(DECODE, faults=faults)) as (_, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            await asyncio.sleep(31.0)
            await p.prefill("b", PROMPT, ONE)
            return (await d.ended("a")).token_ids

    assert run(scenario()) != SimModel().complete(PROMPT, GREEDY).token_ids


def test_an_abort_during_a_pull_keeps_the_blocks_until_the_transfer_ends() -> None:
    async def scenario() -> None:
        decode = dataclasses.replace(DECODE, pull_fixed_s=5.0)
        async with pair(decode=decode) as (engine, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            await asyncio.sleep(1.0)
            await d.engine.abort(["a"])
            await asyncio.sleep(3.9)
            assert (await d.engine.counters())[0].blocks_used == 3
            assert await live_and_used(engine) == (1, 3)
            assert d.pulls_ended == []
            await asyncio.sleep(0.2)
            assert d.pulls_ended == ["a"]
            assert (await d.engine.counters())[0].blocks_used == 0
            # The transfer ran to its end, so its lease is over.
            assert engine.lease_ends[LeaseEnd.PULLED] == 1
            assert not d.got("a").ended.is_set()

    run(scenario())


def test_an_abort_before_the_pull_leaves_the_lease_to_its_owner() -> None:
    async def scenario() -> None:
        decode = dataclasses.replace(DECODE, seats_per_rank=1)
        async with pair(decode=decode) as (engine, p, d):
            long = await p.prefill("long", PROMPT, ONE)
            await d.submit("long", PROMPT, Sampling(max_tokens=2_000), pull=pull_of(long))
            queued = await p.prefill("queued", PROMPT, ONE)
            await d.submit("queued", PROMPT, GREEDY, pull=pull_of(queued))
            await asyncio.sleep(0.1)
            await d.engine.abort(["queued"])
            await asyncio.sleep(0.0)
            assert d.pulls_ended == ["queued"]
            await asyncio.sleep(5.0)
            assert await live_and_used(engine) == (1, 3)
            await engine.release(["queued"])
            assert await live_and_used(engine) == (0, 0)

    run(scenario())


def test_a_pull_from_a_group_that_has_stopped_fails() -> None:
    async def scenario() -> None:
        async with pair() as (engine, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await engine.close()
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            got = await d.ended("a")
            assert (got.failure, got.pulled) == (Reason.HANDOFF_FAILED, [])
            assert "nothing answers as p#1" in got.message
            assert (await d.engine.counters())[0].blocks_used == 0

    run(scenario())


def test_a_decode_group_has_nothing_to_release() -> None:
    async def scenario() -> None:
        async with pair() as (_, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            await d.engine.release(["a"])
            assert (await d.ended("a")).finish is FinishReason.LENGTH

    run(scenario())


@pytest.mark.parametrize(("wait_s", "ended"), [(0.015, ["a"]), (0.025, [])])
def test_the_end_of_a_pull_is_told_of_requests_aborted_before_their_first_output(
    wait_s: float, ended: list[str]
) -> None:
    async def scenario() -> None:
        async with pair() as (_, p, d):
            prefilled = await p.prefill("a", PROMPT, ONE)
            await d.submit("a", PROMPT, GREEDY, pull=pull_of(prefilled))
            # The pull lands after one step, the first token comes after two.
            await asyncio.sleep(wait_s)
            await d.engine.abort(["a"])
            await asyncio.sleep(1.0)
            assert (d.pulls_ended, bool(d.got("a").token_ids)) == (ended, not ended)

    run(scenario())
