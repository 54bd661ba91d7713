"""Seconds <-> google.protobuf.Duration."""

import math

from google.protobuf.duration_pb2 import Duration


def duration_to_proto(seconds: float) -> Duration:
    """Seconds, to the nanosecond. They must be finite."""
    assert math.isfinite(seconds)
    whole = math.floor(seconds)
    if whole < 0:
        duration = Duration()
        duration.FromNanoseconds(whole * 1_000_000_000 + round((seconds - whole) * 1e9))
        return duration
    nanos = round((seconds - whole) * 1e9)
    if nanos == 1_000_000_000:
        whole, nanos = whole + 1, 0
    return Duration(seconds=whole, nanos=nanos)


def duration_from_proto(duration: Duration) -> float:
    """Seconds; an absent duration is 0.0."""
    return (duration.seconds * 1_000_000_000 + duration.nanos) / 1e9
