"""A small deployment for simulations: one router's fleet, its workers, and their network."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from services.router.attempts import Call, Trail
from services.router.discovery import Workers
from services.router.fleet import FleetSettings, WorkerFleet
from services.router.generate import Finish, generate
from splitwave.core.deadline import Deadline
from splitwave.core.generation import Request, Sampling
from splitwave.engine.port import Role
from splitwave.engine.sim import SimModel, SimSettings
from tests.fakes import FakeSink
from tests.sim.network import DecodeNode, PrefillNode, SimNetwork
from tests.sim.weather import Weather, now_s
from tests.unit.traced import NO_TRACES, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a deployment is made of."""

    prefill_nodes: int = 1
    decode_nodes: int = 1
    prefill: SimSettings = field(
        default_factory=lambda: SimSettings(role=Role.PREFILL, step_fixed_s=0.005, lease_ttl_s=600)
    )
    decode: SimSettings = field(
        default_factory=lambda: SimSettings(role=Role.DECODE, ranks=2, step_fixed_s=0.02)
    )
    decode_options: dict[str, float] = field(default_factory=dict)
    weather: Weather = field(default_factory=Weather)
    resumes_burst: int = 1000
    traces: Traces = NO_TRACES


@dataclass(slots=True)
class Served:
    """One request and what came of it."""

    request: Request
    sink: FakeSink = field(default_factory=FakeSink)
    trail: Trail = field(default_factory=Trail)


class World:
    """A running deployment. Made by `world`."""

    def __init__(self, plan: Plan, network: SimNetwork, fleet: WorkerFleet) -> None:
        self.plan, self.network, self.fleet = plan, network, fleet
        self.model = SimModel(
            seed=plan.prefill.model_seed,
            eos_rate=plan.prefill.eos_rate,
            length_max_tokens=plan.prefill.model_len_max_tokens,
        )

    def ask(self, name: str, prompt: tuple[int, ...], sampling: Sampling) -> Served:
        """A request, before it is served."""
        served = Served(Request(name, prompt, sampling))
        self.network.shown[name] = (prompt, served.sink.completion.token_ids)
        return served

    async def serve(self, served: Served, timeout_s: float = 600.0) -> Finish:
        """Serve a request through the whole path. Raises ServingError."""
        call = Call(
            request=served.request,
            key=f"{served.request.request_id}#1",
            deadline=Deadline(now_s() + timeout_s),
            stall_max_s=30.0,
            reserve_tokens=32,
        )
        return await generate(call, self.fleet, served.sink, served.trail)

    def right_tokens(self, served: Served) -> list[int]:
        """What an aggregated engine gives."""
        request = served.request
        return self.model.complete(request.token_ids, request.sampling).token_ids

    async def ready(self) -> None:
        """Wait until every worker is known."""
        wanted = {
            Role.PREFILL: self.plan.prefill_nodes,
            Role.DECODE: self.plan.decode_nodes,
        }
        while self.fleet.usable() != wanted:  # noqa: ASYNC110  # the fleet has no such event
            await asyncio.sleep(0.01)

    async def held(self) -> dict[str, int]:
        """What requests hold anywhere; grants in the router's float do not count."""
        found = {"leases": 0, "prefill blocks": 0, "seats": 0, "decode blocks": 0, "asks": 0}
        for prefill in self.network.prefill.values():
            if prefill.worker is not None and prefill.engine is not None:
                prefill.engine.check()
                prefill.worker.floor.leases.check()
                found["leases"] += prefill.worker.lease_counts().live
                found["prefill blocks"] += sum(
                    x.blocks_used for x in await prefill.engine.counters()
                )
        for decode in self.network.decode.values():
            if decode.worker is not None and decode.engine is not None:
                decode.engine.check()
                decode.worker.room.check()
                table = decode.worker.room.table
                found["seats"] += sum(table.seats_used) - sum(table.floats().values())
                found["decode blocks"] += sum(x.blocks_used for x in await decode.engine.counters())
                found["asks"] += decode.worker.room.load().asks_waiting
        return found


EMPTY = {"leases": 0, "prefill blocks": 0, "seats": 0, "decode blocks": 0, "asks": 0}


@contextlib.asynccontextmanager
async def world(plan: Plan, seed: int = 0) -> AsyncIterator[World]:
    """Start a deployment; stop it at the end of the block."""
    network = SimNetwork(plan.weather, plan.traces)
    for i in range(plan.prefill_nodes):
        settings = replace(plan.prefill, group_id=f"p{i}")
        network.prefill[f"p{i}:1"] = PrefillNode(f"p{i}:1", network, settings)
    for i in range(plan.decode_nodes):
        settings = replace(plan.decode, group_id=f"d{i}")
        node = network.decode[f"d{i}:1"] = DecodeNode(f"d{i}:1", network, settings)
        node.options = plan.decode_options
    nodes: list[PrefillNode | DecodeNode] = [*network.prefill.values(), *network.decode.values()]
    for each in nodes:
        await each.start()
    fleet_settings = FleetSettings(
        router_id="r0",
        prefill=Workers(",".join(network.prefill)),
        decode=Workers(",".join(network.decode)),
        resumes_burst=plan.resumes_burst,
    )
    fleet = WorkerFleet(fleet_settings, network.as_network(), random.Random(seed).random)
    try:
        async with fleet.running():
            yield World(plan, network, fleet)
    finally:
        for each in nodes:
            await each.kill()
