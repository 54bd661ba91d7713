"""One decode worker without its network: what the servicer adapts and simulations call."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client import Metric

from services.decode.config import DecodeConfig
from services.decode.decode import Decoding
from services.decode.frames import Frames
from services.decode.holdings import Holdings
from services.decode.metrics import families
from services.decode.peers import Peers
from services.decode.room import Room
from services.decode.session import Incoming, Session, Write
from services.decode.sessions import Sessions
from services.decode.spans import DecodeSpans
from services.worker.description import describe_group
from services.worker.group_guard import GroupGuard
from splitwave.core.errors import Reason, ServingError
from splitwave.core.grant import GrantDesk, GrantTable
from splitwave.core.worker import WorkerDescription, WorkerLoad
from splitwave.engine.port import Engine, EngineDied
from splitwave.runtime.engine_metrics import EngineCounters, engine_families
from splitwave.runtime.metrics import process_families
from splitwave.runtime.tracing import OFF, Tracing
from splitwave.runtime.wave_metrics import wave_families
from splitwave.runtime.wave_spans import WaveSpans
from splitwave.runtime.worker import default_worker_id

log = logging.getLogger(__name__)

CHECK_S = 5.0
"""How often the invariants are asserted."""
CLOSE_S = 1.0
"""What fences and releases get when the worker closes."""


class DecodeWorker:
    """An engine group, its room, and the sessions that use it. `run` must be running meanwhile.

    `clock`: monotonic seconds, the engine's own clock in a simulation.
    """

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        config: DecodeConfig,
        clock: Callable[[], float] = time.monotonic,
        traces: Tracing = OFF,
    ) -> None:
        group = engine.description
        self.group = group
        self.worker_id = config.worker_id or default_worker_id("decode")
        self._engine = engine
        self._config = config
        self._now_s = clock
        table = GrantTable(
            ranks=group.ranks,
            seats_per_rank=group.seats_per_rank,
            blocks_per_rank=group.blocks_per_rank,
        )
        self.sessions = Sessions(group, self.worker_id, config, clock)
        self.room = Room(GrantDesk(table, config.desk()), self.sessions.by_id, clock)
        self.holdings = Holdings(engine, peers, self.room, config, clock)
        frames = Frames(config.frame_wait_s)
        self.decoding = Decoding(group, self.holdings, self.room, frames, clock)
        self._waves = WaveSpans(traces, group, engine)
        self.decoding.spans = DecodeSpans(traces, self.worker_id, group, self._waves)
        self.sessions.serve_with(self.room, self.decoding)
        self._traces = traces
        self.died: EngineDied | None = None
        patience_s = config.decertified_patience_s
        self.guard = GroupGuard(self, group, clock, patience_s, traces)
        self.decoding.spans.standing = lambda: self.guard.standing.value
        self._stepped: set[int] = set()
        self._progress_s = clock()
        self._check_due_s = 0.0
        self._idle = asyncio.Event()
        self.counters = EngineCounters(engine.counters, self._describe(), clock)

    async def session(self, incoming: Incoming, write: Write) -> None:
        """Serve one connection of a router's session.

        `incoming` brings messages with their numbers, `write` takes the worker's with theirs
        (0 for Welcome and Ack). Returns if the router closed; raises ServingError otherwise.
        """
        if self.died is not None:
            raise _over(self.died)
        await self.sessions.serve(incoming, write)

    def refuse(self) -> None:
        """Take no new work. What was accepted is finished."""
        self.decoding.draining = True
        self.sessions.drain()
        if not self.room.draining:
            self.room.drain()

    def hold(self) -> None:
        """Take no new work until `serve_on`. What was accepted goes on."""
        self.room.hold()

    def serve_on(self) -> None:
        """Take new work again, unless it drains."""
        self.room.go_on()

    def outstanding(self) -> int:
        """Attempts, and handoffs that are still being let go of."""
        return sum(len(s.attempts) for s in self._sessions()) + self.holdings.letting_go

    async def drained(self) -> None:
        """Return once nothing is outstanding and the sessions know it. Call `refuse` first.

        Cancelled when the grace is over: then what is left ends, and is told so.
        """
        try:
            await self._idle.wait()
        finally:
            self.sessions.end_all(self._why_ended())

    def healthy(self) -> bool:
        """True while it can take work."""
        idle = not self.holdings.engaged
        stalled = self._now_s() - self._progress_s > self._config.health_stall_s
        return self.died is None and not self.room.closed and (idle or not stalled)

    def load(self) -> WorkerLoad:
        """The present state. Raises WORKER_LOST if the group has died."""
        self._check_alive()
        return WorkerLoad(
            draining=self.room.closed,
            standing=self.guard.standing,
            seats_used=tuple(self.room.table.seats_used),
            seats_held=tuple(self.room.table.seats_held),
            blocks_used=tuple(self.room.table.blocks_used),
            asks_waiting=self.room.load().asks_waiting,
            ready=True,  # The engine was handed over with every rank warm.
        )

    async def describe(self, *, counters: bool) -> WorkerDescription:
        """What the worker is; `counters` asks the engines too. Raises WORKER_LOST."""
        description = self._describe()
        if not counters:
            return description
        try:
            return replace(description, rank_counters=tuple(await self._engine.counters()))
        except EngineDied as died:
            raise _lost(died) from died

    def _describe(self) -> WorkerDescription:
        return describe_group(
            self.worker_id, self.group, self.load(), self.guard.certification, self._engine.waves()
        )

    async def run(self) -> None:
        """Drive engine, timers and releases, for ever.

        Raises EngineDied when the group ends, Decertified when it has to.
        """
        tasks = [
            asyncio.create_task(self._read_engine(), name="decode: from the engine"),
            asyncio.create_task(self.holdings.outbox.run(), name="decode: to the engine"),
            asyncio.create_task(self._sweep(), name="decode: sweep"),
            asyncio.create_task(
                self.guard.run(self._config.drain_grace_s), name="decode: mode guard"
            ),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except EngineDied as died:
            self.died = died
            self.holdings.engine_is_gone()
            raise
        finally:
            # A stream that is merely cancelled would leave its router without a status.
            self.sessions.end_all(self._why_ended() if self.died is None else _over(self.died))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_engine(self) -> None:
        async for batch in self._engine.steps():
            self._progress_s = self._now_s()
            for step in batch:
                if step.violations:
                    self.guard.on_step(step)
                self.decoding.on_step(step)
                if step.rank not in self._stepped:
                    self._stepped.add(step.rank)
                    log.info("first tokens", extra={"rank": step.rank})
        raise EngineDied("the engine closed while the worker ran")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_s)
            if not self.holdings.engaged:
                self._progress_s = self._now_s()
            self.sweep()

    def sweep(self) -> None:
        """Do what time asks for. An AssertionError is a bug that ends the worker."""
        self.decoding.sweep(self._sessions())
        self.holdings.sweep()
        self.sessions.sweep()
        self.room.heard(self._engine.loads())
        self.room.settle()
        self.room.tell_load()
        self._check_now_and_then()
        self.counters.renew()
        self.guard.look(self._engine.waves(), self.counters.last)
        self._waves.sweep(self._now_s())
        if self.room.draining and not self.outstanding() and not self.sessions.by_id:
            self._idle.set()

    def _check_now_and_then(self) -> None:
        """Assert the invariants; it walks every attempt, so not with each sweep."""
        now_s = self._now_s()
        if now_s >= self._check_due_s:
            self._check_due_s = now_s + CHECK_S
            self.room.check()
            self.holdings.check()

    async def close(self) -> None:
        """End the sessions, stop the engines, and release what they will not read any more."""
        self.sessions.end_all(ServingError(Reason.WORKER_DRAINING, "this worker stops"))
        await self.counters.close()
        await self.decoding.close(CLOSE_S)
        await self._engine.close()
        self._waves.close()
        self.holdings.engine_is_gone()
        await self.holdings.releases.finish(CLOSE_S)

    async def collect(self) -> Iterable[Metric]:
        """Metrics, made now."""
        await self.counters.refresh()
        return (
            *process_families("decode", ready=self.healthy()),
            *families(self.room, self.sessions, self.decoding, self.holdings),
            *engine_families(self.counters),
            *wave_families(self._engine.waves()),
            *self.guard.families(),
            *self._traces.families(),
        )

    def _why_ended(self) -> ServingError:
        if not self.guard.takes_work:
            return self.guard.why()
        draining = self.room.draining
        why = Reason.WORKER_DRAINING if draining else Reason.WORKER_LOST
        return ServingError(why, "this worker stops" if draining else "the worker has ended")

    def _sessions(self) -> list[Session]:
        return list(self.sessions.by_id.values())

    def _check_alive(self) -> None:
        if self.died is not None:
            raise _lost(self.died)


def _over(died: EngineDied) -> ServingError:
    """What a session ends with: there is nothing to reattach to."""
    return ServingError(Reason.EPOCH_MISMATCH, f"the engine group is gone: {died}")


def _lost(died: EngineDied) -> ServingError:
    return ServingError(Reason.WORKER_LOST, f"the engine group is gone: {died}")
