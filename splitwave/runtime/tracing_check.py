"""Whether traces are whole: no span without its parent, none missing, an end status on each.

What a span says of itself decides what must stand below it, so a span that was lost shows, be
it a leaf. Invariant I12 of the architecture. A worker that is killed takes its spans along: where
the router's span says so, they are `missing`; anything else that is not as it must be is a fault.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_files import ERROR, OK, UNSET, SpanRecord, by_trace
from splitwave.runtime.wave_spans import LINKS_DROPPED, WAVE_SEGMENT

SLACK_S: Final = 0.02
"""How much earlier than its parent a span of another process may begin: clocks differ a little."""
WORKER_GONE: Final = frozenset({"worker_lost", "worker_draining"})
"""Failures with which a worker may have taken its spans along."""
_SERVES: Final = {
    names.PREFILL: (names.PREFILL_SERVE, names.ASKED, names.PREFILL_WORKER),
    names.DECODE: (names.DECODE_SERVE, names.ACCEPTED, names.DECODE_WORKER),
}
"""By the router's span of a call: the worker's span below it, the event of the router's span that
says that it reached the worker, and the event's attribute that names the worker."""


def faults(spans: Iterable[SpanRecord], wanted: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with these spans; nothing if each request has its whole trace.

    Spans that are `missing` are not among them. `wanted` has the outcome of each request that
    must be there, by request id.
    """
    found, outcomes = [], dict[str, list[str]]()
    for trace_id, trace in by_trace(of_requests(spans)).items():
        found += [f"trace {trace_id}: {fault}" for fault in _Trace(trace).faults()]
        for span in trace:
            if span.is_request:
                request_id = str(span.attributes.get(names.REQUEST_ID, ""))
                outcomes.setdefault(request_id, []).append(str(span.attributes.get(names.OUTCOME)))
    for request_id, outcome in (wanted or {}).items():
        if outcomes.get(request_id) != [outcome]:
            had = outcomes.get(request_id, [])
            found.append(f"request {request_id}: {outcome} is wanted once, there is {had}")
    return found


def missing(spans: Iterable[SpanRecord]) -> list[str]:
    """The spans that workers took along when they were lost: which, whose and why."""
    return [
        f"trace {trace_id}: {lack}"
        for trace_id, trace in by_trace(of_requests(spans)).items()
        for lack in _Trace(trace).missing()
    ]


def of_requests(spans: Iterable[SpanRecord]) -> list[SpanRecord]:
    """These spans but for those of waves, each of which is a trace of its own."""
    return [span for span in spans if span.name != WAVE_SEGMENT]


def broken_links(spans: Sequence[SpanRecord]) -> list[str]:
    """Links between requests and wave segments that cannot be followed, both ways.

    For the spans of workers that have stopped in order: one that was killed takes the segments
    along that have not ended.
    """
    by_id = {span.span_id: span for span in spans}
    found = []
    for span in spans:
        if span.name == WAVE_SEGMENT:
            lost = [link for link in span.links if link not in by_id]
            found += [f"a wave's link {link} leads nowhere" for link in lost]
        elif span.name in (names.PREFILL_SERVE, names.DECODE_SERVE):
            found += [f"{span.name} ({span.span_id}): {fault}" for fault in _lost(span, by_id)]
    return found


def _lost(span: SpanRecord, by_id: Mapping[str, SpanRecord]) -> Iterator[str]:
    for link in span.links:
        wave = by_id.get(link)
        if wave is None or wave.name != WAVE_SEGMENT:
            yield f"its wave {link} is not there"
        elif span.parent_id not in wave.links and not wave.attributes[LINKS_DROPPED]:
            yield f"its wave {link} does not link back"
        parent = by_id.get(span.parent_id)
        well = parent is not None and ERROR not in (parent.status, span.status)
        if parent is not None and well and link not in parent.links:
            yield f"the router's span does not link to its wave {link}"


class _Trace:
    """The spans of one trace."""

    def __init__(self, spans: Sequence[SpanRecord]) -> None:
        self._spans = spans
        self._by_id = {span.span_id: span for span in spans}
        self._below: dict[str, list[SpanRecord]] = {}
        for span in spans:
            self._below.setdefault(span.parent_id, []).append(span)

    def faults(self) -> Iterator[str]:
        """All that is wrong."""
        for span_id, count in Counter(span.span_id for span in self._spans).items():
            if count > 1:
                yield f"{count} spans have the id {span_id}"
        if not any(span.is_request for span in self._spans):
            yield "no span of a request"
        for span in self._spans:
            for fault in (*self._of_any(span), *self._of_kind(span)):
                yield f"{span.name} ({span.span_id}): {fault}"

    def missing(self) -> Iterator[str]:
        """All that lost workers took along."""
        for span in self._spans:
            if span.name in _SERVES and self._is_bereft(span):
                serve, reached, _ = _SERVES[span.name]
                yield (
                    f"{serve} of {_worker(span)}, and all below it, is missing:"
                    f" {_error(span)} after it had {reached} ({span.name}, {span.span_id})"
                )

    def _is_bereft(self, span: SpanRecord) -> bool:
        """Whether a call reached a worker that was lost, with what it had to tell of it."""
        there = self._named(span, _SERVES[span.name][0])
        return not there and _error(span) in WORKER_GONE and bool(_worker(span))

    def _of_any(self, span: SpanRecord) -> Iterator[str]:
        if not 0 < span.began_ns <= span.ended_ns:
            yield f"it has no end, or one before its beginning: {span.began_ns}, {span.ended_ns}"
        if (span.status == ERROR) != ("error.type" in span.attributes):
            yield f"its status is {span.status} and its error.type {_error(span)!r}"
        if span.is_request:
            return
        kind = names.BY_NAME.get(span.name)
        parent = self._by_id.get(span.parent_id)
        if kind is None or span.service != f"splitwave-{kind.service}":
            yield f"unknown from {span.service}"
        elif parent is None:
            yield "its parent is not there"
        elif (names.REQUEST if parent.is_request else parent.name) not in kind.parents:
            yield f"its parent is {parent.name} where {' or '.join(kind.parents)} was due"
        elif span.began_ns < parent.began_ns - SLACK_S * 1e9:
            yield "it begins before its parent"

    def _of_kind(self, span: SpanRecord) -> Iterator[str]:
        """What must stand below a span, by what it says."""
        if span.is_request:
            yield from self._of_request(span)
        elif span.name == names.PREFILL and span.status == UNSET:
            yield from self._needs(span, names.PREFILL_SERVE)
        elif span.name == names.DECODE and _worker(span) and not self._is_bereft(span):
            yield from self._needs(span, names.DECODE_SERVE)
        elif span.name == names.PREFILL_SERVE:
            yield from self._of_prefill(span)
        elif span.name == names.DECODE_SERVE:
            yield from self._of_decode(span)
        elif span.name == names.LEASE and [x.name for x in span.events] != [
            span.attributes.get(names.LEASE_END)
        ]:
            yield "its end is not told"

    def _of_request(self, span: SpanRecord) -> Iterator[str]:
        outcome = span.attributes.get(names.OUTCOME)
        if not outcome or (outcome == names.FINISHED) != (span.status == OK):
            yield f"its outcome is {outcome!r} and its status {span.status}"
        if span.status == ERROR and _error(span) != outcome:
            yield f"its outcome is {outcome!r} and its error.type {_error(span)!r}"
        if not span.attributes.get(names.REQUEST_ID):
            yield "it has no request id"
        made = 1 + sum(span.service == below.service for below in self._all_below(span))
        if made != span.attributes.get(names.ROUTER_SPANS):
            said = span.attributes.get(names.ROUTER_SPANS)
            yield f"the router made {said} spans of it, {made} are there"

    def _of_prefill(self, span: SpanRecord) -> Iterator[str]:
        yield from self._needs(span, names.PREFILL_QUEUE)
        if _all_well(self._named(span, names.PREFILL_QUEUE)):
            yield from self._needs(span, names.PREFILL_COMPUTE)
        if span.attributes.get("splitwave.held"):
            yield from self._needs(span, names.LEASE)

    def _of_decode(self, span: SpanRecord) -> Iterator[str]:
        if not span.attributes.get("splitwave.end"):
            yield "its end is not told"
        yield from self._needs(span, names.HANDOFF)
        if _all_well(self._named(span, names.HANDOFF)):
            yield from self._needs(span, names.CONFIRM)
            if _all_well(self._named(span, names.CONFIRM)):
                yield from self._needs(span, names.TOKENS)

    def _needs(self, span: SpanRecord, name: str) -> Iterator[str]:
        count = len(self._named(span, name))
        if count != 1:
            yield f"{count} {name} below it where 1 was due"

    def _named(self, span: SpanRecord, name: str) -> list[SpanRecord]:
        return [below for below in self._below.get(span.span_id, ()) if below.name == name]

    def _all_below(self, span: SpanRecord) -> Iterator[SpanRecord]:
        for below in self._below.get(span.span_id, ()):
            yield below
            yield from self._all_below(below)


def _all_well(spans: Sequence[SpanRecord]) -> bool:
    return all(span.status != ERROR for span in spans)


def _worker(span: SpanRecord) -> str:
    """The worker that a call reached last; empty if it reached none, or was refused there."""
    _, reached, named = _SERVES[span.name]
    last = span.events[-1] if span.events else None
    if last is None or last.name != reached:
        return ""
    return str(last.attributes.get(named, "a worker without a name"))


def _error(span: SpanRecord) -> object:
    return span.attributes.get("error.type")
