"""Calls to an engine, in order, by one task: whoever puts never waits and cannot be half-done."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Outbox:
    """Items for calls that take many at once; neighbours for the same call go out together.

    So all that came in one turn of the loop is one call, and a release never
    overtakes the submission that it is about.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[Sequence[object]], Awaitable[None]], list[object]]] = []
        self._filled = asyncio.Event()

    def put(self, call: Callable[[Sequence[T]], Awaitable[None]], item: T) -> None:
        """Have `call` called with this item, after all that was put before."""
        if self._calls and self._calls[-1][0] == call:
            self._calls[-1][1].append(item)
        else:
            # A list of T goes back to the call it came with, and to no other.
            self._calls.append((call, [item]))  # type: ignore[arg-type]  # the type of T is forgotten here
        self._filled.set()

    async def run(self) -> None:
        """Make the calls, for ever. What a call raises ends it."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            calls, self._calls = self._calls, []
            for call, items in calls:
                await call(items)
