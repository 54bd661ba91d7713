"""Spans of one process: sampled, bounded, exported in batches, and counted where they are lost.

The provider belongs to whoever made it and is never the process's global one: what vLLM or
another library does with OpenTelemetry stays out of our traces, and theirs without ours. It
starts a thread, so it is made after the engines, which are forked.

docs/tracing.md has every span with its attributes.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Metric

from splitwave.runtime.metrics import counter
from splitwave.runtime.tracing_ids import OwnIds
from splitwave.runtime.tracing_queue import LOSSES, Counts, SpanPass, SpanQueue

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
NONE: Attributes = MappingProxyType({})
Metadata = Iterable[tuple[str, str | bytes]] | None
"""As gRPC gives them."""

ANCHOR_S = 60.0
"""How long the clocks' offset is used before it is measured again."""

EXPORTED = counter("splitwave_trace_spans_exported", "Spans that the exporter took.")
DROPPED = counter(
    "splitwave_trace_spans_dropped",
    "Spans lost: the queue was full, the exporter failed, or they came after the end.",
    "reason",
)
FAMILIES = (EXPORTED, DROPPED)

_PROPAGATOR = TraceContextTextMapPropagator()


class WallClock:
    """Seconds of a monotonic clock as Unix time, which spans are in.

    `wall_ns` and `clock` are this host's; a simulation gives its own two.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock, self._wall_ns = clock, wall_ns
        self._anchor(clock())

    def _anchor(self, now_s: float) -> None:
        self._anchored_s = now_s
        self._origin_ns = self._wall_ns() - int(now_s * 1e9)

    def now_ns(self) -> int:
        """Unix time in nanoseconds."""
        now_s = self._clock()
        if now_s - self._anchored_s > ANCHOR_S:  # The wall clock is corrected now and then.
            self._anchor(now_s)
        return self.ns(now_s)

    def ns(self, at_s: float) -> int:
        """The same of a moment on the monotonic clock."""
        return self._origin_ns + int(at_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A span of which all is known already. Times are seconds of the process's clock."""

    name: str
    began_s: float
    ended_s: float
    attributes: Attributes | None = None
    kind: SpanKind = SpanKind.INTERNAL
    error: str | None = None
    """Why it failed: a reason in lower case."""
    events: Sequence[tuple[str, float]] = ()
    link: str = ""
    """W3C traceparent of a span that had to do with it, of this or another trace."""
    links: Sequence[str] = ()
    """More of them."""
    own: str = ""
    """W3C traceparent that this span is to have, since others name it already: then it is a trace
    of its own, and kept whatever the ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose spans these are, and how many of the traces that begin here are kept."""

    service: str
    """router, prefill or decode."""
    instance: str = ""
    ratio: float = 1.0
    """Share of the requests without a traceparent that are traced."""
    resource: Attributes = field(default_factory=dict)


