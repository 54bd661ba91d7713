"""Grants that a worker pushed unasked, until a request spends them or their time is up."""

from splitwave.core.session import Granted

TTL_MARGIN = 0.25
"""Share of a grant's time to live that is left for the take to reach the worker."""


class GrantFloat:
    """Unspent grants of one session that were pushed unasked.

    Invariant: none is handed out after its time, less the margin.
    """

    def __init__(self) -> None:
        self._grants: dict[str, tuple[Granted, float]] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def add(self, granted: Granted, now_s: float) -> None:
        """A grant came; its time to live counts from now."""
        self._sweep(now_s)  # They come for ever, also while no request takes any.
        expires_at_s = now_s + granted.ttl_s * (1.0 - TTL_MARGIN)
        self._grants[granted.grant_id] = (granted, expires_at_s)

    def take(self, blocks: int, now_s: float) -> Granted | None:
        """The smallest live grant of at least `blocks`, which leaves the float."""
        self._sweep(now_s)
        fit = (granted for granted, _ in self._grants.values() if granted.blocks >= blocks)
        best = min(fit, key=lambda granted: granted.blocks, default=None)
        if best is not None:
            del self._grants[best.grant_id]
        return best

    def clear(self) -> None:
        """The session is over."""
        self._grants.clear()

    def _sweep(self, now_s: float) -> None:
        for grant_id in [x for x, (_, at_s) in self._grants.items() if at_s <= now_s]:
            del self._grants[grant_id]  # The worker takes it back by itself.
