"""Thousands of requests in virtual time: each has its whole trace, by every hop's production code.

`make sim SEEDS=1000` serves 10,000. bench/tracing.py does too, and bench/results has what it saw.

The router's gRPC handler is called as a function; below it are the fleet, both kinds of workers
and the simulated engines. Only sockets, the clock and the exporter's thread are replaced.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from services.router.front_door import DoorSettings, FrontDoor
from services.router.servicer import GenerateServicer
from splitwave.engine.port import Role
from splitwave.engine.sim import SimFaults, SimSettings, write_vocabulary
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import WallClock
from splitwave.runtime.tracing_check import broken_links, faults, missing, of_requests
from splitwave.runtime.tracing_files import SpanRecord, by_trace
from splitwave.text import Tokenizer
from splitwave.v1alpha1 import generate_service_pb2 as pb
from splitwave.v1alpha1 import generation_pb2
from tests.conftest import SEEDS
from tests.sim import virtual_loop
from tests.sim.router_world import EMPTY, Plan, World, world
from tests.sim.weather import Weather, now_s
from tests.unit.traced import Kept

REQUESTS = max(2000, 10 * SEEDS)
ARRIVE_EVERY_S = 0.01
BURST, BURST_EVERY = 60, 500
"""Every so many requests, so many come at once, and some find the router full."""
LIVE_MAX = 50
CANCELLED = "cancelled"
MORNING_NS = 1_700_000_000 * 10**9


class Aborted(Exception):
    """The call has ended with a status."""


@dataclass(slots=True, eq=False)
class ClientCall:
    """A client's end of one call; it leaves after so many messages, if it leaves."""

    leaves_after: int | None = None
    outcome: str = names.FINISHED
    messages: int = 0
    task: "asyncio.Task[None] | None" = None

    def time_remaining(self) -> float:
        return 60.0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, message: pb.GenerateResponse) -> None:
        await asyncio.sleep(0)
        self.messages += 1
        if self.messages == self.leaves_after and not message.finish_reason:
            assert self.task is not None
            self.outcome = CANCELLED
            self.task.cancel()

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn:
        info = ErrorInfo()
        Status.FromString(trailing_metadata[0][1]).details[0].Unpack(info)
        self.outcome = info.reason.lower()
        raise Aborted


def request_of(number: int, rng: random.Random) -> pb.GenerateRequest:
    """Nine in ten can be served; of the others half are wrong and half ask for too much."""
    token_ids = [rng.randrange(32, 127) for _ in range(rng.choice([2, 15, 16, 40]))]
    sampling = generation_pb2.SamplingParams(
        max_tokens=rng.choice([1, 2, 8, 12]), temperature=0.0,
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
    )  # fmt: skip
    request = pb.GenerateRequest(request_id=f"r{number}", sampling=sampling)
    if number % 20 == 7:
        request.sampling.top_p = 7.0
    elif number % 20 == 17:
        request.sampling.max_tokens = 100_000
    elif number % 10 == 3:
        request.sampling.max_tokens = 40
    request.token_ids.ids.extend(token_ids)
    return request


async def serve(servicer: GenerateServicer, number: int, rng: random.Random) -> str:
    """One request, from a client that may leave; returns how it ended for that client."""
    call = ClientCall(leaves_after=rng.randint(1, 6) if number % 10 == 3 else None)
    request = request_of(number, rng)
    call.task = asyncio.create_task(servicer.Generate(request, call))
    await asyncio.wait([call.task])
    if not call.task.cancelled() and call.task.exception() is not None:
        assert isinstance(call.task.exception(), Aborted)
    return call.outcome


