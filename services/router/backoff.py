"""How long to wait before the next try to reach a worker."""

import asyncio

FIRST_S = 0.05
FACTOR = 2.0
LAST_S = 2.0


class Backoff:
    """Doubles from one failure to the next, up to a limit; a success starts it afresh."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        """It worked."""
        self._next_s = FIRST_S

    async def wait(self, at_most_s: float = LAST_S) -> None:
        """Wait, longer each time, but at most `at_most_s`."""
        wait_s, self._next_s = self._next_s, min(LAST_S, self._next_s * FACTOR)
        await asyncio.sleep(min(wait_s, at_most_s))
