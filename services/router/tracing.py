"""Where a request's trace is told of it: the span of the whole, and those of its steps.

The API's edge begins a request; whatever is called below it finds it by the task's context.
Without tracing, a step costs the look-up of one context variable.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType

from opentelemetry import context, trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from splitwave.core.errors import Reason, ServingError
from splitwave.runtime import logs
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import (
    NONE,
    OFF,
    Attributes,
    Tracing,
    Value,
    parent_of,
    span_context,
    trace_id_of,
    traceparent_of,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a client calls."""

    name: str
    """As OpenTelemetry's GenAI conventions have it."""
    api: str
    """By which way it came."""


COMPLETIONS = Operation("text_completion", "openai")
CHAT_COMPLETIONS = Operation("chat", "openai")
GRPC = Operation("text_completion", "grpc")
VLLM_ENGINE = Operation("text_completion", "vllm")
UNNAMED = Operation("text_completion", "")


@dataclass(frozen=True, slots=True)
class Origin:
    """What is known of a call before it is read."""

    model: str
    request_id: str
    headers: Mapping[str, str]
    """Those of the client: traceparent and tracestate count."""


class RequestTrace:
    """What one request has come to, told to its root span at the end."""

    def __init__(self, traces: Tracing, root: Span) -> None:
        self.traces = traces
        self.root = root
        self.request_id = ""
        self.recording = root.is_recording()
        self.spans = 1
        """Spans that the router has made of it."""
        self.outcome = ""
        self.admitted = False
        """True once the front door has let something in for it: then it has an outcome there."""
        self._message = ""

    def about(self, request_id: str) -> None:
        """Say which request it is, once that is known."""
        self.request_id = request_id
        logs.about(request_id=request_id)
        self.root.set_attribute(names.REQUEST_ID, request_id)

    def tell(self, attributes: Mapping[str, Value | None]) -> None:
        """Add facts; None is none."""
        if self.recording:
            self.root.set_attributes({k: v for k, v in attributes.items() if v is not None})

    def event(self, name: str, at_s: float) -> None:
        """Note a moment on the loop's clock."""
        if self.recording:
            self.root.add_event(name, timestamp=self.traces.clock.ns(at_s))

    def ended(self, outcome: str, message: str = "") -> None:
        """Say how it ended; the first failure stands."""
        if self.outcome in ("", names.FINISHED):
            self.outcome, self._message = outcome, message

    def close(self) -> None:
        """End the root."""
        self.outcome = outcome = self.outcome or names.FINISHED
        if outcome == names.FINISHED:
            _log.debug("request: finished")
        else:
            _log.info("request: %s", outcome, extra={"why": self._message})
        if not self.recording:
            return
        self.root.set_attributes({names.OUTCOME: outcome, names.ROUTER_SPANS: self.spans})
        if outcome == names.FINISHED:
            self.root.set_status(Status(StatusCode.OK))
            self.traces.end(self.root)
        else:
            self.traces.end(self.root, outcome, self._message)


_REQUEST: ContextVar[RequestTrace | None] = ContextVar("splitwave_request", default=None)


@contextmanager
def request(traces: Tracing, operation: Operation, origin: Origin) -> Iterator[RequestTrace]:
    """Trace one request, under the client's trace context if its headers carry one.

    Within another, it is that one: the outermost begins and ends it.
    """
    outer = _REQUEST.get()
    if outer is not None:
        yield outer
        return
    parent = parent_of(origin.headers)
    root = trace.get_current_span(parent)
    if traces.enabled:
        name = f"{operation.name} {origin.model}"
        root = traces.start(name, parent, _about(operation, origin), SpanKind.SERVER)
    made = RequestTrace(traces, root)
    named = root.get_span_context().is_valid  # By us, or by a client that we only pass on.
    attached = context.attach(trace.set_span_in_context(root, parent)) if named else None
    entered = _REQUEST.set(made)
    with logs.scope(trace_id=trace_id_of(traceparent_of(root))):
        try:
            made.about(origin.request_id)
            yield made
        except BaseException as error:
            made.ended(*_why(error))
            raise
        finally:
            _REQUEST.reset(entered)
            if attached is not None:
                context.detach(attached)
            made.close()


def _about(operation: Operation, origin: Origin) -> Attributes:
    return {
        "splitwave.api": operation.api,
        "gen_ai.operation.name": operation.name,
        "gen_ai.provider.name": "splitwave",
        "gen_ai.request.model": origin.model,
        "gen_ai.response.model": origin.model,
    }


def within() -> bool:
    """True if a request is being served here."""
    return _REQUEST.get() is not None


def current() -> RequestTrace:
    """The request that is being served here; outside of any, one that nobody traces."""
    return _REQUEST.get() or _NOBODY


class Step:
    """A span below the current one, current itself until its block ends."""

    __slots__ = ("_attached", "_attributes", "_kind", "_name", "_span", "_traces")

    def __init__(self, name: str, attributes: Attributes, kind: SpanKind) -> None:
        self._name, self._attributes, self._kind = name, attributes, kind
        self._span: Span = INVALID_SPAN
        self._attached: Token[context.Context] | None = None
        self._traces = OFF

    def __enter__(self) -> Span:
        """Begin it."""
        inside = _REQUEST.get()
        if inside is not None and inside.recording:
            inside.spans += 1
            self._traces = inside.traces
            self._span = inside.traces.start(
                self._name, context.get_current(), self._attributes, self._kind
            )
            self._attached = context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it, failed if the block did."""
        if self._attached is None:
            return
        context.detach(self._attached)
        if error is None:
            self._traces.end(self._span)
        else:
            self._traces.end(self._span, *_why(error))


def span(name: str, attributes: Attributes = NONE) -> Step:
    """A step of the request, in the router."""
    return Step(name, attributes, SpanKind.INTERNAL)


def call(name: str, attributes: Attributes = NONE) -> Step:
    """A step that another service works for."""
    return Step(name, attributes, SpanKind.CLIENT)


def event(name: str, attributes: Attributes = NONE) -> None:
    """Note something on the current span."""
    inside = _REQUEST.get()
    if inside is not None and inside.recording:
        now_ns = inside.traces.clock.now_ns()
        trace.get_current_span().add_event(name, attributes, timestamp=now_ns)


def link(traceparents: Iterable[str]) -> None:
    """Link the current span, and the request's, to others: the wave segments of its steps."""
    inside = _REQUEST.get()
    if inside is None or not inside.recording:
        return
    for linked in map(span_context, traceparents):
        if linked is not None:
            trace.get_current_span().add_link(linked)
            inside.root.add_link(linked)


def traceparent() -> str:
    """W3C traceparent of the current span; empty if it is not traced."""
    return traceparent_of(trace.get_current_span())


def _why(error: BaseException) -> tuple[str, str]:
    """The reason of a failure, in lower case, and its words, which hold no prompt."""
    if isinstance(error, ServingError):
        return error.reason.value, error.message
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return Reason.CANCELLED.value, "the client left, or the time was over"
    return Reason.INTERNAL.value, type(error).__name__


_NOBODY = RequestTrace(OFF, INVALID_SPAN)
