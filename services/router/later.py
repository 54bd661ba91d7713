"""One call that is due after a while."""

import asyncio
from collections.abc import Callable


class Later:
    """Calls once, some time after it was first asked to; then it can be asked again."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def within(self, delay_s: float) -> None:
        """Call after `delay_s`, unless a call is due already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._run)

    def cancel(self) -> None:
        """Call no more, unless it is asked again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        self._call()
