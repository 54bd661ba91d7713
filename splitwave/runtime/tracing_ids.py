"""Ids of spans that others have to name before they are made.

A wave's segment is a span once it is over; the requests in it link to it before.
"""

import contextlib
from collections.abc import Iterator, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class OwnIds(IdGenerator):
    """Random ids, but for a span whose ids were told before. For one thread: the event loop's."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._own: SpanContext | None = None

    @contextlib.contextmanager
    def next_is(self, own: SpanContext | None) -> Iterator[None]:
        """A span that is begun inside has these ids, if any."""
        self._own = own
        try:
            yield
        finally:
            self._own = None

    def generate_span_id(self) -> int:
        """The next span's."""
        return self._random.generate_span_id() if self._own is None else self._own.span_id

    def generate_trace_id(self) -> int:
        """That of a span without a parent."""
        return self._random.generate_trace_id() if self._own is None else self._own.trace_id

    def kept_or(self, otherwise: Sampler) -> Sampler:
        """Keep spans whose ids were told, and have `otherwise` decide on all others."""
        return _KeepsOwn(self, otherwise)

    @property
    def is_told(self) -> bool:
        """True while a span is begun whose ids were told."""
        return self._own is not None


class _KeepsOwn(Sampler):
    def __init__(self, ids: OwnIds, otherwise: Sampler) -> None:
        self._ids = ids
        self._otherwise = otherwise

    def should_sample(  # noqa: PLR0913  # OpenTelemetry's interface
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide on one span."""
        if self._ids.is_told:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        return self._otherwise.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        """For people."""
        return f"KeepsOwn,{self._otherwise.get_description()}"
