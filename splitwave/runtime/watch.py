"""The pace of WorkerService.WatchWorker: at once, on change, and a sign of life."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

CHANGE_S: Final = 0.1
"""Shortest time between two observations."""
QUIET_S: Final = 2.0
"""Longest time between two observations."""


async def watch(observe: Callable[[], T], write: Callable[[T], Awaitable[None]]) -> None:
    """Write an observation at once, then whenever it has changed, for ever.

    What `observe` raises ends the watch.
    """
    loop = asyncio.get_running_loop()
    last = observe()
    await write(last)
    written_at_s = loop.time()
    while True:
        await asyncio.sleep(CHANGE_S)
        now = observe()
        if now != last or loop.time() - written_at_s >= QUIET_S:
            last = now
            written_at_s = loop.time()
            await write(now)
