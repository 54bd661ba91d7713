"""The router and its workers under faults, in virtual time.

Reproduce a failure with `pytest "tests/sim/test_router_sim.py::test_random_faults[N]"`.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from services.router.generate import Finish
from services.router.releases import Releases
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, first_token_is_kept
from splitwave.core.prefill import PrefillResult
from splitwave.engine.port import Role
from splitwave.engine.sim import SimFaults, SimSettings
from tests.sim import virtual_loop
from tests.sim.cancelling import CancelledAt, When
from tests.sim.faults import Faults
from tests.sim.router_world import EMPTY, Plan, Served, World, world
from tests.sim.weather import Weather, now_s

GREEDY = Sampling(max_tokens=20, temperature=0.0)
PROMPT = tuple(range(40, 80))


async def one_request() -> None:
    async with world(Plan()) as w:
        await w.ready()
        served = w.ask("r", PROMPT, GREEDY)

        await w.serve(served)

        assert list(served.sink.token_ids) == w.right_tokens(served)
        assert served.trail.handoff_bytes > 0
        await asyncio.sleep(1.0)
        assert await w.held() == EMPTY


def test_one_request_gives_the_tokens_of_an_aggregated_engine() -> None:
    virtual_loop.run(one_request())


def test_a_request_that_its_client_ends_tells_what_its_handoff_cost() -> None:
    """As one whose text came to a stop string does: its end is the router's, not the worker's."""

    async def scenario() -> None:
        async with world(Plan()) as w:
            await w.ready()
            whole = w.ask("r", PROMPT, GREEDY)
            await w.serve(whole)
            stopped = w.ask("s", PROMPT, GREEDY)
            stopped.sink.stop_after = 5
            early = await w.serve(stopped)

            assert stopped.sink.token_ids == whole.sink.token_ids[:5]
            assert early.finish_reason is FinishReason.STOP
            assert stopped.trail.handoff_bytes == whole.trail.handoff_bytes > 0
            assert stopped.trail.handoff_s > 0

    virtual_loop.run(scenario())


async def reset_under_64_streams() -> None:
    async with world(Plan()) as w:
        await w.ready()
        asked = [w.ask(f"r{i}", (*PROMPT, i), replace(GREEDY, max_tokens=100)) for i in range(64)]
        streams = [asyncio.create_task(w.serve(served)) for served in asked]
        await asyncio.sleep(1.0)
        assert min(len(served.sink.token_ids) for served in asked) > 10
        assert not any(stream.done() for stream in streams)

        w.network.decode["d0:1"].reset()
        await asyncio.gather(*streams)

        assert w.network.prefills == 64, "a second prefill"
        for served in asked:
            assert list(served.sink.token_ids) == w.right_tokens(served)
        worker = w.network.decode["d0:1"].worker
        assert worker is not None
        assert worker.sessions.reattached == 1
        await asyncio.sleep(1.0)
        assert await w.held() == EMPTY


def test_a_reset_of_a_session_under_64_streams_costs_no_second_prefill_and_no_gap() -> None:
    virtual_loop.run(reset_under_64_streams())


async def too_large_a_submission() -> None:
    async with world(Plan()) as w:
        await w.ready()
        others = [w.ask(f"r{i}", (*PROMPT, i), GREEDY) for i in range(8)]
        streams = [asyncio.create_task(w.serve(served)) for served in others]
        await asyncio.sleep(0.1)

        def swell(result: PrefillResult) -> PrefillResult:
            assert result.handoff is not None
            large = replace(result.handoff, connector_params=bytes(9 * 1024 * 1024))
            return replace(result, handoff=large)

        w.network.on_prefilled = swell
        with pytest.raises(ServingError, match="above") as refused:
            await w.serve(w.ask("large", PROMPT, GREEDY))

        assert refused.value.reason is Reason.INVALID_REQUEST
        await asyncio.gather(*streams)
        for served in others:
            assert list(served.sink.token_ids) == w.right_tokens(served)
        worker = w.network.decode["d0:1"].worker
        assert worker is not None
        assert (worker.sessions.opened, worker.sessions.reattached) == (1, 0)
        await asyncio.sleep(1.0)
        assert await w.held() == EMPTY


def test_a_submission_over_the_limit_ends_alone() -> None:
    virtual_loop.run(too_large_a_submission())


async def a_worker_hangs() -> None:
    async with world(Plan(decode_nodes=2)) as w:
        await w.ready()
        asked = [w.ask(f"r{i}", (*PROMPT, i), replace(GREEDY, max_tokens=200)) for i in range(16)]
        streams = [asyncio.create_task(w.serve(served)) for served in asked]
        await asyncio.sleep(1.0)

        w.network.decode["d0:1"].hang()
        began_s = now_s()
        await asyncio.gather(*streams)

        assert 35.0 < now_s() - began_s < 60.0, "silence, reattach, and the rest of the tokens"
        for served in asked:
            assert list(served.sink.token_ids) == w.right_tokens(served)
        assert 16 < w.network.prefills <= 32


def test_streams_at_a_worker_that_hangs_go_on_elsewhere() -> None:
    virtual_loop.run(a_worker_hangs())


@dataclass(frozen=True)
class Path:
    """One way for a request to go, each await of which is cancelled in turn."""

    plan: Plan = field(default_factory=Plan)
    sampling: Sampling = field(default_factory=lambda: replace(GREEDY, max_tokens=400))
    refusing: tuple[str, ...] = ()
    """Decode workers that give room and then refuse each submission."""


PATHS = {
    "first token kept": Path(),
    "all tokens from decode": Path(
        sampling=replace(GREEDY, max_tokens=400, repetition_penalty=1.2)
    ),
    "room asked for": Path(plan=Plan(decode_options={"grant_float_max": 0})),
    "refused and offered elsewhere": Path(plan=Plan(decode_nodes=2), refusing=("d0:1",)),
    "refused everywhere": Path(plan=Plan(decode_nodes=2), refusing=("d0:1", "d1:1")),
    "ends in prefill": Path(sampling=replace(GREEDY, max_tokens=1)),
}


async def cancelled_everywhere(path: Path, when: When) -> list[int]:
    """Cancel one request at each of its waits; return those after which something stays held."""
    still_held: list[int] = []
    async with world(replace(path.plan, weather=Weather())) as w:
        await w.ready()
        for address in path.refusing:
            worker = w.network.decode[address].worker
            assert worker is not None
            worker.decoding.draining = True
        for k in range(1, 100):
            served = w.ask(f"r{k}", PROMPT, path.sampling)
            task = asyncio.create_task(attempt_at(CancelledAt(w.serve(served), k, when)))
            await asyncio.wait((task,))
            await asyncio.sleep(2.0)
            if await w.held() != EMPTY:
                still_held.append(k)
            if not task.cancelled():
                assert k > 2
                if not task.exception():
                    assert list(served.sink.token_ids) == w.right_tokens(served)
                return still_held
    raise AssertionError("the request never finished")


async def attempt_at(cancelling: CancelledAt[Finish]) -> None:
    await cancelling


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("when", When)
def test_a_cancel_at_any_await_leaves_nothing_held_anywhere(when: When, name: str) -> None:
    assert virtual_loop.run(cancelled_everywhere(PATHS[name], when)) == []


async def resets_at_any_moment(seed: int) -> None:
    rng = random.Random(seed)
    async with world(Plan(weather=Weather(rng=rng, delay_max_s=0.03)), seed) as w:
        await w.ready()
        asked = [w.ask(f"r{i}", (*PROMPT, i), GREEDY) for i in range(20)]

        async def one(served: Served) -> None:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await w.serve(served)

        streams = [asyncio.create_task(one(served)) for served in asked]
        for _ in range(8):
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            w.network.decode["d0:1"].reset()
        await asyncio.gather(*streams)

        assert w.network.prefills == 20, "a second prefill"
        for served in asked:
            assert list(served.sink.token_ids) == w.right_tokens(served)
        await asyncio.sleep(3.0)
        assert await w.held() == EMPTY


@pytest.mark.parametrize("seed", range(40))
def test_resets_at_any_moment_cost_no_second_prefill(seed: int) -> None:
    virtual_loop.run(resets_at_any_moment(seed), seed)


def test_a_fleet_that_never_releases_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Releases, "start", lambda self, held: None)

    still_held = virtual_loop.run(cancelled_everywhere(Path(), When.BEGIN))

    assert still_held


def random_plan(rng: random.Random) -> Plan:
    """Small groups, so that room is short, requests are preempted and leases run out."""
    blocks = rng.choice([40, 200])
    return Plan(
        prefill_nodes=2,
        decode_nodes=2,
        prefill=SimSettings(
            role=Role.PREFILL,
            lease_ttl_s=5.0,
            step_fixed_s=0.01,
            step_per_prefill_token_s=1e-4,
            eos_rate=0.01,
            blocks_per_rank=blocks,
            model_len_max_tokens=512,
        ),
        decode=SimSettings(
            role=Role.DECODE,
            ranks=rng.randint(1, 3),
            seats_per_rank=rng.randint(2, 12),
            step_fixed_s=0.05,
            eos_rate=0.01,
            faults=SimFaults(
                seed=rng.randrange(1000),
                pull_failure_rate=0.03,
                pull_delay_rate=0.05,
                pull_delay_s=rng.choice([0.5, 8.0]),
            ),
            blocks_per_rank=blocks,
            model_len_max_tokens=512,
        ),
        weather=Weather(
            rng=random.Random(rng.random()),
            delay_max_s=rng.choice([0.001, 0.05]),
            call_lost_rate=0.03,
            release_lost_rate=0.03,
            confirm_lost_rate=0.03,
        ),
    )


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        max_tokens=rng.choice([1, 2, 10, 40, 100]),
        temperature=rng.choice([0.0, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        ignore_eos=rng.random() < 0.5,
        eos_token_ids=(259,),
        logprobs=rng.choice([None, None, 2]),
    )


async def random_client(w: World, rng: random.Random, name: str) -> str:
    """One request of a client that may be impatient; returns its one outcome."""
    await asyncio.sleep(rng.uniform(0.0, 10.0))
    prompt = tuple(rng.randrange(32, 127) for _ in range(rng.choice([1, 15, 16, 17, 60, 200])))
    served = w.ask(name, prompt, random_sampling(rng))
    patience_s = rng.choice([0.1, 1.0, 3.0, 60.0, 60.0])
    try:
        async with asyncio.timeout(patience_s):
            await w.serve(served, timeout_s=rng.choice([2.0, 60.0]))
    except TimeoutError:
        return "cancelled"
    except ServingError as error:
        return error.reason.value
    stateless = first_token_is_kept(served.request.sampling)
    if stateless or served.trail.attempts == 1:
        assert list(served.sink.token_ids) == w.right_tokens(served)
    return "finished"


async def random_faults(seed: int) -> tuple[Counter[str], Counter[str]]:
    rng = random.Random(seed)
    plan = random_plan(rng)
    async with world(plan, seed) as w:
        await w.ready()
        faults = Faults(w, random.Random(rng.random()))
        striking = asyncio.create_task(faults.strike(rng.choice([0.7, 3.0]), until_s=12.0))
        clients = [
            asyncio.create_task(random_client(w, random.Random(f"{seed}/{i}"), f"r{i}"))
            for i in range(30)
        ]
        outcomes = Counter(await asyncio.gather(*clients))
        await striking

        assert outcomes.total() == 30, "I5"
        assert outcomes[Reason.INTERNAL.value] == 0, "a peer broke the contract"
        await asyncio.sleep(plan.prefill.lease_ttl_s + 3.0)  # Leases of lost offers.
        assert await w.held() == EMPTY, "I3"
    return outcomes, faults.struck


def test_random_faults(seed: int) -> None:
    virtual_loop.run(random_faults(seed), seed)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (virtual_loop.run(random_faults(7), 7) for _ in range(2))

    assert first == second


def test_the_faults_leave_most_requests_served() -> None:
    runs = [virtual_loop.run(random_faults(seed), seed) for seed in range(1000, 1010)]
    outcomes, struck = Counter[str](), Counter[str]()
    for run_outcomes, run_struck in runs:
        outcomes += run_outcomes
        struck += run_struck

    assert outcomes["finished"] > 100, outcomes
    assert min(struck.values()) > 0, struck
    assert len(struck) == 4, struck
