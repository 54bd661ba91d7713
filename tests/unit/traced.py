"""Tracing for tests: one a service, as in a deployment, with the spans kept in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from splitwave.runtime.tracing import OFF, Origin, Tracing, WallClock, traced
from splitwave.runtime.tracing_files import SpanRecord, spans_of
from splitwave.runtime.tracing_otlp import line_of
from splitwave.runtime.tracing_queue import SpanPass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What each service does about traces."""

    router: Tracing = OFF
    prefill: Tracing = OFF
    decode: Tracing = OFF

    @property
    def dropped(self) -> int:
        """Spans that were lost."""
        return sum(each.counts.dropped for each in (self.router, self.prefill, self.decode))


NO_TRACES = Traces()


@dataclass(slots=True)
class Kept(SpanExporter):
    """Keeps spans as the file exporter would write them."""

    lines: list[bytes] = field(default_factory=list)
    made: list[Traces] = field(default_factory=list)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Keep them."""
        self.lines.append(line_of(spans))
        return SpanExportResult.SUCCESS

    def spans(self) -> Iterator[SpanRecord]:
        """All that was exported."""
        for line in self.lines:
            yield from spans_of(line)

    def traces(self, clock: WallClock | None = None) -> Traces:
        """One tracing for each service, all of which end here."""
        services = ("router", "prefill", "decode")
        made = Traces(**{x: traced(Origin(service=x), SpanPass(self), clock) for x in services})
        self.made.append(made)
        return made
