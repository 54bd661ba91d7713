"""Groups of real engines whose waves the checks disturb, and requests for them."""

import asyncio
import contextlib
import itertools
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # a group's settings, and what an engine's call answers

from splitwave.core.wave_message import StartWave
from splitwave.engine.port import EngineRequest, Role
from splitwave.engine.vllm.coordinator import Coordinator
from splitwave.engine.vllm.start import start_group
from splitwave.engine.vllm.switches import FAULTS
from tests.e2e.adapter_cases import Case, greedy, prompt, settings
from tests.e2e.adapter_pair import Caller, going_on

PORTS = itertools.count(26100, 8)
NAMES = itertools.count()


class Group:
    """One group of several ranks; of a decode group's requests the prompts are prefilled before."""

    def __init__(self, caller: Caller, prefill: "Group | None") -> None:
        self.caller = caller
        self.prefill = prefill
        self.engine = caller.engine
        self.ranks = caller.engine.description.ranks

    @property
    def coordinator(self) -> Coordinator:
        """Ours; a stock group has none."""
        assert self.engine.coordinator is not None
        return self.engine.coordinator

    async def request(
        self, rank: int, tokens: int, *, length: int = 40, seed: int = 3
    ) -> EngineRequest:
        """A request that yields so many tokens on one rank, ready to be submitted."""
        name, token_ids, sampling = f"w{next(NAMES)}", prompt(length, seed), greedy(tokens)
        if self.prefill is None:
            return EngineRequest(
                engine_request_id=name, rank=rank, token_ids=token_ids, sampling=sampling
            )
        first = await self.prefill.caller.run(
            EngineRequest(
                engine_request_id=name,
                rank=rank % self.prefill.ranks,
                token_ids=token_ids,
                sampling=greedy(tokens + 1),
                hold=True,
            )
        )
        held = first[-1].held
        assert held is not None
        return going_on(name, rank, Case(name, token_ids, greedy(tokens + 1)), first, held)

    async def run(self, rank: int, tokens: int) -> None:
        """Generate so many tokens on one rank."""
        await self.caller.run(await self.request(rank, tokens))

    async def first_token_s(self, request: EngineRequest, limit_s: float) -> float | None:
        """Seconds from submission to the first output; None if there is none within the limit."""
        began_s = time.monotonic()
        await self.caller.start(request)
        while time.monotonic() < began_s + limit_s:
            if request.engine_request_id in self.caller.seen:
                return time.monotonic() - began_s
            await asyncio.sleep(0.001)
        return None

    async def call_all(self, method: str, *args: object) -> list[Any]:
        """Call all ranks' engine cores at once."""
        calls = [self.engine._call(rank, method, *args) for rank in range(self.ranks)]  # noqa: SLF001  # operators do so
        return list(await asyncio.gather(*calls))

    async def asleep(self) -> None:
        """Return once every rank sleeps."""
        async with asyncio.timeout(5):
            while not self.coordinator.is_asleep:  # noqa: ASYNC110  # nothing says so
                await asyncio.sleep(0.005)

    async def steps(self) -> list[int]:
        """Steps that each rank has executed."""
        return [sum(c.steps_by_kind.values()) for c in await self.engine.counters()]

    async def close(self) -> None:
        await self.engine.close()
        await self.caller.ended()


@dataclass
class Clock:
    """When a coordinator first heard of work, and when its first start left."""

    heard_s: float = math.inf
    started_s: float = math.inf

    @property
    def edge_s(self) -> float:
        """How long the first word of work waited for its broadcast."""
        return self.started_s - self.heard_s


@contextlib.contextmanager
def clocked(coordinator: Coordinator) -> Iterator[Clock]:
    """Note both by the coordinator's own clock, from inside it. The group sleeps at the start."""
    clock, machine, start = Clock(), coordinator.machine, coordinator._start  # noqa: SLF001  # looks on

    def heard(name: str) -> Callable[..., Any]:
        take = getattr(machine, name)

        def taken(*args: Any) -> Any:
            if name != "on_report" or args[0].stepping:
                clock.heard_s = min(clock.heard_s, time.monotonic())
            return take(*args)

        return taken

    def started(effect: StartWave) -> None:
        clock.started_s = min(clock.started_s, time.monotonic())
        start(effect)

    names = ("on_first_request", "on_start_wave", "on_report")
    for name in names:
        setattr(machine, name, heard(name))
    coordinator._start = started  # type: ignore[method-assign,assignment]  # noqa: SLF001  # likewise
    try:
        yield clock
    finally:
        del coordinator._start  # noqa: SLF001  # likewise
        for name in names:
            delattr(machine, name)


async def start(
    model: Path, out: Path, role: Role, prefill: Group | None = None, **changes: Any
) -> Group:
    """Start a group with experts apart."""
    port = next(PORTS)
    fields: dict[str, Any] = {"ranks": 2, "expert_parallel": True, "lease_ttl_s": 60} | changes
    asked = settings(role, model, out, port, group_id=f"g{port}", **fields)
    return Group(Caller(await start_group(asked)), prefill)


@contextlib.asynccontextmanager
async def running(
    model: Path, out: Path, role: Role, prefill: Group | None = None, **changes: Any
) -> AsyncIterator[Group]:
    """A group for the length of a block."""
    group = await start(model, out, role, prefill, **changes)
    try:
        yield group
    finally:
        await group.close()


@contextlib.contextmanager
def faults(names: str) -> Iterator[None]:
    """Faults of the groups that are started inside."""
    os.environ[FAULTS] = names
    try:
        yield
    finally:
        del os.environ[FAULTS]
