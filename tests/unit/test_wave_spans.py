"""Segments of waves as spans, and the links between them and requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from splitwave.core.wave_segment import LINKS_MAX, Link, SegmentEnd, SegmentKey, WaveSegment
from splitwave.runtime.tracing import OFF, Origin, Tracing, span_context, traced
from splitwave.runtime.tracing_check import faults
from splitwave.runtime.tracing_files import SpanRecord
from splitwave.runtime.tracing_queue import SpanPass
from splitwave.runtime.wave_spans import SETTLE_S, WAVE_SEGMENT, WaveSpans
from tests.unit.traced import Kept

LINK = Link("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
LATE = Link("0af7651916cd43dd8448eb211c80319d", "b7ad6b7169203332")
SEGMENT = WaveSegment(
    epoch=9, wave=4, segment=1, why="first_request", end=SegmentEnd.PAUSE, began_s=1.0,
    ended_s=1.5, wake_s={0: 0.0, 1: 0.02}, steps_by_kind={"full": 16, "eager": 4},
    steps_by_size={64: 10, 8: 6, 16: 0}, dummy_steps=5,
    votes=2, tokens=30, padded_tokens=42, links=(LINK,), links_dropped=3,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    group_id: str = "g"
    epoch: int = 9


@dataclass
class Waves:
    """An engine whose segments are at hand, and whose requests were in those of `keys`."""

    ended: list[WaveSegment] = field(default_factory=list)
    keys: tuple[SegmentKey, ...] = ()

    def wave_segments(self) -> list[WaveSegment]:
        taken, self.ended = self.ended, []
        return taken

    def note_work(self, request: Link, since_s: float, until_s: float) -> Sequence[SegmentKey]:
        return self.keys


def rarely(kept: Kept) -> Tracing:
    """Traces none of the requests that begin here."""
    return traced(Origin(service="decode", ratio=0.0), SpanPass(kept))


def named(traceparent: str) -> tuple[str, str]:
    found = span_context(traceparent)
    assert found is not None
    return f"{found.trace_id:032x}", f"{found.span_id:016x}"


def ids(span: SpanRecord) -> tuple[str, str]:
    return span.trace_id, span.span_id


def test_a_segment_is_a_trace_of_its_own_that_links_to_its_requests() -> None:
    kept = Kept()
    WaveSpans(kept.traces().decode, Group(), Waves([SEGMENT])).close()

    (span,) = kept.spans()
    assert (span.name, span.parent_id) == (WAVE_SEGMENT, "")
    assert span.links == (LINK.span_id,)
    said = {name.removeprefix("splitwave.wave."): x for name, x in span.attributes.items()}
    assert (said["steps"], said["dummy_share"], said["skew_tokens"]) == (20, 0.25, 12)
    assert (said["steps.full"], said["wake_ms.1"]) == (16, 20.0)
    assert {name: n for name, n in said.items() if name.startswith("steps_of_size.")} == {
        "steps_of_size.8": 6,
        "steps_of_size.64": 10,
    }, "of sizes that ran"
    assert faults([span]) == []


def test_a_request_names_its_segments_before_they_are_spans() -> None:
    kept = Kept()
    second = replace(SEGMENT, segment=2, links=(LATE,))
    waves = Waves(keys=(SEGMENT.key, second.key))
    spans = WaveSpans(kept.traces().decode, Group(), waves)

    links = spans.worked(LINK.traceparent, 1.2, 1.4)
    waves.ended = [SEGMENT, second]
    spans.close()

    assert [named(link) for link in links] == [ids(span) for span in kept.spans()]


def test_two_processes_give_their_segments_different_ids() -> None:
    made = [
        WaveSpans(rarely(Kept()), Group(), Waves(keys=(SEGMENT.key,))).worked(
            LINK.traceparent, 1.0, 1.0
        )
        for _ in range(2)
    ]

    assert made[0] != made[1]


def test_a_segment_that_a_request_links_to_is_kept_whatever_the_ratio() -> None:
    kept = Kept()
    lonely = replace(SEGMENT, wave=5, links=())
    WaveSpans(rarely(kept), Group(), Waves([SEGMENT, lonely])).close()

    assert [span.attributes["splitwave.wave"] for span in kept.spans()] == [4]


def test_a_request_that_is_not_sampled_links_to_nothing() -> None:
    waves = Waves(keys=(SEGMENT.key,))
    spans = WaveSpans(Kept().traces().decode, Group(), waves)

    assert spans.worked(LINK.traceparent[:-2] + "00", 1.0, 1.0) == ()
    assert spans.worked("", 1.0, 1.0) == ()


def test_a_request_whose_last_word_comes_after_its_segment_s_end_is_linked() -> None:
    kept = Kept()
    waves = Waves([replace(SEGMENT, links=())], (SEGMENT.key,))
    spans = WaveSpans(rarely(kept), Group(), waves)

    spans.sweep(SEGMENT.ended_s + 0.9 * SETTLE_S)
    assert list(kept.spans()) == []
    for _ in range(2):  # Twice is once.
        (link,) = spans.worked(LATE.traceparent, 1.2, 1.4)
    spans.sweep(SEGMENT.ended_s + SETTLE_S)

    (span,) = kept.spans()
    assert (span.links, ids(span)) == ((LATE.span_id,), named(link))


def test_a_full_segment_counts_those_that_come_late() -> None:
    kept = Kept()
    many = tuple(replace(LINK, span_id=f"{i:016x}") for i in range(1, LINKS_MAX + 1))
    waves = Waves([replace(SEGMENT, links=many)], (SEGMENT.key,))
    spans = WaveSpans(kept.traces().decode, Group(), waves)

    spans.worked(LATE.traceparent, 1.2, 1.4)
    spans.close()

    (span,) = kept.spans()
    assert len(span.links) == LINKS_MAX
    assert span.attributes["splitwave.wave.links_dropped"] == 4


def test_nothing_is_made_where_no_trace_is_kept() -> None:
    spans = WaveSpans(OFF, Group(), Waves([SEGMENT], (SEGMENT.key,)))

    assert spans.worked(LINK.traceparent, 1.0, 1.0) == ()
    spans.close()
