"""What becomes of requests: those that are served now, the last that ended, and how long it took.

No prompt and no completion text stands here: ids, counts and times only.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.router.attempts import Trail
from splitwave.core.errors import Reason
from splitwave.runtime.metrics import SHORT_S, Histogram

KEPT = 50
"""Ended requests that are remembered."""


class Shown(Protocol):
    """What is asked of a sink."""

    @property
    def shown_tokens(self) -> int:
        """Tokens that belong to the completion."""

    @property
    def first_at_s(self) -> float | None:
        """When the first token came, on the loop's clock; None before."""

    @property
    def last_at_s(self) -> float:
        """When the latest tokens came."""


class Course(Protocol):
    """How one completion of a request goes."""

    @property
    def sink(self) -> Shown:
        """Where its tokens go."""

    @property
    def trail(self) -> Trail:
        """What its attempts have come to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    """One request, live or ended: where its time went, in seconds.

    Of several completions, times are the longest and tokens the sum.
    """

    request_id: str
    outcome: str
    """Empty while it is served."""
    age_s: float
    """Since its beginning."""
    prompt_tokens: int
    completion_tokens: int
    choices: int
    attempts: int
    grant_wait_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    """The rest: mostly waiting for decode's steps."""
    first_token_s: float | None
    """None before it."""
    total_s: float
    handoff_bytes: int


class Live:
    """A request that is served now."""

    __slots__ = ("began_s", "courses", "prompt_tokens", "request_id")

    def __init__(self, request_id: str, prompt_tokens: int, courses: Sequence[Course]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.courses = courses
        self.began_s = _now_s()

    def first_at_s(self) -> float | None:
        """When the first token of any completion came."""
        times_s = [x.sink.first_at_s for x in self.courses if x.sink.first_at_s is not None]
        return min(times_s, default=None)


class History:
    """Requests of one router. Everything costs once a request, nothing once a token."""

    def __init__(self) -> None:
        self._live: dict[Live, None] = {}  # An ordered set.
        self._ended: deque[tuple[float, RecentRequest]] = deque(maxlen=KEPT)
        self._ended_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.handoff_bytes = 0
        self.resumes: Counter[Reason] = Counter()
        """Attempts beyond a completion's first, by what the one before failed with."""
        self.ttft_s = Histogram()
        self.tpot_s = Histogram(SHORT_S)
        self.total_s = Histogram()
        self.grant_wait_s = Histogram()
        self.prefill_s = Histogram()
        self.handoff_s = Histogram()

    @property
    def completion_tokens(self) -> int:
        """Tokens given to clients, those of live requests included."""
        shown = (course.sink.shown_tokens for live in self._live for course in live.courses)
        return self._ended_tokens + sum(shown)

    def begin(self, request_id: str, prompt_tokens: int, courses: Sequence[Course]) -> Live:
        """A request was admitted; `courses` has one entry a completion."""
        live = Live(request_id, prompt_tokens, courses)
        self._live[live] = None
        self.prompt_tokens += prompt_tokens
        return live

    def end(self, live: Live, outcome: str) -> None:
        """It has ended, in one of the outcomes of the front door."""
        del self._live[live]
        now_s = _now_s()
        self._ended.append((now_s, _recent(live, outcome, now_s)))
        self.total_s.observe(now_s - live.began_s)
        first_at_s = live.first_at_s()
        if first_at_s is not None:
            self.ttft_s.observe(first_at_s - live.began_s)
        for course in live.courses:
            self._count(course)

    def _count(self, course: Course) -> None:
        sink, trail = course.sink, course.trail
        self._ended_tokens += sink.shown_tokens
        self.cached_tokens += trail.cached_tokens
        self.handoff_bytes += trail.handoff_bytes
        # The last failure was followed by no attempt if the budget for resumes was spent.
        self.resumes.update(trail.retried[: max(0, trail.attempts - 1)])
        if sink.first_at_s is not None and sink.shown_tokens > 1:
            self.tpot_s.observe((sink.last_at_s - sink.first_at_s) / (sink.shown_tokens - 1))
        self.grant_wait_s.observe(trail.grant_wait_s)
        if trail.prefill_s:
            self.prefill_s.observe(trail.prefill_s)
        if trail.handoff_bytes:
            self.handoff_s.observe(trail.handoff_s)

    def recent(self) -> list[RecentRequest]:
        """Live requests and the last that ended, the newest first."""
        now_s = _now_s()
        live = [_recent(x, "", now_s) for x in list(self._live)[-KEPT:]]
        ended = [replace(x, age_s=x.age_s + now_s - at_s) for at_s, x in self._ended]
        return sorted([*ended, *live], key=lambda x: x.age_s)


def _recent(live: Live, outcome: str, now_s: float) -> RecentRequest:
    trails = [course.trail for course in live.courses]
    total_s, first_at_s = now_s - live.began_s, live.first_at_s()
    grant_wait_s = max(trail.grant_wait_s for trail in trails)
    prefill_s = max(trail.prefill_s for trail in trails)
    handoff_s = max(trail.handoff_s for trail in trails)
    rest_s = max(0.0, total_s - grant_wait_s - prefill_s - handoff_s)
    if not outcome and first_at_s is None and not prefill_s:
        # A phase is counted when it is over; until then the rest belongs to the one that lasts.
        if any(trail.at_work for trail in trails):
            prefill_s, rest_s = rest_s, 0.0
        else:
            grant_wait_s, rest_s = grant_wait_s + rest_s, 0.0
    return RecentRequest(
        request_id=live.request_id,
        outcome=outcome,
        age_s=total_s,
        prompt_tokens=live.prompt_tokens,
        completion_tokens=sum(course.sink.shown_tokens for course in live.courses),
        choices=len(live.courses),
        attempts=max(trail.attempts for trail in trails),
        grant_wait_s=grant_wait_s,
        prefill_s=prefill_s,
        handoff_s=handoff_s,
        decode_s=rest_s,
        first_token_s=None if first_at_s is None else first_at_s - live.began_s,
        total_s=total_s,
        handoff_bytes=sum(trail.handoff_bytes for trail in trails),
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
