"""The way of a span from its end to the exporter: a bounded queue, and what is lost on it."""

from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

QUEUE_MAX: Final = 8192
"""Spans that may wait: some 600 requests."""
BATCH_MAX: Final = 128
"""Spans of one export: encoding them holds the interpreter, so that tokens wait meanwhile."""
DELAY_S: Final = 0.5
"""How long a span may wait for others."""

FULL, FAILED, CLOSED = "queue_full", "export_failed", "closed"
LOSSES: Final = (FULL, FAILED, CLOSED)
"""Why spans are lost."""


class Counts:
    """Spans by what became of them. Each number is written by one thread, so none needs a lock.

    Once closed: queued == exported + lost[FAILED] + lost[CLOSED], but for late spans.
    """

    def __init__(self) -> None:
        self.queued = 0
        """Put into the queue, by the event loop."""
        self.taken = 0
        """Taken out of it, by the exporter's thread."""
        self.exported = 0
        self.lost = dict.fromkeys(LOSSES, 0)

    @property
    def dropped(self) -> int:
        """Spans that nobody will see."""
        return sum(self.lost.values())

    def close(self) -> None:
        """No more will be exported: what still waits is lost."""
        self.lost[CLOSED] += self.queued - self.taken
        self.queued = self.taken


class Counted(SpanExporter):
    """An exporter whose results are counted."""

    def __init__(self, exporter: SpanExporter, counts: Counts) -> None:
        self._exporter, self._counts = exporter, counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Pass on a batch."""
        self._counts.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._counts.exported += len(spans)
            else:
                self._counts.lost[FAILED] += len(spans)
        return result

    def shutdown(self) -> None:
        """Pass it on."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Pass it on."""
        return self._exporter.force_flush(timeout_millis)


def _sampled(span: ReadableSpan) -> bool:
    named = span.get_span_context()
    return named is not None and named.trace_flags.sampled


class SpanQueue(BatchSpanProcessor):
    """OpenTelemetry's batching, with a bound that drops the newest span and counts it.

    Starts a thread: never before a fork.
    """

    def __init__(
        self, exporter: SpanExporter, *, queue_max: int = QUEUE_MAX, delay_s: float = DELAY_S
    ) -> None:
        self.counts = Counts()
        self._queue_max = queue_max
        self._closed = False
        super().__init__(
            Counted(exporter, self.counts),
            max_queue_size=queue_max,
            schedule_delay_millis=delay_s * 1e3,
            max_export_batch_size=min(BATCH_MAX, queue_max),
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that has ended; called on the event loop, never waits."""
        counts = self.counts
        if not _sampled(span):
            return
        if self._closed:
            counts.lost[CLOSED] += 1
        elif counts.queued - counts.taken >= self._queue_max:
            counts.lost[FULL] += 1
        else:
            counts.queued += 1
            super().on_end(span)

    def shutdown(self) -> None:
        """Export what is queued, and take no more."""
        self._closed = True
        super().shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it untyped


class SpanPass(SimpleSpanProcessor):
    """Exports each span as it ends, without a thread: for simulations."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.counts = Counts()
        super().__init__(Counted(exporter, self.counts))

    def on_end(self, span: ReadableSpan) -> None:
        """Export a span."""
        if _sampled(span):
            self.counts.queued += 1
            super().on_end(span)
