"""How long to wait before the next try to reach a worker."""

import asyncio

FIRST_S = 0.05
FACTOR = 2.0
LAST_S = 2.0
DISTRUST_S = 10.0
"""How long nothing that a worker says counts as a success after it has broken the contract."""


class Backoff:
    """Doubles from one failure to the next, up to a limit; a success starts it afresh."""

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._distrusted_until_s = 0.0

    def reset(self) -> None:
        """It worked, as far as can be seen: that does not clear a worker that is distrusted."""
        if not self.distrusted:
            self._next_s = FIRST_S

    @property
    def distrusted(self) -> bool:
        """True while the worker's last offence is recent."""
        return asyncio.get_running_loop().time() < self._distrusted_until_s

    def distrust(self) -> None:
        """The worker broke the contract: that it answers the next call proves nothing."""
        self._distrusted_until_s = asyncio.get_running_loop().time() + DISTRUST_S

    async def wait(self, at_most_s: float = LAST_S) -> None:
        """Wait, longer each time, but at most `at_most_s`."""
        wait_s, self._next_s = self._next_s, min(LAST_S, self._next_s * FACTOR)
        await asyncio.sleep(min(wait_s, at_most_s))
