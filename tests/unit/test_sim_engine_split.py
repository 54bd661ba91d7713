"""Split over two simulated groups, a text is what one engine gives."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from splitwave.core.errors import Reason
from splitwave.core.generation import FinishReason, Sampling, first_token_is_kept
from splitwave.core.handoff import LeaseEnd
from splitwave.engine.port import Role
from splitwave.engine.sim import Completion, SimFabric, SimSettings, start_sim_group
from splitwave.engine.sim.admission import model_of
from tests.sim.engine_client import Client, pull_of, reading
from tests.sim.virtual_loop import run

GREEDY = Sampling(max_tokens=40, temperature=0.0)
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", ranks=2)
DECODE = SimSettings(role=Role.DECODE, group_id="d", ranks=2)


@asynccontextmanager
async def pair(
    prefill: SimSettings = PREFILL, decode: SimSettings = DECODE, *, fabric: bool = True
) -> AsyncIterator[tuple[Client, Client]]:
    shared = SimFabric() if fabric else None
    async with (
        reading(await start_sim_group(prefill, shared)) as p,
        reading(await start_sim_group(decode, shared)) as d,
    ):
        yield p, d


async def split(
    clients: tuple[Client, Client],
    request_id: str,
    prompt: list[int],
    sampling: Sampling,
    *,
    keep: bool,
) -> Completion:
    """Generate as the router does: prefill's token is kept and counted, or made again."""
    p, d = clients
    prefilled = await p.prefill(request_id, prompt, dataclasses.replace(sampling, max_tokens=1))
    first = prefilled.token_ids if keep else []
    if keep and prefilled.finish is FinishReason.STOP:
        assert prefilled.held is None
        return Completion(first, prefilled.logprobs, FinishReason.STOP, prefilled.stop_token_id)
    rest = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - len(first))
    await d.submit(request_id, prompt + first, rest, pull=pull_of(prefilled), rank=1)
    got = await d.ended(request_id)
    assert got.failure is None, got.message
    assert got.finish is not None
    assert [x.first_position for x in got.pulled] == [len(prompt) + len(first) - 1]
    assert got.pulled[0].bytes_moved == -(-len(prompt) // 16) * PREFILL.block_bytes
    logprobs = prefilled.logprobs[: len(first)] + got.logprobs
    return Completion(first + got.token_ids, logprobs, got.finish, got.stop_token_id)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 511])
@pytest.mark.parametrize("keep", [True, False])
def test_any_prompt_length_gives_the_aggregated_text(length: int, keep: bool) -> None:
    prompt = [65 + i % 26 for i in range(length)]

    async def scenario() -> Completion:
        async with pair() as (p, d):
            return await split((p, d), "a", prompt, GREEDY, keep=keep)

    if length == 1 and not keep:
        with pytest.raises(AssertionError, match="first computed position would be 0"):
            run(scenario())
        return
    assert run(scenario()) == model_of(PREFILL).complete(prompt, GREEDY)


FEATURES = {
    "greedy": GREEDY,
    "sampled": Sampling(max_tokens=40, temperature=0.7, top_p=0.9, top_k=20, min_p=0.05),
    "biased": Sampling(max_tokens=40, logit_bias={65: 2.0}),
    "seeded": Sampling(max_tokens=40, temperature=0.7, seed=3),
    "seeded greedy": Sampling(max_tokens=40, temperature=0.0, seed=3),
    "penalties": Sampling(max_tokens=40, presence_penalty=0.5, frequency_penalty=0.5),
    "repetition": Sampling(max_tokens=40, repetition_penalty=1.3),
    "min_tokens": Sampling(max_tokens=40, min_tokens=10, stop_token_ids=tuple(range(32, 80))),
    "stop": Sampling(max_tokens=40, stop_token_ids=tuple(range(32, 40))),
    "eos": Sampling(max_tokens=40, eos_token_ids=(259,)),
    "ignore_eos": Sampling(max_tokens=40, eos_token_ids=(259,), ignore_eos=True),
    "logprobs": Sampling(max_tokens=40, temperature=0.5, logprobs=5),
    "two tokens": Sampling(max_tokens=2),
}


