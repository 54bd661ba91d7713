"""How long messages take in a simulated network, and which are lost."""

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from splitwave.core.errors import Reason, ServingError

T = TypeVar("T")


def now_s() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def lost(message: str) -> ServingError:
    """What a peer that went away looks like."""
    return ServingError(Reason.WORKER_LOST, message)


@dataclass(slots=True)
class Weather:
    """How the network behaves. Rates are shares of calls, 0 to 1."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    delay_max_s: float = 0.002
    call_lost_rate: float = 0.0
    """Prefill calls that fail before or after the worker has served them."""
    release_lost_rate: float = 0.0
    confirm_lost_rate: float = 0.0

    def delay_s(self) -> float:
        """One way of one message."""
        return self.rng.uniform(0.0, self.delay_max_s)

    async def carry(self, lost_rate: float = 0.0) -> None:
        """Take a message one way, or lose it with its connection."""
        await asyncio.sleep(self.delay_s())
        if lost_rate and self.rng.random() < lost_rate:
            raise lost("connection reset")


class Pipe(Generic[T]):
    """One direction of a connection: delayed, in order, until it breaks."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self._ready: deque[T] = deque()
        self._changed = asyncio.Event()
        self._last_at_s = 0.0
        self._broken = False
        self.hole = False
        """True: whatever is sent vanishes, and neither end is told."""

    def put(self, item: T) -> None:
        """Send; what is on its way when the pipe breaks is lost."""
        self._last_at_s = max(self._last_at_s + 1e-9, now_s() + self._weather.delay_s())
        asyncio.get_running_loop().call_at(self._last_at_s, self._arrive, item)

    def _arrive(self, item: T) -> None:
        if not self._broken and not self.hole:
            self._ready.append(item)
            self._changed.set()

    def end(self, *, lose: bool = True) -> None:
        """Nothing more arrives."""
        self._broken = True
        if lose:
            self._ready.clear()
        self._changed.set()

    async def get(self) -> T | None:
        """The next item, or None once there will be none."""
        while not self._ready:
            if self._broken:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._ready.popleft()
