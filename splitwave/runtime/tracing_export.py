"""Where a process's spans go: to a collector, into files, or onto the console."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from splitwave.runtime.config import BadSetting, ProcessConfig
from splitwave.runtime.tracing import OFF, Origin, Tracing, traced
from splitwave.runtime.tracing_otlp import line_of
from splitwave.runtime.tracing_queue import SpanQueue

FILE_BYTES_MAX: Final = 256 * 1024 * 1024
"""Beyond this a file becomes `.1`, in place of the one before; a process keeps two."""
SUFFIX: Final = ".spans.jsonl"
EXPORT_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 5.0
"""What the last spans get when a process ends."""


class FileExporter(SpanExporter):
    """Appends batches to one file of this process, a line each, in OTLP's JSON.

    A line is one write at the end of the file, so a reader at any moment sees whole lines; a
    disk that is full may tear one, which is then left at that. Called by one thread.
    """

    def __init__(self, path: Path, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        """Raises OSError if the file cannot be made."""
        self._path, self._bytes_max = path, bytes_max
        self._torn = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()

    def _open(self) -> int:
        # Of this user only: prompts may stand there, if they are asked for.
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write one line."""
        line = b"\n" * self._torn + line_of(spans)
        try:
            written = os.write(self._fd, line)
            self._torn = written < len(line)
            if os.fstat(self._fd).st_size >= self._bytes_max:
                self._turn_over()
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.FAILURE if self._torn else SpanExportResult.SUCCESS

    def _turn_over(self) -> None:
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        os.close(self._fd)
        self._fd = self._open()

    def shutdown(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ConsoleExporter(SpanExporter):
    """Writes a span a line on standard output, for people."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the lines."""
        for span in spans:
            sys.stdout.write(_console_line(span))
        sys.stdout.flush()
        return SpanExportResult.SUCCESS


def _console_line(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    took_ms = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
    facts = " ".join(f"{name}={value!r}" for name, value in (span.attributes or {}).items())
    error = f" ERROR {span.status.description}" if span.status.description else ""
    return f"span {context.trace_id:032x} {span.name} {took_ms:.3f} ms{error} {facts}\n"


def file_name(service: str) -> str:
    """The file of this process: no other process that lives has the same."""
    return f"{service}-{socket.gethostname()}-{os.getpid()}{SUFFIX}"


def make_exporter(config: ProcessConfig) -> SpanExporter | None:
    """What the config asks for; None: nothing. Raises BadSetting."""
    match config.trace_exporter:
        case "file":
            path = Path(config.trace_dir) / file_name(config.service)
            try:
                return FileExporter(path)
            except OSError as error:
                raise BadSetting("trace_dir", f"cannot write {path}: {error.strerror}") from error
        case "console":
            return ConsoleExporter()
        case "otlp":
            return _otlp(config.trace_endpoint)
    return None


def _otlp(endpoint: str) -> SpanExporter:
    # It takes half a second to import; headers and certificates come from OTEL_EXPORTER_OTLP_*.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    is_plain = not endpoint.startswith("https://")
    return OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=EXPORT_TIMEOUT_S)


@contextlib.asynccontextmanager
async def tracing(config: ProcessConfig, instance: str) -> AsyncIterator[Tracing]:
    """Trace as the config says within the block; then export what is left, within CLOSE_S.

    Starts a thread: enter it after the last fork.
    """
    exporter = await asyncio.to_thread(make_exporter, config)
    if exporter is None:
        yield OFF
        return
    origin = Origin(service=config.service, instance=instance, ratio=config.trace_ratio)
    traces = traced(origin, SpanQueue(exporter, queue_max=config.trace_queue_max))
    try:
        yield traces
    finally:
        await traces.close(CLOSE_S)