@pytest.mark.parametrize("sampling", FEATURES.values(), ids=list(FEATURES))
def test_every_sampling_feature_gives_the_aggregated_text(sampling: Sampling) -> None:
    keep = first_token_is_kept(sampling)
    prefill = dataclasses.replace(PREFILL, eos_rate=0.05)
    decode = dataclasses.replace(DECODE, eos_rate=0.05)

    async def scenario() -> None:
        async with pair(prefill, decode) as (p, d):
            for i in range(20):
                prompt = list(b"Tell me about %d" % i)
                got = await split((p, d), f"r{i}", prompt, sampling, keep=keep)
                assert got == model_of(prefill).complete(prompt, sampling)

    run(scenario())


@pytest.mark.parametrize("name", ["seeded", "penalties", "repetition"])
def test_a_first_token_kept_where_it_must_not_be_shows_as_a_wrong_text(name: str) -> None:
    sampling, prompt = FEATURES[name], list(b"Tell me")

    async def scenario() -> Completion:
        async with pair() as (p, d):
            return await split((p, d), "a", prompt, sampling, keep=True)

    assert run(scenario()) != model_of(PREFILL).complete(prompt, sampling)


@pytest.mark.parametrize("kept", [1, 7, 16, 39])
def test_a_resume_from_prompt_and_emitted_tokens_goes_on_with_the_same_text(kept: int) -> None:
    prompt = list(b"Once upon a time")
    whole = model_of(PREFILL).complete(prompt, GREEDY).token_ids

    async def scenario() -> Completion:
        async with pair() as (p, d):
            rest = dataclasses.replace(GREEDY, max_tokens=40 - kept)
            if kept == 39:
                got = await p.prefill("a", prompt + whole[:kept], rest)
                assert got.finish is not None
                return Completion(got.token_ids, [], got.finish, None)
            return await split((p, d), "a", prompt + whole[:kept], rest, keep=True)

    assert run(scenario()).token_ids == whole[kept:]


def test_another_prompts_handoff_gives_a_wrong_text() -> None:
    async def scenario() -> list[int]:
        async with pair() as (p, d):
            await p.prefill("a", list(b"right prompt"), Sampling(max_tokens=1))
            other = await p.prefill("b", list(b"wrong prompt"), Sampling(max_tokens=1))
            await d.submit("c", list(b"right prompt"), GREEDY, pull=pull_of(other))
            return (await d.ended("c")).token_ids

    assert run(scenario()) != model_of(PREFILL).complete(list(b"right prompt"), GREEDY).token_ids


def test_an_engine_that_is_not_split_gives_the_aggregated_text_too() -> None:
    async def scenario() -> list[int]:
        async with reading(await start_sim_group(PREFILL)) as p:
            await p.submit("a", list(b"alone"), GREEDY)
            return (await p.ended("a")).token_ids

    assert run(scenario()) == model_of(PREFILL).complete(list(b"alone"), GREEDY).token_ids


def test_hundreds_at_once_give_their_aggregated_texts_and_leave_nothing_behind() -> None:
    async def scenario() -> None:
        async with pair() as (p, d):
            prompts = {f"r{i}": list(b"number %d " % i) * (1 + i % 9) for i in range(300)}
            sampling = dataclasses.replace(GREEDY, max_tokens=60)
            jobs = [split((p, d), k, v, sampling, keep=True) for k, v in prompts.items()]
            for got, prompt in zip(await asyncio.gather(*jobs), prompts.values(), strict=True):
                assert got == model_of(PREFILL).complete(prompt, sampling)
            counters = [*await p.engine.counters(), *await d.engine.counters()]
            assert [x.blocks_used for x in counters] == [0, 0, 0, 0]
            assert sum(x.pulls for x in counters) == 300

    run(scenario())


def test_between_processes_a_pull_needs_the_parameters_alone() -> None:
    async def scenario() -> tuple[Completion, int]:
        async with pair(fabric=False) as (p, d):
            got = await split((p, d), "a", list(b"far away"), GREEDY, keep=True)
            # Nobody tells the prefill engine: the worker has to.
            live = (await p.engine.counters())[0].leases_live
            await p.engine.release(["a"])
            assert (await p.engine.counters())[0].leases_live == 0
            return got, live

    assert run(scenario()) == (model_of(PREFILL).complete(list(b"far away"), GREEDY), 1)


