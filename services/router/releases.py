"""Releases of handoffs: started at once, finished in the background, waited for at shutdown."""

import asyncio
import logging
from collections.abc import Callable

from services.router.backoff import Backoff
from services.router.held import Held
from services.router.prefill_client import PrefillPeer
from splitwave.core.errors import ServingError

RELEASE_TIMEOUT_S = 1.0
RELEASE_TRIES_MAX = 3

_log = logging.getLogger(__name__)


class Releases:
    """Releases that are under way. A request that is cancelled does not cancel its release."""

    def __init__(self, worker: Callable[[str], PrefillPeer | None]) -> None:
        """`worker` finds a prefill worker by its id."""
        self._worker = worker
        self._running: set[asyncio.Task[None]] = set()
        self.left_to_expiry = 0
        """Handoffs that could not be released; their leases end by time."""

    def start(self, held: Held) -> None:
        """Begin to release; returns at once."""
        task = asyncio.get_running_loop().create_task(self._release(held))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drained(self) -> None:
        """Wait until none is under way. Bounded by the tries and timeouts of a release."""
        while self._running:
            await asyncio.wait(self._running)

    async def _release(self, held: Held) -> None:
        backoff = Backoff()
        for _ in range(RELEASE_TRIES_MAX):
            peer = self._worker(held.worker_id)
            if peer is None:
                break
            try:
                await peer.transport.release(held.handoff_id, RELEASE_TIMEOUT_S)
            except ServingError:
                await backoff.wait()
            else:
                return
        self.left_to_expiry += 1
        _log.warning("handoff %s is left to the end of its lease", held.handoff_id)
