"""The closed set of failures a caller can act on."""

import enum


class Reason(enum.StrEnum):
    """Why a request failed. Mirrors splitwave.v1alpha1.ErrorReason, name for name."""

    INVALID_REQUEST = enum.auto()
    UNSUPPORTED_FEATURE = enum.auto()
    MODEL_NOT_FOUND = enum.auto()
    DEADLINE_REQUIRED = enum.auto()
    OVERLOADED = enum.auto()
    KV_CAPACITY_EXHAUSTED = enum.auto()
    GRANT_UNKNOWN = enum.auto()
    POOL_UNAVAILABLE = enum.auto()
    WORKER_DRAINING = enum.auto()
    WORKER_LOST = enum.auto()
    EPOCH_MISMATCH = enum.auto()
    HANDOFF_EXPIRED = enum.auto()
    HANDOFF_FAILED = enum.auto()
    KV_LAYOUT_MISMATCH = enum.auto()
    PREEMPTED = enum.auto()
    DEADLINE_EXCEEDED = enum.auto()
    STALLED = enum.auto()
    CANCELLED = enum.auto()
    REQUEST_QUARANTINED = enum.auto()
    RESUME_BUDGET_EXHAUSTED = enum.auto()
    INTERNAL = enum.auto()
    OUTSIDE_ENVELOPE = enum.auto()
    GROUP_DECERTIFIED = enum.auto()

    @property
    def worker_elsewhere(self) -> bool:
        """True if the same call may succeed on another worker now."""
        return self in _WORKER_ELSEWHERE

    @property
    def resumable(self) -> bool:
        """True if a new attempt from prompt + emitted tokens may succeed."""
        return self in _RESUMABLE


_WORKER_ELSEWHERE = frozenset(
    {
        Reason.OVERLOADED,
        Reason.KV_CAPACITY_EXHAUSTED,
        Reason.GRANT_UNKNOWN,
        Reason.WORKER_DRAINING,
        Reason.WORKER_LOST,
        Reason.EPOCH_MISMATCH,
        Reason.GROUP_DECERTIFIED,
    }
)

_RESUMABLE = _WORKER_ELSEWHERE | {
    Reason.HANDOFF_EXPIRED,
    Reason.HANDOFF_FAILED,
    Reason.KV_LAYOUT_MISMATCH,
    Reason.PREEMPTED,
}


class ServingError(Exception):
    """A failure with a reason that survives the trip over the wire.

    `message` never holds prompt or completion text; `retry_after_s` is set only
    where waiting helps.
    """

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float | None = None):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"ServingError({self.reason.name}, {self.message!r})"
