"""Seconds <-> google.protobuf.Duration."""

import math

from google.protobuf.duration_pb2 import Duration


def duration_to_proto(seconds: float) -> Duration:
    """Seconds, to the nanosecond. They must be finite."""
    assert math.isfinite(seconds)
    whole = math.floor(seconds)
    duration = Duration()
    duration.FromNanoseconds(whole * 1_000_000_000 + round((seconds - whole) * 1e9))
    return duration


def duration_from_proto(duration: Duration) -> float:
    """Seconds; an absent duration is 0.0."""
    return duration.ToNanoseconds() / 1e9
