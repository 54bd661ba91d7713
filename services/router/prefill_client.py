"""The prefill workers of one router: what their queues hold, where a prompt goes, and the call."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from services.router import tracing
from services.router.absence import absence
from services.router.attempts import NoAnswer, Unreached
from services.router.backoff import Backoff
from services.router.first_end import first_end
from services.router.grants import POOL_WAIT_LOST_S, POOL_WAIT_S
from services.router.held import Held
from services.router.line import Line
from services.router.standings import ANY, Stands
from splitwave.core.deadline import Deadline
from splitwave.core.demands import RequestShape
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import features
from splitwave.core.placement import PrefillQueue, place_prefill
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role, WorkerDescription, WorkerLoad

DESCRIBE_TIMEOUT_S = 2.0
QUEUE_SHARE = 0.5
"""Share of a prefill's time that it may wait for a place in a queue."""
LOOK_AGAIN_S = 0.5
"""How often a waiting prompt looks whether waiting still makes sense."""

_log = logging.getLogger(__name__)


class PrefillTransport(Protocol):
    """One prefill worker's services. Every method raises ServingError."""

    async def describe(self, timeout_s: float) -> WorkerDescription:
        """What the worker is."""

    def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
        """The group's epoch and its load, at once and then on change."""

    async def prefill(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        """Compute one prompt. Cancelling it cancels the call. Unreached: it was not sent."""

    async def release(self, handoff_id: str, timeout_s: float) -> None:
        """End a handoff that nobody will pull."""

    async def close(self) -> None:
        """Drop the connection."""


class PrefillPeer:
    """One prefill worker as this router sees it: `queue` is None while it is not there."""

    def __init__(self, address: str, transport: PrefillTransport) -> None:
        self.address = address
        self.transport = transport
        self.description: WorkerDescription | None = None
        self.queue: PrefillQueue | None = None
        self.leaving = False
        """True once the worker is no longer listed: nothing new goes there."""
        self.calls = 0
        """Prompts whose answers are awaited."""
        self._doubted = asyncio.Event()
        """Set from a call's loss until it is asked anew what it is."""

    @property
    def reachable(self) -> bool:
        """True if it can be talked to, whatever it says."""
        return self.queue is not None

    @property
    def draining(self) -> bool:
        """True if it says that it takes no new work: it drains, or is not ready."""
        return self.queue is not None and self.queue.draining

    @property
    def usable(self) -> bool:
        """True if new work may go there, its group's standing apart."""
        return self.reachable and not self.draining and not self.leaving

    @property
    def worker_id(self) -> str:
        """Its id; empty before it has described itself."""
        return "" if self.description is None else self.description.worker_id

    def pairs_with(self, kv_layout: str) -> bool:
        """True if a decode group of that layout can pull from here; empty: none follows."""
        assert self.description is not None
        return kv_layout in ("", self.description.kv_layout)

    async def watch(self, router_id: str, pool: "PrefillPool") -> None:
        """Follow the worker for ever, through its restarts."""
        backoff = Backoff()
        while True:
            self._doubted.clear()
            following = self._follow(router_id, pool, backoff)
            try:
                await first_end(following, self._until_doubted(), ended=lambda: False)
            except ServingError as error:
                _log.debug("%s: %r", self.address, error)
                if error.reason is Reason.INTERNAL:
                    backoff.distrust()
            except Exception as error:  # noqa: BLE001  # What one worker sends must not cost us it.
                again = backoff.distrusted  # With the same words, most likely.
                words = "%s: what it sent could not be taken: %r"
                _log.warning(words, self.address, error, exc_info=not again)
                backoff.distrust()
            self.queue = None
            await backoff.wait()

    def doubt(self, seen: PrefillQueue | None) -> None:
        """A call was lost: until it has answered anew, nobody goes where that one went.

        `seen`: the queue in which that call was placed; of a later life it says nothing.
        """
        if seen is not None and self.queue is seen:
            self.queue = None
            self._doubted.set()

    async def _until_doubted(self) -> None:
        await self._doubted.wait()

    async def _follow(self, router_id: str, pool: "PrefillPool", backoff: Backoff) -> None:
        description = await self.transport.describe(DESCRIBE_TIMEOUT_S)
        if description.role is not Role.PREFILL:
            raise ServingError(Reason.INTERNAL, f"{self.address} is no prefill worker")
        async for epoch, load in self.transport.watch(router_id):
            if epoch != description.epoch or self._doubted.is_set():
                return  # Another life of the group, or perhaps none: ask anew what it is.
            backoff.reset()
            self._observe(description, load)
            pool.changed()

    def _observe(self, description: WorkerDescription, load: WorkerLoad) -> None:
        if self.queue is None:
            self.description = description
            self.queue = PrefillQueue(description.worker_id, [], description.batch_max_tokens)
        self.queue.queued_by_rank = list(load.queued_tokens) or [0] * description.ranks
        self.queue.draining = load.draining or not load.ready


@dataclass(eq=False, slots=True)
class _Wish:
    """A prompt that wants a place."""

    call: PrefillCall
    avoid: Set[str]
    """Not these workers if there are others, full or not."""
    placed: "asyncio.Future[PrefillPeer]"
    passed: dict[str, ServingError] = field(default_factory=dict)
    """Not these workers: they refused it."""


class PrefillPool:
    """Places prompts, by priority, then as they came: where the fewest tokens are to wait for.

    In order among those that may go to the same workers: a long prompt must not starve behind
    short ones, and one whose workers are full must not hold up what others may take.
    """

    def __init__(
        self,
        peers: Callable[[], Iterable[PrefillPeer]],
        stands: Stands = ANY,
        pool_wait_s: float = POOL_WAIT_S,
    ) -> None:
        """`peers` lists all there are; they come and go."""
        self._peers = peers
        self._stands = stands
        self._pool_wait_s = pool_wait_s
        self._waiting: Line[_Wish] = Line()

    def by_worker(self, worker_id: str) -> PrefillPeer | None:
        """The worker of that id, if it is known."""
        for peer in self._peers():
            if peer.worker_id == worker_id:
                return peer
        return None

    @property
    def waiting(self) -> int:
        """Prompts that wait for a place in a queue."""
        return len(self._waiting)

    async def prefill(
        self, call: PrefillCall, held: Held, deadline: Deadline, avoid: set[str]
    ) -> PrefillResult:
        """Place and compute a prompt; see `generate.Fleet`."""
        passed: dict[str, ServingError] = {}
        while True:
            placed = asyncio.get_running_loop().create_future()
            peer = await self._place(_Wish(call, avoid, placed, passed), deadline)
            try:
                return await self._call(peer, call, held, deadline)
            except ServingError as error:
                if not _holds_nothing(error):
                    raise
                if isinstance(error, Unreached):
                    avoid.add(held.worker_id)
                tracing.event("refused", {"error.type": error.reason.value})
                passed[held.worker_id] = error

    def changed(self) -> None:
        """Queues changed: place who waits, in order."""
        unclaimed = self._usable() if self._waiting else []
        for wish in self._waiting:
            if not unclaimed:
                break
            if wish.placed.done():
                continue
            peer = self._reserve(wish, unclaimed)
            if peer is None:
                unclaimed = [x for x in unclaimed if not self._may_take(x, wish)]
            else:
                wish.placed.set_result(peer)

    async def _call(
        self, peer: PrefillPeer, call: PrefillCall, held: Held, deadline: Deadline
    ) -> PrefillResult:
        assert peer.description is not None
        held.asked(peer.description.worker_id, peer.description.epoch)
        tracing.event("asked", {"splitwave.prefill_worker": held.worker_id})
        timeout_s = deadline.remaining_s(_now_s())
        queue = peer.queue
        peer.calls += 1
        try:
            result = await peer.transport.prefill(call, timeout_s)
        except ServingError as error:
            if error.reason is Reason.WORKER_LOST:
                peer.doubt(queue)
            if _holds_nothing(error):
                held.nothing_held()
            if error.reason is Reason.DEADLINE_EXCEEDED:
                raise NoAnswer("prefill took longer than its share of the deadline") from error
            raise
        finally:
            peer.calls -= 1
            self._unreserve(peer, call)
        if result.handoff is None:
            held.nothing_held()
        return result

    async def _place(self, wish: _Wish, deadline: Deadline) -> PrefillPeer:
        self._waiting.join(wish, wish.call.priority)
        self.changed()
        try:
            peer = await self._wait(wish, deadline)
        except BaseException:
            self._waiting.leave(wish)
            if wish.placed.done():
                self._unreserve(wish.placed.result(), wish.call)
            self.changed()  # Who is behind it may have waited for no more than this.
            raise
        self._waiting.leave(wish)
        return peer

    async def _wait(self, wish: _Wish, deadline: Deadline) -> PrefillPeer:
        placed = wish.placed
        alone_since_s = now_s = _now_s()
        queue_until_s = now_s + deadline.share_s(now_s, QUEUE_SHARE)
        patience_s = min(self._pool_wait_s, POOL_WAIT_LOST_S if wish.avoid else math.inf)
        while not placed.done():
            self._refuse_hopeless(wish)
            now_s = _now_s()
            there = any(self._fits(peer, wish) for peer in self._usable())
            if there:
                alone_since_s = now_s
            until_s = min(queue_until_s, alone_since_s + patience_s)
            if now_s >= (queue_until_s if there else until_s):
                raise _no_room() if there else absence(Role.PREFILL, self._peers(), self._stands)
            await asyncio.wait((placed,), timeout=min(until_s - now_s, LOOK_AGAIN_S))
            if wish.avoid:
                self.changed()  # Whom it would rather avoid may be the last one left.
        return placed.result()

    def _refuse_hopeless(self, wish: _Wish) -> None:
        """Raise if waiting cannot help: each worker has refused it, cannot pair or must not.

        One that drains is no such hope, and no such obstacle: it may be followed by its like.
        """
        there = [peer for peer in self._admitted() if peer.reachable]
        shape = _shape(wish.call)
        outside = shape.outside_all(self._stands.envelope(peer.address) for peer in there)
        if outside is not None:
            raise ServingError(Reason.OUTSIDE_ENVELOPE, f"prefill: {outside}")
        fit = [peer for peer in there if self._fits(peer, wish)]
        if there and not fit:
            raise ServingError(
                Reason.KV_LAYOUT_MISMATCH,
                "no prefill worker that may take it has the KV layout of the decode group",
            )
        refused = [wish.passed.get(peer.worker_id) for peer in fit if peer.usable]
        errors = [error for error in refused if error is not None]
        if errors and len(errors) == len(refused):
            raise min(errors, key=lambda error: error.retry_after_s or float("inf"))

    def _admitted(self) -> list[PrefillPeer]:
        return [x for x in self._peers() if not x.leaving and self._stands.admits(x.address)]

    def _usable(self) -> list[PrefillPeer]:
        """Workers that new work may go to."""
        return [peer for peer in self._admitted() if peer.usable]

    def _fits(self, peer: PrefillPeer, wish: _Wish) -> bool:
        """True if the worker can pair and is certified for the prompt, however full it is."""
        outside = _shape(wish.call).outside(self._stands.envelope(peer.address))
        return peer.pairs_with(wish.call.kv_layout) and outside is None

    def _may_take(self, peer: PrefillPeer, wish: _Wish) -> bool:
        if peer.worker_id in wish.passed or not self._fits(peer, wish):
            return False
        return peer.worker_id not in wish.avoid or not self._others(wish)

    def _others(self, wish: _Wish) -> bool:
        """True if a worker that is not avoided could take it, now or once it is less full."""
        out = {*wish.avoid, *wish.passed}
        return any(x.worker_id not in out and self._fits(x, wish) for x in self._usable())

    def _reserve(self, wish: _Wish, among: Iterable[PrefillPeer]) -> PrefillPeer | None:
        """The worker to compute a prompt, with the prompt counted in its queue."""
        peers = {peer.worker_id: peer for peer in among if self._may_take(peer, wish)}
        queues = [peer.queue for peer in peers.values() if peer.queue is not None]
        tokens = len(wish.call.token_ids)
        chosen = place_prefill(queues, tokens)
        if chosen is None:
            return None
        chosen.placed[wish.call.handoff_id] = tokens
        return peers[chosen.worker_id]

    def _unreserve(self, peer: PrefillPeer, call: PrefillCall) -> None:
        if peer.queue is not None:
            peer.queue.placed.pop(call.handoff_id, None)
        self.changed()


def _holds_nothing(error: ServingError) -> bool:
    """True for the failures of a call of which its worker has kept nothing: the next may serve."""
    refused = error.reason in (Reason.OVERLOADED, Reason.WORKER_DRAINING)
    return refused or isinstance(error, Unreached)


def _shape(call: PrefillCall) -> RequestShape:
    sampling = features(call.sampling) if call.keep_first_token else ()
    return RequestShape(len(call.token_ids), 1, sampling)


def _no_room() -> ServingError:
    message = "the queues of all prefill workers that may take it are full"
    return ServingError(Reason.OVERLOADED, message, retry_after_s=1.0)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
