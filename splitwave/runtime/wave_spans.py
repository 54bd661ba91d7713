"""Segments of a group's waves as spans, each a trace of its own with links to requests in it."""

from collections.abc import Iterable
from typing import Final, Protocol

from opentelemetry.context import Context

from splitwave.core.wave_segment import WaveSegment
from splitwave.runtime.tracing import Attributes, Past, Tracing, Value

WAVE_SEGMENT: Final = "splitwave.wave.segment"


class Group(Protocol):
    """What is told of the group."""

    @property
    def group_id(self) -> str:
        """Its name."""


def record_segments(traces: Tracing, group: Group, segments: Iterable[WaveSegment]) -> None:
    """Make a span of each segment, if traces are kept."""
    if not traces.enabled:
        return
    for segment in segments:
        past = Past(
            name=WAVE_SEGMENT,
            began_s=segment.began_s,
            ended_s=segment.ended_s,
            attributes=attributes_of(group, segment),
            links=[f"00-{link.trace_id}-{link.span_id}-01" for link in segment.links],
        )
        traces.record(past, Context())


def attributes_of(group: Group, segment: WaveSegment) -> Attributes:
    """What a segment's span says."""
    said: dict[str, Value] = {
        "splitwave.group": group.group_id,
        "splitwave.epoch": segment.epoch,
        "splitwave.wave": segment.wave,
        "splitwave.wave.segment_number": segment.segment,
        "splitwave.wave.why": segment.why,
        "splitwave.wave.end": segment.end.value,
        "splitwave.wave.steps": segment.steps,
        "splitwave.wave.dummy_steps": segment.dummy_steps,
        "splitwave.wave.dummy_share": segment.dummy_share,
        "splitwave.wave.votes": segment.votes,
        "splitwave.wave.tokens": segment.tokens,
        "splitwave.wave.skew_tokens": segment.skew_tokens,
        "splitwave.wave.links_dropped": segment.links_dropped,
    }
    said |= {f"splitwave.wave.steps.{kind}": n for kind, n in segment.steps_by_kind.items()}
    return said | {f"splitwave.wave.wake_ms.{r}": s * 1e3 for r, s in segment.wake_s.items()}