class Tracing:
    """What one process does about traces; `OFF` does nothing, and costs next to nothing."""

    def __init__(
        self,
        tracer: trace.Tracer | None = None,
        queue: SpanQueue | SpanPass | None = None,
        clock: WallClock | None = None,
        ids: OwnIds | None = None,
    ) -> None:
        self._tracer = tracer
        self._ids = ids or OwnIds()
        self._queue = queue
        self.clock = clock or WallClock()
        self.enabled = tracer is not None
        self.counts = queue.counts if queue else Counts()

    # Spans that begin now: the router's, since what they call has to know their ids.

    def start(
        self,
        name: str,
        parent: Context,
        attributes: Attributes = NONE,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Begin a span. `end` must be called, on every way out."""
        assert self._tracer is not None
        return self._tracer.start_span(
            name, parent, kind, attributes, start_time=self.clock.now_ns()
        )

    def end(self, span: Span, error: str | None = None, message: str = "") -> None:
        """End a span; `error` is the reason of a failure, in lower case."""
        if error is not None:
            _fail(span, error, message)
        span.end(self.clock.now_ns())

    # Spans that are over: the workers', made when an attempt ends, so that no token costs any.

    def record(self, past: Past, parent: Context) -> Context:
        """Make a span that is over; returns the parent for those below it."""
        assert self._tracer is not None
        named = [span_context(said) for said in (past.link, *past.links) if said]
        links = [Link(linked) for linked in named if linked is not None]
        began_ns = self.clock.ns(past.began_s)
        with self._ids.next_is(span_context(past.own) if past.own else None):
            span = self._tracer.start_span(
                past.name, parent, past.kind, past.attributes, links, start_time=began_ns
            )
        for name, at_s in past.events:
            span.add_event(name, timestamp=self.clock.ns(at_s))
        if past.error is not None:
            _fail(span, past.error)
        span.end(max(began_ns, self.clock.ns(past.ended_s)))
        return trace.set_span_in_context(span, Context())

    def wanted(self, traceparent: str) -> Context | None:
        """The parent for spans of a request; None if it is not to be traced here."""
        if not self.enabled or not traceparent:
            return None
        parent = span_context(traceparent)
        if parent is None or not parent.trace_flags.sampled:
            return None
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())

    # The process's.

    def families(self) -> Iterator[Metric]:
        """Metrics of the spans themselves."""
        counts = self.counts
        yield EXPORTED.of(counts.exported)
        yield DROPPED.by_one({reason: counts.lost[reason] for reason in LOSSES})

    async def close(self, timeout_s: float) -> None:
        """Export what is queued, for so long at most; what is left then counts as dropped."""
        if self._queue is None:
            return
        # A thread of its own: an exporter that hangs must hold up neither the loop nor the exit.
        closing = threading.Thread(target=self._queue.shutdown, name="spans: close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, timeout_s)
        self.counts.close()
        if self.counts.dropped:
            log.warning("spans were lost", extra=dict(self.counts.lost))


OFF = Tracing()
"""Traces nothing."""


def traced(origin: Origin, queue: SpanQueue | SpanPass, clock: WallClock | None = None) -> Tracing:
    """Trace into a queue."""
    resource = Resource.create(
        {
            "service.namespace": "splitwave",
            "service.name": f"splitwave-{origin.service}",
            "service.instance.id": origin.instance,
            **origin.resource,
        }
    )
    ids = OwnIds()
    provider = TracerProvider(
        sampler=ids.kept_or(ParentBased(TraceIdRatioBased(origin.ratio))),
        resource=resource,
        id_generator=ids,
        shutdown_on_exit=False,  # `close` does it, within its time.
    )
    provider.add_span_processor(queue)
    return Tracing(provider.get_tracer("splitwave"), queue, clock, ids)


def span_context(traceparent: str) -> SpanContext | None:
    """The span that a W3C traceparent names; None for one that names none."""
    context = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def parent_of(headers: Mapping[str, str]) -> Context:
    """The context that traceparent and tracestate of a client bring; without, an empty one."""
    return _PROPAGATOR.extract(headers, Context()) if "traceparent" in headers else Context()


def traceparent_of(span: Span) -> str:
    """W3C traceparent that names a span; empty if there is none."""
    named = span.get_span_context()
    if not named.is_valid:
        return ""
    return f"00-{named.trace_id:032x}-{named.span_id:016x}-{named.trace_flags:02x}"


def traceparent_in(metadata: Metadata) -> str:
    """The traceparent among a gRPC call's metadata; empty if there is none."""
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""


def as_metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    """Metadata for a gRPC call that carry a traceparent; none if it is empty."""
    return (("traceparent", traceparent),) if traceparent else ()


def trace_id_of(traceparent: str) -> str:
    """The trace id, for logs; empty if there is none."""
    return traceparent[3:35] if len(traceparent) >= 55 else ""


def _fail(span: Span, error: str, message: str = "") -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, message or error))
