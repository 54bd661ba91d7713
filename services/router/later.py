"""One call that is due after a while."""

import asyncio
from collections.abc import Callable


class Later:
    """Calls once, at the soonest time that it was asked for; then it can be asked again."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def within(self, delay_s: float) -> None:
        """Call after `delay_s`, unless a call is due by then already."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._run)

    def cancel(self) -> None:
        """Call no more, unless it is asked again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        self._call()
