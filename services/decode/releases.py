"""Handoffs that will not be pulled: each is released, with a few tries, off everyone's path."""

import asyncio
import logging

from services.decode.peers import Peers, failure_of_a_call
from splitwave.core.handoff import Handoff
from splitwave.runtime.tracing import trace_id_of

log = logging.getLogger(__name__)

TRIES_MAX = 3
RETRY_S = 0.2


class Releases:
    """Releases under way. What they cannot reach, the lease's end frees."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = 0

    @property
    def pending(self) -> int:
        """Releases under way."""
        return len(self._tasks)

    def start(self, handoff: Handoff, traceparent: str = "") -> None:
        """Release a handoff of which nothing is being read."""
        task = asyncio.create_task(self._release(handoff, traceparent), name="decode: release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, timeout_s: float) -> None:
        """Wait for those under way, and give up what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()

    async def _release(self, handoff: Handoff, traceparent: str) -> None:
        for attempt in range(1, TRIES_MAX + 1):
            try:
                await self._peers.release(handoff, traceparent)
                return
            except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001  # try again
                error = failure_of_a_call(failure)
                if attempt == TRIES_MAX:
                    self.failed += 1
                    extra = {
                        "handoff_id": handoff.handoff_id,
                        "trace_id": trace_id_of(traceparent),
                    }
                    log.warning("release failed, left to its lease: %r", error, extra=extra)
                    return
            await asyncio.sleep(RETRY_S * attempt)
