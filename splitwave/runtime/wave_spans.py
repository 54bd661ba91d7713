"""Segments of a group's waves as spans, each a trace of its own; they and requests link both ways.

A request ends while its last segment goes on, so a segment's ids are made from its name: whoever
links to it knows them before there is a span.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final, Protocol

from opentelemetry.context import Context

from splitwave.core.wave_segment import LINKS_MAX, Link, SegmentKey, WaveSegment
from splitwave.runtime.tracing import Attributes, Past, Tracing, Value

WAVE_SEGMENT: Final = "splitwave.wave.segment"
LINKS_DROPPED: Final = "splitwave.wave.links_dropped"
"""Requests of a segment beyond those that it links to."""
SETTLE_S = 1.0
"""How long a segment that has ended waits for requests that were in it: their last outputs come
on another way than the ranks' reports, and a fence may be out."""


class Group(Protocol):
    """What is told of the group."""

    @property
    def group_id(self) -> str:
        """Its name."""

    @property
    def epoch(self) -> int:
        """Which start of it."""


class Waves(Protocol):
    """Where segments come from: an engine (`splitwave.engine.port`)."""

    def wave_segments(self) -> list[WaveSegment]:
        """Segments that have ended since the last call."""

    def note_work(self, request: Link, since_s: float, until_s: float) -> Sequence[SegmentKey]:
        """A traced request was worked on meanwhile; returns its first and last segment."""


class WaveSpans:
    """The segments of one group, from their end to their span."""

    def __init__(
        self, traces: Tracing, group: Group, waves: Waves, *, salt: bytes | None = None
    ) -> None:
        """`salt`: tells this process's segments from those of any other; random if not given."""
        self._traces = traces
        self._group = group
        self._waves = waves
        self._salt = os.urandom(16) if salt is None else salt
        self._ended: dict[SegmentKey, WaveSegment] = {}

    def worked(self, traceparent: str, since_s: float, until_s: float) -> tuple[str, ...]:
        """A request was worked on meanwhile; `traceparent` names its span.

        The segments of its first and last step link to that. Returns their traceparents: none if
        the request is not traced.
        """
        link = Link.sampled(traceparent)
        if link is None or not self._traces.enabled:
            return ()
        keys = self._waves.note_work(link, since_s, until_s)
        self._take()
        for key in keys:
            ended = self._ended.get(key)
            if ended is not None and link not in ended.links:
                self._ended[key] = _with(ended, link)
        return tuple(self._traceparent(key) for key in keys)

    def _traceparent(self, key: SegmentKey) -> str:
        """What names a segment's span, whether or not it is made yet."""
        name = f"{self._group.group_id} {self._group.epoch} {key.wave} {key.segment}"
        ids = blake2b(name.encode(), digest_size=24, key=self._salt).hexdigest()
        return f"00-{ids[:32]}-{ids[32:]}-01"

    def sweep(self, now_s: float) -> None:
        """Make spans of the segments that ended a while ago."""
        self._take()
        for segment in list(self._ended.values()):
            if now_s - segment.ended_s >= SETTLE_S:
                self._record(segment)

    def close(self) -> None:
        """Make spans of all that have ended, the group's last included."""
        self._take()
        for segment in list(self._ended.values()):
            self._record(segment)

    def _take(self) -> None:
        taken = self._waves.wave_segments()
        if self._traces.enabled:
            self._ended |= {segment.key: segment for segment in taken}

    def _record(self, segment: WaveSegment) -> None:
        del self._ended[segment.key]
        past = Past(
            name=WAVE_SEGMENT,
            began_s=segment.began_s,
            ended_s=segment.ended_s,
            attributes=attributes_of(self._group, segment),
            links=[link.traceparent for link in segment.links],
            own=self._traceparent(segment.key) if segment.links else "",
        )
        self._traces.record(past, Context())


def _with(segment: WaveSegment, link: Link) -> WaveSegment:
    if len(segment.links) < LINKS_MAX:
        return replace(segment, links=(*segment.links, link))
    return replace(segment, links_dropped=segment.links_dropped + 1)


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
        LINKS_DROPPED: segment.links_dropped,
    }
    said |= {f"splitwave.wave.steps.{kind}": n for kind, n in segment.steps_by_kind.items()}
    said |= {f"splitwave.wave.steps_of_size.{rows}": n for rows, n in _run(segment.steps_by_size)}
    return said | {f"splitwave.wave.wake_ms.{r}": s * 1e3 for r, s in segment.wake_s.items()}


def _run(steps_by_size: Mapping[int, int]) -> list[tuple[int, int]]:
    """The sizes that ran, in order: a rank tells of all that ever did."""
    return sorted((rows, count) for rows, count in steps_by_size.items() if count)
