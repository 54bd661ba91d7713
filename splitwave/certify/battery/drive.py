"""Drives one started group through the engine port, as a worker does, and keeps what it says."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitwave.certify.battery.cases import Generated
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.engine.port import (
    EngineDied,
    EngineRequest,
    GroupDescription,
    RankCounters,
    RequestOutput,
)
from splitwave.engine.vllm.adapter import VllmEngine
from splitwave.engine.vllm.probe.client import Probe

ANSWER_TIMEOUT_S = 180.0


@dataclass(slots=True)
class Flight:
    """One request that was submitted, and what has come of it."""

    outputs: list[RequestOutput] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        """All that it was given so far."""
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def failure(self) -> str | None:
        """Why it failed, if it did."""
        last = self.outputs[-1] if self.outputs else None
        return last.failure.value if last is not None and last.failure is not None else None

    def generated(self) -> Generated:
        """Tokens and log probabilities."""
        rows = [row for output in self.outputs for row in output.logprobs or ()]
        return Generated(
            tuple(self.token_ids),
            tuple({row.token_id: row.logprob, **dict(row.top)} for row in rows),
        )


class Group:
    """One group of engines and its requests, by id."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.probe = Probe(engine)
        self.flights: dict[str, Flight] = {}
        self.pulls_ended: set[str] = set()
        self._seen: dict[int, int] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def description(self) -> GroupDescription:
        """What was started."""
        return self.engine.description

    async def _read(self) -> None:
        async for steps in self.engine.steps():
            for step in steps:
                self.pulls_ended.update(step.pulls_ended)
                for output in step.outputs:
                    self._take(output)

    def _take(self, output: RequestOutput) -> None:
        flight = self.flights[output.engine_request_id]
        flight.outputs.append(output)
        if output.token_ids:
            flight.began.set()
        if output.finish is not None or output.failure is not None:
            flight.began.set()
            flight.ended.set()

    async def start(self, *requests: EngineRequest) -> list[Flight]:
        """Submit requests together."""
        for request in requests:
            assert request.engine_request_id not in self.flights
            self.flights[request.engine_request_id] = Flight()
        await self.engine.submit(requests)
        return [self.flights[request.engine_request_id] for request in requests]

    async def until(self, event: asyncio.Event, name: str) -> None:
        """Wait for an event of a request's flight; CheckBroken if the group dies or falls silent.

        A long output takes as long as it takes, as long as it grows.
        """
        flight = self.flights.get(name)
        waiting = asyncio.create_task(event.wait())
        try:
            while not waiting.done():
                outputs = len(flight.outputs) if flight else 0
                await asyncio.wait(
                    {waiting, self._reading},
                    timeout=ANSWER_TIMEOUT_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if waiting.done():
                    return
                if self._reading.done():
                    raise CheckBroken(f"{name}: {self.last_words()}")
                if flight is None or len(flight.outputs) == outputs:
                    raise CheckBroken(f"{name}: nothing for {ANSWER_TIMEOUT_S:g} s")
        finally:
            waiting.cancel()

    def last_words(self) -> str:
        """Why the group ended."""
        error = self._reading.exception() if self._reading.done() else None
        if isinstance(error, EngineDied):
            return f"{error}\n{error.log_tail}"
        return f"{self.description.group_id} has ended ({error})"

    async def run(self, request: EngineRequest) -> Flight:
        """Submit one request and return once it has ended."""
        flight = (await self.start(request))[0]
        await self.until(flight.ended, request.engine_request_id)
        return flight

    async def abort(self, names: Sequence[str]) -> None:
        """Stop requests."""
        await self.engine.abort(names)

    async def counters(self) -> Sequence[RankCounters]:
        """Counts of every rank."""
        return await self.engine.counters()

    async def steps_run(self) -> int:
        """Steps of all ranks together, dummy ones included."""
        return sum(sum(rank.steps_by_kind.values()) for rank in await self.counters())

    async def kinds(self) -> dict[str, int]:
        """Executed steps by kind, all ranks together."""
        found: dict[str, int] = {}
        for rank in await self.counters():
            for kind, count in rank.steps_by_kind.items():
                found[kind] = found.get(kind, 0) + count
        return found

    async def last_step(self, rank: int) -> int:
        """Number of a rank's latest step in the probe's log, which begins with the first call."""
        log = await self.probe.steps(rank, self._seen.get(rank, 0))
        if log:
            self._seen[rank] = log[-1].number - 1
        return log[-1].number if log else 0

    async def holds_nothing(self) -> bool:
        """True if no rank uses a block or holds a lease."""
        counts = await self.counters()
        return all(rank.blocks_used == 0 and rank.leases_live == 0 for rank in counts)

    def forget(self) -> None:
        """Drop what requests said; none may be running."""
        self.flights.clear()
        self.pulls_ended.clear()

    async def close(self) -> None:
        """Stop the group."""
        await self.engine.close()
        await asyncio.wait({self._reading}, timeout=10)
        if self._reading.done() and not self._reading.cancelled():
            self._reading.exception()
