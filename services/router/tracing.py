"""The seam to OpenTelemetry: spans of a request, and its W3C trace context.

Without a configured provider every span here is the API's no-op.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, propagate, trace

_TRACER = trace.get_tracer("splitwave.router")


@contextmanager
def span(name: str) -> Iterator[trace.Span]:
    """A child of the current span, current itself until the block ends."""
    with _TRACER.start_as_current_span(name) as made:
        yield made


@contextmanager
def request_span(name: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """The span of one request, under the client's trace context if `headers` carry one."""
    token = context.attach(propagate.extract(headers))
    try:
        with span(name) as made:
            yield made
    finally:
        context.detach(token)


def headers() -> dict[str, str]:
    """Trace context of the current span, as headers; empty if it is not traced."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def traceparent() -> str:
    """W3C traceparent of the current span; empty if it is not traced."""
    return headers().get("traceparent", "")
