"""The parts of one completion between the loop that makes them and the task that sends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any  # asyncio itself types what a coroutine yields so

from services.router.front_door import Ending
from services.router.sink import Part


class Parts:
    """Collects what is shown; whoever sends takes all that has come since.

    Bounded by the completion's length: a sender that waits for its client finds one
    larger message later, never a queue of small ones.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._changed = asyncio.Event()
        self._ended = False

    def show(self, part: Part) -> None:
        """Add a part."""
        self._parts.append(part)
        self._changed.set()

    async def came(self) -> bool:
        """Wait for parts; False once all were taken and no more will come."""
        while not self._parts and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._parts)

    def take(self) -> Sequence[Part]:
        """All that has come."""
        parts, self._parts = self._parts, []
        return parts

    @contextlib.asynccontextmanager
    async def filled_by(
        self, completion: Coroutine[Any, Any, Ending]
    ) -> AsyncIterator[asyncio.Task[Ending]]:
        """Run what shows its parts here; leaving the block cancels it and waits for its end."""
        task = asyncio.get_running_loop().create_task(completion)
        task.add_done_callback(self._end)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _end(self, _: asyncio.Task[Ending]) -> None:
        self._ended = True
        self._changed.set()