@pytest.mark.parametrize(("wait_s", "right"), [(29.0, True), (31.0, False)])
def test_between_processes_a_pull_after_the_lease_reads_wrong_tokens_silently(
    wait_s: float, right: bool
) -> None:
    async def scenario() -> list[int]:
        async with pair(fabric=False) as (p, d):
            prefilled = await p.prefill("a", list(b"late"), Sampling(max_tokens=1))
            await asyncio.sleep(wait_s)
            await d.submit("a", list(b"late"), GREEDY, pull=pull_of(prefilled))
            got = await d.ended("a")
            assert got.finish is FinishReason.LENGTH
            return got.token_ids

    expected = model_of(PREFILL).complete(list(b"late"), GREEDY).token_ids
    assert (run(scenario()) == expected) is right


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_it_runs_in_real_time_on_either_loop(loop: str) -> None:
    fast = {"time_scale": 0.1}

    async def scenario() -> list[Completion]:
        prefill = dataclasses.replace(PREFILL, **fast)  # type: ignore[arg-type]  # names a field
        decode = dataclasses.replace(DECODE, **fast)  # type: ignore[arg-type]  # names a field
        async with pair(prefill, decode) as (p, d):
            jobs = [split((p, d), f"r{i}", [65 + i, 66], GREEDY, keep=True) for i in range(20)]
            return await asyncio.gather(*jobs)

    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        got = runner.run(scenario())

    assert got == [model_of(PREFILL).complete([65 + i, 66], GREEDY) for i in range(20)]


REFUSALS = {
    "no pull": ({"pull": None}, Reason.INTERNAL, "no_handoff"),
    "two tokens to compute": ({"token_ids": b"handed and on"}, Reason.INTERNAL, "many_tokens"),
    "fewer tokens than pulled": ({"token_ids": b"hand"}, Reason.INTERNAL, "many_tokens"),
    "position 0": ({"token_ids": b"h"}, Reason.INTERNAL, "first_position"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=list(REFUSALS))
def test_a_decode_group_refuses_what_is_no_decode_step(
    case: tuple[dict[str, bytes | None], Reason, str],
) -> None:
    changed, reason, rule = case

    async def scenario() -> None:
        async with pair() as (p, d):
            prefilled = await p.prefill("a", list(b"handed"), Sampling(max_tokens=1))
            pull = None if "pull" in changed else pull_of(prefilled)
            await d.submit("a", list(changed.get("token_ids") or b"handed"), GREEDY, pull=pull)
            assert (await d.ended("a")).failure is reason
            assert (await d.engine.counters())[0].guard_refusals == {rule: 1}
            assert (await d.engine.counters())[0].steps_by_kind == {"eager": 0}

    run(scenario())


def test_a_handoff_of_another_layout_is_refused() -> None:
    async def scenario() -> Reason | None:
        decode = dataclasses.replace(DECODE, model_seed=1)
        async with pair(PREFILL, decode) as (p, d):
            prefilled = await p.prefill("a", list(b"handed"), Sampling(max_tokens=1))
            await d.submit("a", list(b"handed"), GREEDY, pull=pull_of(prefilled))
            return (await d.ended("a")).failure

    assert run(scenario()) is Reason.KV_LAYOUT_MISMATCH


def test_parameters_of_another_connector_are_refused() -> None:
    async def scenario() -> None:
        async with pair() as (p, d):
            prefilled = await p.prefill("a", list(b"handed"), Sampling(max_tokens=1))
            fields = json.loads(pull_of(prefilled).connector_params)
            mistyped = json.dumps(fields | {"rank": "0"}).encode()
            for i, data in enumerate((b"", b"\xff", b"[]", b"7", b'{"rank": 1}', mistyped)):
                pull = dataclasses.replace(pull_of(prefilled), connector_params=data)
                await d.submit(f"r{i}", list(b"handed"), GREEDY, pull=pull)
                assert (await d.ended(f"r{i}")).failure is Reason.HANDOFF_FAILED
            pull = dataclasses.replace(pull_of(prefilled), remote_tokens=7)
            await d.submit("count", list(b"handed!"), GREEDY, pull=pull)
            assert (await d.ended("count")).failure is Reason.HANDOFF_FAILED

    run(scenario())


def test_a_pull_ends_the_lease_once() -> None:
    async def scenario() -> None:
        async with pair() as (p, d):
            await split((p, d), "a", list(b"once"), GREEDY, keep=True)
            await p.engine.release(["a"])
            await asyncio.sleep(60.0)
            assert p.engine.lease_ends == {  # type: ignore[attr-defined]  # the simulator's own
                LeaseEnd.PULLED: 1,
                LeaseEnd.RELEASED: 0,
                LeaseEnd.EXPIRED: 0,
            }

    run(scenario())
