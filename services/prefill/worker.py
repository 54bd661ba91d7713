"""One prefill worker without its network: what the servicer adapts and simulations call."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from prometheus_client import Metric

from services.prefill.config import PrefillConfig
from services.prefill.engine_loop import EngineLoop
from services.prefill.floor import Floor, Identity
from services.prefill.metrics import families
from services.prefill.prefill import prefill
from services.prefill.spans import PrefillSpans
from services.worker.description import describe_group
from services.worker.group_guard import GroupGuard
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.handoff import LeaseEnd
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import LeaseCounts, WorkerDescription, WorkerLoad
from splitwave.engine.port import Engine, EngineDied
from splitwave.runtime.config import BadSetting
from splitwave.runtime.engine_metrics import EngineCounters, engine_families
from splitwave.runtime.metrics import process_families
from splitwave.runtime.tracing import OFF, Tracing
from splitwave.runtime.wave_metrics import wave_families
from splitwave.runtime.wave_spans import WaveSpans

log = logging.getLogger(__name__)


class PrefillWorker:
    """An engine group, its queues and its leases. `run` must be running while it is used.

    `clock` must be the clock of the engine's stamps: monotonic, of this host.
    """

    def __init__(
        self,
        engine: Engine,
        config: PrefillConfig,
        clock: Callable[[], float] = time.monotonic,
        traces: Tracing = OFF,
    ) -> None:
        group = engine.description
        if config.lease_margin_s >= group.lease_ttl_s:
            fix = f"set it below the engine's lease of {group.lease_ttl_s:g} s"
            raise BadSetting("lease_margin_s", f"is {config.lease_margin_s}; {fix}")
        self._engine = engine
        self._config = config
        self.group = group
        self.loop = EngineLoop(engine, clock)
        self.floor = Floor(group, self.loop, config, clock)
        self._waves = WaveSpans(traces, group, engine)
        worker_id = self.floor.identity.worker_id
        self.floor.spans = PrefillSpans(traces, worker_id, group, self._waves)
        self._traces = traces
        patience_s = config.decertified_patience_s
        self.guard = GroupGuard(self, group, clock, patience_s, traces)
        self.loop.on_violations = self.guard.on_step
        self.floor.spans.standing = lambda: self.guard.standing.value
        self.counters = EngineCounters(engine.counters, self._describe(), clock)

    def now_s(self) -> float:
        """The worker's clock, which deadlines are on."""
        return self.floor.now_s()

    def listen_at(self, address: str) -> None:
        """Say where decode workers confirm and release handoffs."""
        identity = self.floor.identity
        self.floor.identity = Identity(identity.worker_id, address, identity.connector)

    async def prefill(self, call: PrefillCall, deadline: Deadline) -> PrefillResult:
        """See `services.prefill.prefill`. Raises ServingError."""
        return await prefill(call, deadline, self.floor)

    def release(self, handoff_id: str, traceparent: str = "") -> bool:
        """End a handoff that nobody will pull. Idempotent; False if it had ended before.

        `traceparent` is that of the caller's span, to which the lease's will link.
        """
        return self.floor.release(handoff_id, traceparent)

    def confirm(self, handoff_id: str, epoch: int, traceparent: str = "") -> float:
        """Answer the fence with the seconds that were left, or raise HANDOFF_EXPIRED."""
        return self.floor.confirm(handoff_id, epoch, traceparent)

    def refuse(self) -> None:
        """Take no new prompts. Handoffs can still be pulled, confirmed and released."""
        self.floor.draining = True

    def hold(self) -> None:
        """Take no new prompts until `serve_on`."""
        self.floor.on_hold = True

    def serve_on(self) -> None:
        """Take new prompts again, unless it drains."""
        self.floor.on_hold = False

    def outstanding(self) -> int:
        """Calls that run and leases that live."""
        return self.floor.outstanding

    async def drained(self) -> None:
        """Return once nothing is outstanding.

        Cancelled when the grace is over: then the calls that run end, and are told so.
        """
        try:
            await self.floor.drained()
        finally:
            self.floor.fail_all(self._why_ended())

    def healthy(self) -> bool:
        """True while it can take prompts."""
        stalled = self.loop.stalled(self._config.health_stall_s)
        return self.loop.died is None and not self.floor.closed and not stalled

    def load(self) -> WorkerLoad:
        """The present state. Raises WORKER_LOST if the group has died."""
        self._check_alive()
        return WorkerLoad(
            draining=self.floor.closed,
            standing=self.guard.standing,
            queued_tokens=tuple(self.floor.queues.tokens),
            blocks_used=tuple(self.floor.leases.blocks_held),
            ready=True,  # The engine was handed over with every rank warm.
        )

    def lease_counts(self) -> LeaseCounts:
        """How the leases have ended."""
        leases = self.floor.leases
        return LeaseCounts(
            started=leases.started,
            pulled=leases.ends[LeaseEnd.PULLED],
            released=leases.ends[LeaseEnd.RELEASED],
            expired=leases.ends[LeaseEnd.EXPIRED],
            live=leases.live,
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
        worker_id = self.floor.identity.worker_id
        described = describe_group(
            worker_id, self.group, self.load(), self.guard.certification, self._engine.waves()
        )
        lease_ttl_s = self.group.lease_ttl_s - self._config.lease_margin_s
        return replace(described, lease_ttl_s=lease_ttl_s, leases=self.lease_counts())

    async def run(self) -> None:
        """Drive the engine and end leases, for ever.

        Raises EngineDied when the group ends, Decertified when it has to.
        """
        sweeping = asyncio.create_task(self._sweep(), name="prefill: lease sweep")
        driving = asyncio.create_task(self.loop.run(), name="prefill: engine loop")
        guarding = asyncio.create_task(
            self.guard.run(self._config.drain_grace_s), name="prefill: mode guard"
        )
        tasks = (driving, sweeping, guarding)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            died = self.loop.died
            self.floor.fail_all(self._why_ended() if died is None else _lost(died))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _why_ended(self) -> ServingError:
        if not self.guard.takes_work:
            return self.guard.why()
        draining = self.floor.draining
        why = Reason.WORKER_DRAINING if draining else Reason.WORKER_LOST
        return ServingError(why, "this worker stops" if draining else "the worker has ended")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_s)
            self.floor.sweep()
            self.counters.renew()
            self.guard.look(self._engine.waves(), self.counters.last)
            self._waves.sweep(self.now_s())

    async def close(self) -> None:
        """Stop the engines."""
        self.floor.close()
        await self.counters.close()
        await self._engine.close()
        self._waves.close()

    async def collect(self) -> Iterable[Metric]:
        """Metrics, made now."""
        await self.counters.refresh()
        return (
            *process_families("prefill", ready=self.healthy()),
            *families(self.floor),
            *engine_families(self.counters),
            *wave_families(self._engine.waves()),
            *self.guard.families(),
            *self._traces.families(),
        )

    def _check_alive(self) -> None:
        if self.loop.died is not None:
            raise _lost(self.loop.died)


def _lost(died: EngineDied) -> ServingError:
    return ServingError(Reason.WORKER_LOST, f"the engine group is gone: {died}")
