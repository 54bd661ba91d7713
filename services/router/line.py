"""Who waits, in the order in which they are served."""

import asyncio
import itertools
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Line(Generic[T]):
    """An ordered set: smaller priorities first, and equal ones in the order of arrival.

    Nothing ages: while requests of a smaller priority keep coming, others wait until their patience
    ends, as in vLLM.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._keys: dict[T, tuple[int, int]] = {}
        self._order: list[tuple[tuple[int, int], T]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        return (waiter for _, waiter in self._order)

    def join(self, waiter: T, priority: int) -> None:
        """Wait behind all of the same priority."""
        assert waiter not in self._keys
        key = self._keys[waiter] = (priority, next(self._arrivals))
        insort(self._order, (key, waiter), key=lambda entry: entry[0])

    def leave(self, waiter: T) -> None:
        """Wait no more."""
        del self._order[bisect_left(self._order, self._keys.pop(waiter), key=lambda x: x[0])]


class Turn:
    """A lock that goes to the first in line."""

    def __init__(self) -> None:
        self._line: Line[asyncio.Future[None]] = Line()
        self._taken = False

    @asynccontextmanager
    async def mine(self, priority: int) -> AsyncIterator[None]:
        """Hold it until the block ends."""
        if self._taken:
            await self._come(priority)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _come(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.join(turn, priority)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # It came in the moment of the cancel.
                self._pass_on()
            raise
        finally:
            self._line.leave(turn)

    def _pass_on(self) -> None:
        following = next((turn for turn in self._line if not turn.done()), None)
        self._taken = following is not None
        if following is not None:
            following.set_result(None)
