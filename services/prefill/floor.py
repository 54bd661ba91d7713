"""What all calls of one prefill worker share: queues, running calls and leases. No await in here.

The worker's lease of a handoff ends `lease_margin_s` before the engine's: it starts from the
engine's own stamp (`Held.expires_at_s`, on this host's monotonic clock, which is also `clock`).
So a lease that is live in this table is live in the engine, and a confirmation from this table
proves that nothing that decode has read was reused.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from opentelemetry.context import Context

from services.prefill.answer import result_of
from services.prefill.config import PrefillConfig
from services.prefill.engine_loop import EngineLoop
from services.prefill.queue import Queued, RankQueues
from services.prefill.spans import PrefillSpans
from splitwave.core.errors import Reason, ServingError
from splitwave.core.handoff import Handoff, Lease, LeaseEnd, LeaseTable, ReleaseOutcome
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.engine.port import EngineRequest, GroupDescription, Held, RequestOutput
from splitwave.runtime.metrics import Histogram
from splitwave.runtime.tracing import OFF
from splitwave.runtime.tracing_names import CLOSED
from splitwave.runtime.worker import default_worker_id

Clock = Callable[[], float]


@dataclass(slots=True)
class Call:
    """One handoff, from its prefill to the end of its lease."""

    call: PrefillCall
    request: EngineRequest
    queued: Queued
    result: "asyncio.Future[PrefillResult]"
    waiters: int = 0
    """Callers that wait for the result: one, or more if it was repeated."""
    answered: bool = False
    """True once a caller has the result, and with it the handoff."""
    held_s: float | None = None
    """When its lease began."""
    blocks: int = 0
    """KV blocks under that lease."""
    span: Context | None = None
    """The span of the call, for that of the lease; None if it is not traced."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a handoff says of the worker that answers for it."""

    worker_id: str
    address: str
    """host:port of its PrefillService."""
    connector: str