def plan(rng: random.Random, kept: Kept, clock: WallClock) -> Plan:
    """Two workers of each kind, short of blocks, on a network that loses calls."""
    pulls = SimFaults(seed=1, pull_failure_rate=0.01, pull_delay_rate=0.01, pull_delay_s=0.5)
    decode = SimSettings(
        role=Role.DECODE, ranks=2, step_fixed_s=0.03, blocks_per_rank=60, faults=pulls,
        model_len_max_tokens=512,
    )  # fmt: skip
    return Plan(
        prefill_nodes=2,
        decode_nodes=2,
        prefill=SimSettings(
            role=Role.PREFILL, step_fixed_s=0.01, lease_ttl_s=5.0, model_len_max_tokens=512
        ),
        decode=decode,
        weather=Weather(
            rng=rng,
            delay_max_s=0.003,
            call_lost_rate=0.01,
            release_lost_rate=0.5,
            confirm_lost_rate=0.01,
        ),
        traces=kept.traces(clock),
    )


async def many(tokenizer: Tokenizer, kept: Kept, requests: int, seed: int) -> dict[str, str]:
    """Serve so many; returns each one's outcome. Sessions are reset meanwhile."""
    rng = random.Random(seed)
    clock = WallClock(now_s, lambda: MORNING_NS + int(now_s() * 1e9))
    deployment = plan(rng, kept, clock)
    async with world(deployment, seed) as w:
        await w.ready()
        settings = DoorSettings(router_id="r0", model="sim", live_max=LIVE_MAX)
        door = FrontDoor(settings, tokenizer, w.fleet)
        door.traces = deployment.traces.router
        servicer = GenerateServicer(door)
        calls = {}
        for number in range(requests):
            if number % BURST_EVERY > BURST:
                await asyncio.sleep(ARRIVE_EVERY_S)
            if number % 1000 == 450:
                w.network.decode[f"d{number // 1000 % 2}:1"].reset()
            serving = serve(servicer, number, random.Random(f"{seed}/{number}"))
            calls[f"r{number}"] = asyncio.create_task(serving)
        await asyncio.wait(calls.values())
        await settle(w)
    assert deployment.traces.dropped == 0
    return {name: call.result() for name, call in calls.items()}


async def settle(w: World) -> None:
    """Wait until nothing is held; leases that nobody could release run out."""
    await asyncio.sleep(w.plan.prefill.lease_ttl_s + 2.0)
    assert await w.held() == EMPTY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_vocabulary(directory)
    return Tokenizer.load(Path(directory))


def test_thousands_of_requests_of_all_ends_have_a_whole_trace_each(tokenizer: Tokenizer) -> None:
    kept = Kept()

    wanted = virtual_loop.run(many(tokenizer, kept, REQUESTS, 1))

    spans = list(kept.spans())
    assert faults(spans, wanted) == []
    assert broken_links(spans) == []
    check_missing(spans)
    spans = of_requests(spans)
    assert len(by_trace(spans)) == len(wanted) == REQUESTS
    check_variety(spans, Counter(wanted.values()))
    last = next(i for i, span in enumerate(spans) if span.name == names.TOKENS)
    lost = [*spans[:last], *spans[last + 1 :]]
    assert faults(lost, wanted), "a lost span is not found"
    assert faults([*lost, replace(spans[last], ended_ns=0)], wanted), "an unended one is not found"


def check_missing(spans: list[SpanRecord]) -> None:
    """See that traces lack what no worker could tell: of prefills that the network lost."""
    lacks = missing(spans)
    assert 0 < len(lacks) < 0.03 * REQUESTS, lacks
    assert all(names.PREFILL_SERVE in lack for lack in lacks), lacks


def check_variety(spans: list[SpanRecord], outcomes: Counter[str]) -> None:
    """See that the run had what it is to prove: every end, resumes, every end of a lease."""
    assert outcomes[CANCELLED] > 0.08 * REQUESTS, outcomes
    assert outcomes["invalid_request"] + outcomes["overloaded"] > 0.1 * REQUESTS, outcomes
    assert outcomes["overloaded"] > 0, outcomes
    assert outcomes[names.FINISHED] > 0.75 * REQUESTS, outcomes
    numbers = {s.attributes["splitwave.attempt"] for s in spans if s.name == names.ATTEMPT}
    assert {1, 2} <= numbers, "nothing was resumed"
    ends = Counter(s.attributes[names.LEASE_END] for s in spans if s.name == names.LEASE)
    assert set(ends) == {"pulled", "released", "expired"}, ends
