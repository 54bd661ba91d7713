"""Accounts of waves, in segments: under load a group never pauses, so a wave alone is no span.

A segment ends when its wave does, with the group's epoch, or after ten seconds, whichever is
first. It holds what the ranks did meanwhile, by their own counts.
"""

import enum
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splitwave.core.wave_message import GroupState, RankReport, RankWork, StartWave

LINKS_MAX = 32
SEGMENT_MAX_S = 10.0
LAST_WORDS_MAX_S = 0.25
"""How long an ended wave waits for the counts that its ranks send as they fall asleep."""
BEGINS_KEPT_MAX = 4096
"""Begins of segments that are remembered, for steps of a while ago."""


class SegmentEnd(enum.StrEnum):
    """Why a segment ended."""

    PAUSE = "pause"
    EPOCH = "epoch"
    LENGTH = "length"


class SegmentKey(NamedTuple):
    """Which segment of an epoch."""

    wave: int
    segment: int


@dataclass(frozen=True, slots=True)
class Link:
    """A request's span that exemplifies a segment."""

    trace_id: str
    span_id: str

    @classmethod
    def sampled(cls, traceparent: str) -> "Link | None":
        """The span that a W3C traceparent names; None unless it is sampled."""
        parts = traceparent.split("-")
        if parts[::3] != ["00", "01"] or [len(part) for part in parts[1:3]] != [32, 16]:
            return None
        return cls(parts[1], parts[2])

    @property
    def traceparent(self) -> str:
        """W3C traceparent that names it."""
        return f"00-{self.trace_id}-{self.span_id}-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveSegment:
    """What a group did in one stretch of one wave."""

    epoch: int
    wave: int
    segment: int
    """1, 2, 3, ... within the wave."""
    why: str
    """A `StartReason`, `resumed` if nothing was broadcast, or `continued` after another."""
    end: SegmentEnd
    began_s: float
    ended_s: float
    wake_s: Mapping[int, float]
    """By rank, from the segment's begin to the rank's word that it steps."""
    steps_by_kind: Mapping[str, int]
    steps_by_size: Mapping[int, int]
    """Steps of captured or warmed-up sizes by their rows."""
    dummy_steps: int
    votes: int
    tokens: int
    padded_tokens: int
    links: Sequence[Link]
    links_dropped: int
    """Requests beyond the `LINKS_MAX` that are kept."""

    @property
    def key(self) -> SegmentKey:
        """Names it within the epoch."""
        return SegmentKey(self.wave, self.segment)

    @property
    def steps(self) -> int:
        """Executed steps of all ranks, dummy ones included."""
        return sum(self.steps_by_kind.values())

    @property
    def dummy_share(self) -> float:
        """Dummy steps by all steps; 0.0 if there were none."""
        return self.dummy_steps / self.steps if self.steps else 0.0

    @property
    def skew_tokens(self) -> int:
        """Tokens that were computed as padding, for the rank with the largest batch."""
        return self.padded_tokens - self.tokens


class _Open:
    """A segment that still grows."""

    def __init__(self, wave: int, segment: int, why: str, began_s: float) -> None:
        self.wave = wave
        self.segment = segment
        self.why = why
        self.began_s = began_s
        self.ended_s = began_s
        self.end = SegmentEnd.PAUSE
        self.wake_s: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.links: dict[Link, None] = {}
        """As many as there are, in their order: a request is told of as it comes and as it goes."""

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.wave, self.segment)

    def closed(self, epoch: int) -> WaveSegment:
        counts = self.counts
        return WaveSegment(
            epoch=epoch,
            wave=self.wave,
            segment=self.segment,
            why=self.why,
            end=self.end,
            began_s=self.began_s,
            ended_s=self.ended_s,
            wake_s=self.wake_s,
            steps_by_kind={k[5:]: n for k, n in counts.items() if k.startswith("kind:")},
            steps_by_size={int(k[5:]): n for k, n in counts.items() if k.startswith("size:")},
            dummy_steps=counts["dummy_steps"],
            votes=counts["votes"],
            tokens=counts["tokens"],
            padded_tokens=counts["padded_tokens"],
            links=tuple(self.links)[:LINKS_MAX],
            links_dropped=max(0, len(self.links) - LINKS_MAX),
        )


