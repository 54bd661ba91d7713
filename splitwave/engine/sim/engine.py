"""The shell around simulated ranks: the step loop and the port's calls."""

import asyncio
import os
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from splitwave.core.grant_reports import RankLoad
from splitwave.core.handoff import LeaseEnd
from splitwave.core.strict_json import Scalar
from splitwave.core.wave_record import WaveStatus
from splitwave.core.wave_segment import Link, SegmentKey, WaveSegment
from splitwave.engine.port import (
    EngineDied,
    EngineRequest,
    GroupDescription,
    RankCounters,
    Role,
    StepOutputs,
)
from splitwave.engine.sim.fabric import Offer, SimFabric, read_alone
from splitwave.engine.sim.facts import fingerprint_facts
from splitwave.engine.sim.faults import dies, slowed_step_s
from splitwave.engine.sim.rank import SimRank
from splitwave.engine.sim.sequence import Step
from splitwave.engine.sim.settings import SimSettings
from splitwave.engine.sim.waves import SimWaves


class SimEngine:
    """A simulated group behind the Engine port, for the loop that it was made on.

    `start_sim_group` makes one that runs.
    """

    def __init__(self, settings: SimSettings, fabric: SimFabric | None = None) -> None:
        self.settings = settings
        self._description = settings.description()
        self._fabric = fabric
        read = fabric.read if fabric is not None else read_alone
        self._ranks = [SimRank(settings, rank, read) for rank in range(settings.ranks)]
        self._ready: list[StepOutputs] = []
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._wakes: list[asyncio.Event] = []
        self._death: tuple[str, int | None, str] | None = None
        self._closed = False
        self._waves = SimWaves(settings.epoch) if settings.lockstep else None

    def start(self) -> None:
        """Begin to step. Call once."""
        assert not self._tasks
        if self._fabric is not None:
            self._fabric.register(self.settings.engine_id, self)
        groups = [self._ranks] if self.settings.lockstep else [[rank] for rank in self._ranks]
        for index, group in enumerate(groups):
            wake = asyncio.Event()
            name = f"{self.settings.engine_id} steps {index}"
            self._wakes.append(wake)
            task = asyncio.create_task(self._step_on(group, wake), name=name)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    @property
    def description(self) -> GroupDescription:
        """What was started."""
        return self._description

    @property
    def lease_ends(self) -> Counter[LeaseEnd]:
        """Prefill: leases of all ranks that have ended, by how they ended."""
        ends: Counter[LeaseEnd] = Counter()
        for rank in self._ranks:
            rank.sweep(self._now_s())
            ends.update(rank.lease_ends)
        return ends

    @property
    def late_pulls(self) -> int:
        """Prefill: pulls that came when their lease was over."""
        return sum(rank.late_pulls for rank in self._ranks)

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests; a refusal is ready in `steps` when this returns."""
        self._raise_if_over()
        now_s = self._now_s()
        for request in requests:
            assert 0 <= request.rank < self.settings.ranks, f"no rank {request.rank}"
            refusal = self._ranks[request.rank].submit(request, now_s)
            if refusal is not None:
                self._publish([refusal])
            elif self._waves is not None and request.trace_headers:
                link = Link.sampled(request.trace_headers.get("traceparent", ""))
                if link is not None:
                    self._waves.segments.note_request(link)
        for wake in self._wakes:
            wake.set()

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        """Stop requests; each keeps its blocks to the end of the step or transfer it is in."""
        for request_id in engine_request_ids:
            for rank in self._ranks:
                rank.abort(request_id)
        now_s = self._now_s()
        batches = [rank.idle_batch(now_s) for rank in self._ranks]
        self._publish([batch for batch in batches if batch is not None])

    async def release(self, engine_request_ids: Sequence[str]) -> None:
        """Free what these requests hold, now; remember the ids that no rank knows yet."""
        if self.settings.faults.release_ignored or self.settings.role is Role.DECODE:
            return
        now_s = self._now_s()
        for request_id in engine_request_ids:
            if not any(rank.release(request_id, now_s) for rank in self._ranks):
                for rank in self._ranks:
                    rank.bury(request_id, now_s)

    async def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        """Batches as they come. Ends after `close`; raises EngineDied if a rank has died."""
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
                continue
            if self._closed:
                return
            self._raise_if_over()
            self._arrived.clear()
            await self._arrived.wait()

    def loads(self) -> Sequence[RankLoad]:
        """What each rank holds now."""
        now_s = self._now_s()
        return [
            RankLoad(
                rank=rank.rank,
                requests=len(rank.requests),
                blocks=rank.counters().blocks_used,
                said_s=now_s,
            )
            for rank in self._ranks
        ]

    def waves(self) -> WaveStatus | None:
        """Its waves, though nobody has to coordinate them; None if each rank steps by itself."""
        if self._waves is None:
            return None
        return self._waves.status(
            [(x.counters(), len(x.requests), x.waiting_count) for x in self._ranks]
        )

    def wave_segments(self) -> list[WaveSegment]:
        """Segments of its waves that have ended since the last call."""
        if self._waves is None:
            return []
        ended, self._waves.ended = self._waves.ended, []
        return ended

    def note_work(self, request: Link, since_s: float, until_s: float) -> Sequence[SegmentKey]:
        """A traced request was worked on meanwhile; returns its first and last segment."""
        if self._waves is None:
            return ()
        return self._waves.segments.note_work(request, since_s, until_s)

    async def counters(self) -> Sequence[RankCounters]:
        """Counts of every rank. Raises EngineDied if the group is over."""
        self._raise_if_over()
        now_s = self._now_s()
        for rank in self._ranks:
            rank.sweep(now_s)
        return [rank.counters() for rank in self._ranks]

    async def fingerprint_facts(self) -> Sequence[Mapping[str, Scalar]]:
        """The settings and the environment, the same for every rank."""
        self._raise_if_over()
        return [fingerprint_facts(self.settings, os.environ) for _ in self._ranks]

    async def close(self) -> None:
        """Stop stepping. Idempotent."""
        self._closed = True
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Assert every invariant of every rank: for tests, it walks all blocks and leases."""
        for rank in self._ranks:
            rank.check_each()

    def pulled(self, offer: Offer, now_s: float) -> bool:
        """End a lease of this group as pulled; False if its blocks had been reused."""
        return self._ranks[offer.rank].pulled(offer, now_s)

    async def _step_on(self, ranks: Sequence[SimRank], wake: asyncio.Event) -> None:
        """Step these ranks together while one has work; sleep while none has."""
        waves = self._waves
        while True:
            if any(rank.has_work for rank in ranks):
                await self._step(ranks)
                if waves is not None and waves.is_due(self._now_s()):
                    waves.cut([rank.counters() for rank in ranks], self._now_s())
                continue
            counters = [rank.counters() for rank in ranks]
            if waves is not None and waves.segments.current is not None:
                waves.end(counters, self._now_s())
            wake.clear()
            await wake.wait()
            if waves is not None and any(rank.has_work for rank in ranks):
                waves.begin(counters, self._now_s())

    async def _step(self, ranks: Sequence[SimRank]) -> None:
        now_s = self._now_s()
        steps = [rank.begin(now_s) for rank in ranks]
        slowest_s = max(map(self._step_s, ranks, steps))
        await asyncio.sleep(slowest_s * self.settings.time_scale)
        for rank in ranks:
            if dies(self.settings.faults, rank.rank, rank.steps + 1):
                raise _RankDied(rank.rank, rank.steps + 1)
        now_s = self._now_s()
        batches = [rank.finish(step, now_s) for rank, step in zip(ranks, steps, strict=True)]
        self._publish([batch for batch in batches if batch is not None])

    def _step_s(self, rank: SimRank, step: Step) -> float:
        settings = self.settings
        step_s = (
            settings.step_fixed_s
            + settings.step_per_token_s * step.tokens
            + settings.step_per_prefill_token_s * (step.prompt_tokens - len(step.chunks))
        )
        return slowed_step_s(settings.faults, rank.rank, rank.steps + 1, step_s)

    def _now_s(self) -> float:
        return self._loop.time()

    def _publish(self, batches: list[StepOutputs]) -> None:
        if batches:
            self._ready += batches
            self._arrived.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Note why a step loop ended; it ends by itself only when something is wrong."""
        error = None if task.cancelled() else task.exception()
        if error is None or self._death is not None:
            return
        rank = error.rank if isinstance(error, _RankDied) else None
        log_tail = "".join(traceback.format_exception(error))
        self._death = (f"{self.settings.engine_id} died: {error!r}", rank, log_tail)
        self._stop()
        self._arrived.set()

    def _stop(self) -> None:
        if self._fabric is not None:
            self._fabric.unregister(self.settings.engine_id)
        for task in self._tasks:
            task.cancel()
        if self._waves is not None:
            self._waves.close(self._now_s())
        self._arrived.set()

    def _raise_if_over(self) -> None:
        if self._death is not None:
            message, rank, log_tail = self._death
            raise EngineDied(message, rank=rank, log_tail=log_tail)
        if self._closed:
            raise EngineDied(f"{self.settings.engine_id} is closed")


class _RankDied(Exception):
    """The scripted death of a rank."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(f"rank {rank} ended in its step {step}, as its faults say")
        self.rank = rank


async def start_sim_group(settings: SimSettings, fabric: SimFabric | None = None) -> SimEngine:
    """Start a group on the running loop. Groups that share `fabric` see each other's blocks."""
    engine = SimEngine(settings, fabric)
    engine.start()
    return engine
