"""How much a router takes on: requests at once, and attempts beyond the first."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from splitwave.core.errors import Reason, ServingError


class ResumeBudget:
    """Attempts beyond a request's first, as a bucket that fills with time.

    A pool that loses a group resumes its streams; one that loses groups again and
    again must not spend itself on prefilling the same prompts.

    Invariant: 0 <= left <= burst
    """

    def __init__(self, *, per_s: float, burst: int, now_s: float) -> None:
        assert per_s >= 0.0
        assert burst >= 0
        self._per_s, self._burst = per_s, burst
        self._left = float(burst)
        self._at_s = now_s

    def spend(self, now_s: float) -> None:
        """Take one attempt, or raise RESUME_BUDGET_EXHAUSTED."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            wait_s = (1.0 - self._left) / self._per_s if self._per_s else None
            raise ServingError(
                Reason.RESUME_BUDGET_EXHAUSTED,
                "too many requests had to be tried again lately",
                retry_after_s=wait_s,
            )
        self._left -= 1.0


class Admission:
    """Completions that the router serves at once.

    Invariant: 0 <= live <= live_max
    """

    def __init__(self, live_max: int) -> None:
        assert live_max > 0
        self.live_max = live_max
        self.live = 0
        self.refused: Counter[Reason] = Counter()
        """Calls that were not let in, by why."""
        self.closed = False
        """True once the router drains: what was admitted is finished, nothing is added."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()

    @contextmanager
    def admit(self, count: int = 1) -> Iterator[None]:
        """Count some until the block ends, all or none.

        Raises OVERLOADED or WORKER_DRAINING; INVALID_REQUEST for more than are ever served at once.
        """
        if count > self.live_max:
            raise ServingError(
                Reason.INVALID_REQUEST,
                f"n: {count} completions at once are more than the {self.live_max} that this"
                " router ever serves; ask for fewer",
            )
        error = self._why_not(count)
        if error is not None:
            self.refused[error.reason] += 1
            raise error
        self.live += count
        self.idle.clear()
        try:
            yield
        finally:
            self.live -= count
            if not self.live:
                self.idle.set()

    def _why_not(self, count: int) -> ServingError | None:
        if self.closed:
            return ServingError(
                Reason.WORKER_DRAINING, "this router is stopping; use another", retry_after_s=0.0
            )
        if self.live + count > self.live_max:
            return ServingError(
                Reason.OVERLOADED,
                f"the router serves {self.live} completions of {self.live_max} already",
                retry_after_s=1.0,
            )
        return None