class WaveSegments:
    """Cuts a group's life into segments.

    Feed it each start that is broadcast and each report, then call `settle`, which
    returns the segments that have ended. Nothing that a rank counts is lost or
    counted twice: all segments together, and what `settle` still holds, are the sum
    of what the ranks have reported since their first report.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._open: _Open | None = None
        self._ending: _Open | None = None
        self._ended: list[WaveSegment] = []
        self._spare = _Open(-1, 0, "", 0.0)  # Counts and links that no segment has claimed yet.
        self._last: dict[int, RankReport] = {}
        self._begins: deque[tuple[float, SegmentKey]] = deque(maxlen=BEGINS_KEPT_MAX)

    @property
    def current(self) -> SegmentKey | None:
        """The segment that grows now."""
        return self._open.key if self._open else None

    def _at(self, at_s: float) -> SegmentKey | None:
        """The segment of a step that was done then; None before the first one."""
        for began_s, key in reversed(self._begins):
            if began_s <= at_s:
                return key
        return None

    def note_request(self, link: Link) -> None:
        """A request is sent to the group: it belongs to the segment of now, or the next."""
        (self._open or self._spare).links[link] = None

    def note_work(self, link: Link, since_s: float, until_s: float) -> tuple[SegmentKey, ...]:
        """A request was worked on meanwhile, without a pause: none is while there is work.

        Returns the segments of its first and last step: none, one or two. They link to it,
        unless they are over.
        """
        last = self._at(until_s)
        if last is None:
            return ()
        first = self._at(since_s)
        if first is None or first.wave < last.wave:  # It came before there was a start for it.
            first = SegmentKey(last.wave, 1)
        for segment in (self._ending, self._open):
            if segment is not None and segment.key in (first, last):
                segment.links[link] = None
        return (first,) if first == last else (first, last)

    def on_start(self, start: StartWave, now_s: float) -> None:
        """A start is broadcast; a repeated one belongs to the segment of the first."""
        if self._open is not None and start.wave > self._open.wave:
            self._pause(now_s)
        if self._open is None:
            self._begin(start.wave, 1, start.why, now_s)

    def on_report(self, report: RankReport, now_s: float) -> None:
        """A rank has spoken. Its counts belong to what it was in until now."""
        last = self._last.get(report.rank)
        if last is not None and (report.epoch, report.number) <= (last.epoch, last.number):
            return
        self._last[report.rank] = report
        if last is not None and last.epoch == report.epoch and report.work and last.work:
            self._segment_of(last).update(_grown(last.work, report.work))
        segment = self._open
        if segment is None or not report.stepping or report.wave != segment.wave:
            return
        if segment.segment == 1 and (last is None or not _steps_in(last, report.wave)):
            segment.wake_s.setdefault(report.rank, now_s - segment.began_s)

    def settle(self, state: GroupState, wave: int, now_s: float) -> list[WaveSegment]:
        """Take up the coordinator's state after a call; returns the segments that have ended."""
        if state is GroupState.ENDED:
            return self.end_epoch(self._epoch, now_s)
        if self._open is not None and wave > self._open.wave:
            self._pause(now_s)
        if self._open is None and state in (GroupState.STARTING, GroupState.RUNNING):
            self._begin(wave, 1, "resumed", now_s)
        if self._ending is not None and self._is_told(self._ending, now_s):
            self._ended.append(self._ending.closed(self._epoch))
            self._ending = None
        if self._open is not None and now_s - self._open.began_s >= SEGMENT_MAX_S:
            self._ended.append(self._cut(self._open, now_s))
        ended, self._ended = self._ended, []
        return ended

    def end_epoch(self, epoch: int, now_s: float) -> list[WaveSegment]:
        """The group is lost or starts anew, with this epoch: all that was open ends."""
        open_segments = [x for x in (self._ending, self._open) if x is not None]
        if self._open is not None:
            self._open.end, self._open.ended_s = SegmentEnd.EPOCH, now_s
        ended = [*self._ended, *[segment.closed(self._epoch) for segment in open_segments]]
        self._ended = []
        self._epoch = epoch
        self._open = self._ending = None
        self._last.clear()
        return ended

    def _begin(self, wave: int, number: int, why: str, now_s: float) -> None:
        segment = self._open = _Open(wave, number, why, now_s)
        self._begins.append((now_s, segment.key))
        segment.counts.update(self._spare.counts)
        segment.links |= self._spare.links
        self._spare = _Open(-1, 0, "", 0.0)

    def _pause(self, now_s: float) -> None:
        """The open segment's wave has ended; its ranks' last counts are still on their way."""
        segment = self._open
        assert segment is not None
        if self._ending is not None:  # Two waves within a moment: no more is waited for.
            self._ended.append(self._ending.closed(self._epoch))
        segment.end, segment.ended_s = SegmentEnd.PAUSE, now_s
        self._ending, self._open = segment, None

    def _cut(self, segment: _Open, now_s: float) -> WaveSegment:
        segment.end, segment.ended_s = SegmentEnd.LENGTH, now_s
        self._begin(segment.wave, segment.segment + 1, "continued", now_s)
        return segment.closed(self._epoch)

    def _is_told(self, segment: _Open, now_s: float) -> bool:
        """True if every rank has reported beyond the wave, or has had the time to."""
        if now_s - segment.ended_s >= LAST_WORDS_MAX_S:
            return True
        return all(report.wave > segment.wave for report in self._last.values())

    def _segment_of(self, last: RankReport) -> Counter[str]:
        if self._ending is not None and last.wave <= self._ending.wave:
            return self._ending.counts
        return (self._open or self._spare).counts


def _steps_in(report: RankReport, wave: int) -> bool:
    return report.stepping and report.wave == wave


def _grown(was: RankWork, now: RankWork) -> Counter[str]:
    """What was done between two reports."""
    grown = Counter(
        dummy_steps=now.dummy_steps - was.dummy_steps,
        votes=now.votes - was.votes,
        tokens=now.tokens - was.tokens,
        padded_tokens=now.padded_tokens - was.padded_tokens,
    )
    for kind, steps in now.steps_by_kind.items():
        grown[f"kind:{kind}"] = steps - was.steps_by_kind.get(kind, 0)
    for size, steps in now.steps_by_size.items():
        grown[f"size:{size}"] = steps - was.steps_by_size.get(size, 0)
    return grown
