"""Segments of waves as spans."""

from dataclasses import dataclass

from splitwave.core.wave_segment import Link, SegmentEnd, WaveSegment
from splitwave.runtime.tracing import OFF
from splitwave.runtime.tracing_check import faults
from splitwave.runtime.wave_spans import WAVE_SEGMENT, record_segments
from tests.unit.traced import Kept

LINK = Link("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
SEGMENT = WaveSegment(
    epoch=9, wave=4, segment=1, why="first_request", end=SegmentEnd.PAUSE, began_s=1.0,
    ended_s=1.5, wake_s={0: 0.0, 1: 0.02}, steps_by_kind={"full": 16, "eager": 4}, dummy_steps=5,
    votes=2, tokens=30, padded_tokens=42, links=(LINK,), links_dropped=3,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    group_id: str = "g"


def test_a_segment_is_a_trace_of_its_own_that_links_to_its_requests() -> None:
    kept = Kept()
    record_segments(kept.traces().decode, Group(), [SEGMENT])

    (span,) = kept.spans()
    assert (span.name, span.parent_id) == (WAVE_SEGMENT, "")
    assert span.links == (LINK.span_id,)
    said = {name.removeprefix("splitwave.wave."): x for name, x in span.attributes.items()}
    assert (said["steps"], said["dummy_share"], said["skew_tokens"]) == (20, 0.25, 12)
    assert (said["steps.full"], said["wake_ms.1"]) == (16, 20.0)
    assert faults([span]) == []


def test_nothing_is_made_where_no_trace_is_kept() -> None:
    record_segments(OFF, Group(), [SEGMENT])
