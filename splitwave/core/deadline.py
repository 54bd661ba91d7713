"""One absolute deadline per request, spent hop by hop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the caller's monotonic clock, seconds."""

    at_s: float

    def remaining_s(self, now_s: float) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - now_s)

    def passed(self, now_s: float) -> bool:
        """True once no time is left."""
        return now_s >= self.at_s

    def share_s(self, now_s: float, fraction: float) -> float:
        """Budget for one hop, leaving time to fail over or clean up after it."""
        assert 0.0 < fraction <= 1.0
        return self.remaining_s(now_s) * fraction