class Floor:
    """The shared state of one worker.

    Invariants, asserted by `check`:
      F1  a call is in exactly one of running and held
      F2  held calls are the live leases
      and those of the queues and of the lease table
    """

    def __init__(
        self,
        group: GroupDescription,
        loop: EngineLoop,
        config: PrefillConfig,
        clock: Clock,
    ) -> None:
        self.group = group
        self.now_s = clock
        self.identity = Identity(
            config.worker_id or default_worker_id("prefill"), "", config.engine
        )
        self.draining = False
        self.on_hold = False
        """True while no prompts are taken because the group's standing is in doubt."""
        self.leases = LeaseTable(
            ranks=group.ranks,
            blocks_per_rank=group.blocks_per_rank,
            memory_s=max(group.lease_ttl_s, config.sweep_s),
        )
        self.queues = RankQueues(
            ranks=group.ranks,
            batch_max_tokens=group.batch_max_tokens,
            batches=config.queue_batches,
        )
        self.failures: dict[Reason, int] = {}
        self.answered = 0
        self.queue_s = Histogram()
        self.compute_s = Histogram()
        self.spans = PrefillSpans(OFF, "", group)
        """Set by the worker, if it traces."""
        self._loop = loop
        self._margin_s = config.lease_margin_s
        self._running: dict[str, Call] = {}
        self._held: dict[str, Call] = {}
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def closed(self) -> bool:
        """True while no prompts are taken."""
        return self.draining or self.on_hold

    @property
    def outstanding(self) -> int:
        """Calls that run and leases that live."""
        return len(self._running) + len(self._held)

    async def drained(self) -> None:
        """Return once nothing is outstanding."""
        await self._idle.wait()

    def find(self, handoff_id: str) -> Call | None:
        """The live call of that id. Raises ServingError if it has ended already."""
        call = self._running.get(handoff_id) or self._held.get(handoff_id)
        if call is not None:
            return call
        end = self.leases.ended(handoff_id)
        if end is LeaseEnd.RELEASED:
            raise ServingError(Reason.CANCELLED, f"handoff {handoff_id} was released by its owner")
        if end is not None:
            message = f"handoff_id: {handoff_id} is {end}; choose a new one for each attempt"
            raise ServingError(Reason.INVALID_REQUEST, message)
        return None

    def begin(self, call: PrefillCall, request: EngineRequest) -> Call:
        """Queue a call at a rank and send it to the engine. Raises ServingError if refused."""
        self._check_open()
        now_s, tokens = self.now_s(), len(call.token_ids)
        queued = self.queues.add(call.handoff_id, tokens, now_s)
        if queued is None:
            raise ServingError(
                Reason.OVERLOADED,
                f"every rank has {min(self.queues.tokens)} or more prompt tokens queued",
                retry_after_s=self.queues.retry_after_s(tokens),
            )
        engine_id = f"{call.handoff_id}#{next(self._numbers)}"  # Never used twice in an epoch.
        request = replace(request, engine_request_id=engine_id, rank=queued.rank)
        future: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        running = self._running[call.handoff_id] = Call(call, request, queued, future)
        self._idle.clear()
        self._loop.submit(request, lambda output: self._completed(running, output))
        return running

    def _check_open(self) -> None:
        if self._loop.died is not None:
            raise ServingError(Reason.WORKER_LOST, f"the engine group is gone: {self._loop.died}")
        if self.closed:
            raise ServingError(Reason.WORKER_DRAINING, "this worker takes no new prompts")

    def abandon(self, call: Call) -> None:
        """Nobody has the result and nobody waits for it: free whatever it has."""
        handoff_id = call.call.handoff_id
        if self._running.get(handoff_id) is call:
            self._stop(call, Reason.CANCELLED)
        elif self._held.get(handoff_id) is call:
            self.release(handoff_id)

    def release(self, handoff_id: str, traceparent: str = "") -> bool:
        """End a handoff that nobody will pull, known or not. False if it had ended before."""
        outcome = self.leases.release(handoff_id, self.now_s())
        if outcome is ReleaseOutcome.ENDED_NOW:
            self._let_go(handoff_id, traceparent)
        running = self._running.get(handoff_id)
        if running is not None:
            self._stop(running, Reason.CANCELLED)
            _fail(running, ServingError(Reason.CANCELLED, "the handoff was released by its owner"))
        return outcome is not ReleaseOutcome.ENDED_BEFORE

    def confirm(self, handoff_id: str, epoch: int, traceparent: str = "") -> float:
        """Answer the fence: seconds that the lease had left, which ends as pulled."""
        if epoch != self.group.epoch:
            raise ServingError(
                Reason.EPOCH_MISMATCH,
                f"epoch {epoch} is over, this is {self.group.epoch}; prefill again",
            )
        left_s = self.leases.confirm(handoff_id, self.now_s())
        if handoff_id in self._held:
            # Pulled or found expired just now. Engines whose pull cannot end the lease need it.
            self._let_go(handoff_id, traceparent)
        if left_s is None:
            raise ServingError(
                Reason.HANDOFF_EXPIRED,
                f"the lease of {handoff_id} had ended before it was confirmed; prefill again",
            )
        return left_s

    def sweep(self) -> None:
        """End the leases whose time is up. An AssertionError is a bug that ends the worker."""
        for lease in self.leases.sweep(self.now_s()):
            self._let_go(lease.handoff_id)
        self.check()

    def fail_all(self, error: ServingError) -> None:
        """End every call that runs."""
        for call in list(self._running.values()):
            self._stop(call, error.reason)
            _fail(call, error)

    def close(self) -> None:
        """Tell of the leases that the worker's own end cuts short."""
        for call in self._held.values():
            self.spans.lease_ended(call, self.now_s(), CLOSED, "")

    def as_of_now(self, result: PrefillResult) -> PrefillResult:
        """A result with the lease time that is left at this moment."""
        if result.handoff is None:
            return result
        lease = self.leases.get(result.handoff.handoff_id)
        left_s = 0.0 if lease is None else max(0.0, lease.expires_at_s - self.now_s())
        return replace(result, handoff=replace(result.handoff, lease_remaining_s=left_s))

    def _completed(self, running: Call, output: RequestOutput) -> None:
        """The engine has answered: hold the lease at once, whoever is still there to hear of it."""
        now_s, queued = self.now_s(), running.queued
        del self._running[running.call.handoff_id]
        self.queues.remove(running.call.handoff_id, queued.rank, now_s, computed=True)
        try:
            result = result_of(running.call, output, hold=running.request.hold)
            if result.finish_reason is None:
                assert output.held is not None
                result = replace(result, handoff=self._hold(running, output.held))
        except ServingError as error:
            self.failures[error.reason] = self.failures.get(error.reason, 0) + 1
            self.spans.served(running, now_s, error.reason.value)
            _fail(running, error)
        else:
            self.answered += 1
            started_s = queued.started_s or queued.arrived_s
            queued_s, computed_s = started_s - queued.arrived_s, now_s - started_s
            self.queue_s.observe(queued_s)
            self.compute_s.observe(computed_s)
            result = replace(
                result,
                queued_s=queued_s,
                computed_s=computed_s,
                waves=self.spans.waves_of(running, now_s),
            )
            self.spans.served(running, now_s, None, result)
            running.result.set_result(result)
        if output.held is not None and running.call.handoff_id not in self._held:
            self._loop.free(running.request.engine_request_id)
        self._note_idle()

    def _hold(self, running: Call, held: Held) -> Handoff:
        handoff_id, rank = running.call.handoff_id, running.queued.rank
        expires_at_s = held.expires_at_s - self._margin_s
        if not self.leases.hold(Lease(handoff_id, rank, held.block_count, expires_at_s)):
            raise ServingError(Reason.CANCELLED, f"handoff {handoff_id} had ended meanwhile")
        self._held[handoff_id] = running
        running.held_s, running.blocks = self.now_s(), held.block_count
        return Handoff(
            handoff_id=handoff_id,
            prefill_worker_id=self.identity.worker_id,
            prefill_address=self.identity.address,
            group_id=self.group.group_id,
            epoch=self.group.epoch,
            rank=rank,
            prompt_tokens=held.remote_tokens,
            block_count=held.block_count,
            kv_layout=self.group.kv_layout,
            lease_remaining_s=max(0.0, expires_at_s - self.now_s()),
            connector=self.identity.connector,
            connector_params=held.connector_params,
        )

    def _stop(self, running: Call, why: Reason) -> None:
        now_s, handoff_id = self.now_s(), running.call.handoff_id
        del self._running[handoff_id]
        self.queues.remove(handoff_id, running.queued.rank, now_s, computed=False)
        self.spans.served(running, now_s, why.value)
        self._loop.free(running.request.engine_request_id)
        self._note_idle()

    def _let_go(self, handoff_id: str, traceparent: str = "") -> None:
        """A lease has ended: free its blocks in the engine."""
        call, end = self._held.pop(handoff_id), self.leases.ended(handoff_id)
        assert end is not None
        self.spans.lease_ended(call, self.now_s(), end.value, traceparent)
        self._loop.free(call.request.engine_request_id)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.outstanding:
            self._idle.set()

    def check(self) -> None:
        """Assert the invariants."""
        self.leases.check()
        self.queues.check()
        assert not self._running.keys() & self._held.keys(), "F1"
        assert len(self._held) == self.leases.live, "F2"
        assert all(self.leases.get(x) is not None for x in self._held), "F2"


def _fail(call: Call, error: ServingError) -> None:
    call.result.set_exception(error)
    call.result.exception()  # Seen: the last waiter may have left in this very turn.
