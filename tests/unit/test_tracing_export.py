"""Where spans go, how many may wait, and what becomes of those that cannot be exported."""

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any  # JSON

import grpc
import pytest
from google.protobuf import json_format
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from splitwave.runtime.config import BadSetting, ProcessConfig
from splitwave.runtime.tracing import OFF, Origin, Past, Tracing, traced
from splitwave.runtime.tracing_export import ConsoleExporter, FileExporter, make_exporter, tracing
from splitwave.runtime.tracing_files import BadTraceFile, find_traces, read_spans, spans_of
from splitwave.runtime.tracing_otlp import line_of
from splitwave.runtime.tracing_queue import SpanQueue

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ORIGIN = Origin(service="prefill", instance="p0")


class Collected(SpanExporter):
    """Keeps spans; holds the exporter's thread until `go` is set."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.spans: list[ReadableSpan] = []
        self.go, self.asked = threading.Event(), threading.Event()
        self.go.set()
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait()
        self.spans += spans
        return self._result


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("no route")


def record(traces: Tracing, name: str = "work", **facts: Any) -> None:
    parent = traces.wanted(PARENT)
    assert parent is not None
    now_s = time.monotonic()
    traces.record(Past(name=name, began_s=now_s - 1.0, ended_s=now_s, **facts), parent)


# What a line says.


def made(count: int = 1, **facts: Any) -> list[ReadableSpan]:
    exporter = Collected()
    queue = SpanQueue(exporter)
    traces = traced(ORIGIN, queue)
    for _ in range(count):
        record(traces, **facts)
    queue.shutdown()
    return exporter.spans


FACTS = {
    "text": 'é"\n', "flag": True, "count": 2**60, "share": 0.25, "words": ["a", "b"], "none": [],
}  # fmt: skip


def test_a_line_is_what_the_official_encoder_says() -> None:
    spans = made(
        2,
        attributes=FACTS,
        events=(("first", 1.0), ("second", 2.0)),
        link=PARENT,
        error="stalled",
        kind=SpanKind.SERVER,
    )

    def binary(node: object) -> object:
        """Ids in base64, as Protobuf's own JSON has them."""
        if isinstance(node, dict):
            return {
                key: base64.b64encode(bytes.fromhex(value)).decode()
                if key in ("traceId", "spanId", "parentSpanId")
                else binary(value)
                for key, value in node.items()
            }
        return [binary(each) for each in node] if isinstance(node, list) else node

    ours = collector_pb.ExportTraceServiceRequest()
    json_format.ParseDict(binary(json.loads(line_of(spans))), ours)  # type: ignore[arg-type]  # JSON object
    official = encode_spans(spans)
    for message in (ours, official):
        for scope in message.resource_spans[0].scope_spans:
            for span in scope.spans:
                for link in span.links:
                    link.flags = 0  # Optional: whether the linked span is of another process.

    assert ours == official


def test_a_line_that_was_written_is_read_back_the_same() -> None:
    (span,) = made(attributes=FACTS, events=(("first", 1.0),), link=PARENT, error="stalled")

    (read,) = spans_of(line_of([span]))

    assert (read.trace_id, read.parent_id, read.name) == (TRACE_ID, SPAN_ID, "work")
    assert read.attributes == {**FACTS, "error.type": "stalled"}
    assert (read.status, read.message, read.links) == ("error", "stalled", (SPAN_ID,))
    assert (read.began_ns, read.ended_ns) == (span.start_time, span.end_time)
    assert [event.name for event in read.events] == ["first"]
    assert read.service == "splitwave-prefill"


# Files.


def write(path: Path, count: int, **options: int) -> Tracing:
    queue = SpanQueue(FileExporter(path, **options))
    traces = traced(ORIGIN, queue)
    for number in range(count):
        record(traces, f"work {number}")
        if number % 64 == 63:
            queue.force_flush()
    queue.shutdown()
    return traces


def test_all_spans_are_in_the_file_and_none_is_counted_as_dropped(tmp_path: Path) -> None:
    traces = write(tmp_path / "made" / "a.spans.jsonl", 1000)

    names = {span.name for span in read_spans(tmp_path / "made")}
    assert names == {f"work {number}" for number in range(1000)}
    assert (traces.counts.exported, traces.counts.dropped) == (1000, 0)


def test_a_file_is_turned_over_and_both_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.spans.jsonl", 1000, bytes_max=200_000)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.spans.jsonl", "a.spans.jsonl.1"]
    assert all(path.stat().st_size < 300_000 for path in tmp_path.iterdir())
    assert "work 999" in {span.name for span in read_spans(tmp_path)}


def test_a_reader_beside_a_writer_sees_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.spans.jsonl"
    (span,) = made()
    path.write_bytes(line_of([span]) + line_of([span])[:-40])

    assert len(list(read_spans(tmp_path))) == 1


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.spans.jsonl").write_text('{"resourceSpans": 3}\n')

    with pytest.raises(BadTraceFile, match=r"a\.spans\.jsonl, line 1"):
        list(read_spans(tmp_path))


def test_a_disk_that_is_full_loses_spans_that_are_counted_and_tears_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = FileExporter(tmp_path / "a.spans.jsonl")
    (span,) = made()
    real = os.write

    def half(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2])

    assert exporter.export([span]) is SpanExportResult.SUCCESS
    with monkeypatch.context() as full:
        full.setattr(os, "write", half)
        assert exporter.export([span]) is SpanExportResult.FAILURE
    assert exporter.export([span]) is SpanExportResult.SUCCESS

    lines = (tmp_path / "a.spans.jsonl").read_bytes().splitlines()
    whole = [line for line in lines if line.endswith(b"}")]
    assert (len(lines), len(whole)) == (3, 2)


def test_a_request_is_found_by_its_id_and_by_that_of_its_trace(tmp_path: Path) -> None:
    exporter = FileExporter(tmp_path / "a.spans.jsonl")
    for name in ("mine", "mine too"):
        exporter.export(made(attributes={"splitwave.request_id": name}))

    assert list(find_traces(tmp_path, "mine")) == [TRACE_ID]
    assert [len(spans) for spans in find_traces(tmp_path, TRACE_ID.upper()).values()] == [2]
    assert find_traces(tmp_path, "min") == {}


# The queue.


def eventually(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)


def test_a_full_queue_drops_the_newest_and_counts_them() -> None:
    exporter = Collected()
    exporter.go.clear()
    queue = SpanQueue(exporter, queue_max=10, delay_s=0.01)
    traces = traced(ORIGIN, queue)
    record(traces, "held by the exporter")
    assert exporter.asked.wait(5.0)

    for number in range(15):
        record(traces, f"work {number}")
    exporter.go.set()
    queue.shutdown()

    assert traces.counts.lost == {"queue_full": 5, "export_failed": 0, "closed": 0}
    assert [span.name for span in exporter.spans[1:]] == [f"work {number}" for number in range(10)]


@pytest.mark.parametrize("exporter", [Broken(), Collected(SpanExportResult.FAILURE)])
def test_spans_that_the_exporter_did_not_take_are_dropped(exporter: SpanExporter) -> None:
    queue = SpanQueue(exporter)
    traces = traced(ORIGIN, queue)
    for _ in range(3):
        record(traces)
    queue.shutdown()

    counts = traces.counts
    assert (counts.exported, counts.lost["export_failed"]) == (0, 3)


async def test_an_end_waits_for_a_slow_exporter_within_its_time_and_counts_what_is_left() -> None:
    exporter = Collected()
    exporter.go.clear()
    traces = traced(ORIGIN, SpanQueue(exporter, delay_s=0.01))
    record(traces)
    assert exporter.asked.wait(5.0)
    record(traces)

    began_s = time.monotonic()
    await traces.close(0.2)

    assert time.monotonic() - began_s < 2.0
    assert traces.counts.lost["closed"] == 1
    record(traces)
    assert traces.counts.lost["closed"] == 2, "a span that came late"
    exporter.go.set()


def test_dropped_spans_are_a_metric_with_each_reason_from_the_start() -> None:
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in OFF.families()
        for sample in family.samples
    }

    assert samples == {
        ("splitwave_trace_spans_exported_total",): 0,
        ("splitwave_trace_spans_dropped_total", "queue_full"): 0,
        ("splitwave_trace_spans_dropped_total", "export_failed"): 0,
        ("splitwave_trace_spans_dropped_total", "closed"): 0,
    }


# Exporters by configuration.


class PrefillLike(ProcessConfig):
    service = "prefill"


class Collector(collector_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector does with what it gets, for a test."""

    def __init__(self) -> None:
        self.requests: list[collector_pb.ExportTraceServiceRequest] = []

    def Export(
        self, request: collector_pb.ExportTraceServiceRequest, context: object
    ) -> collector_pb.ExportTraceServiceResponse:
        self.requests.append(request)
        return collector_pb.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Collector()
    collector_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


async def test_a_collector_gets_them_over_otlp(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    config = PrefillLike(trace_exporter="otlp", trace_endpoint=endpoint)

    async with tracing(config, "p0") as traces:
        record(traces)

    (request,) = servicer.requests
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("work", TRACE_ID)
    resource = {x.key: x.value.string_value for x in request.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "splitwave-prefill"
    assert resource["service.instance.id"] == "p0"
    assert traces.counts.dropped == 0


async def test_each_process_has_a_file_of_its_own_in_the_directory(tmp_path: Path) -> None:
    config = PrefillLike(trace_exporter="file", trace_dir=str(tmp_path / "traces"))

    async with tracing(config, "p0") as traces:
        record(traces)

    (path,) = (tmp_path / "traces").iterdir()
    assert path.name.startswith("prefill-")
    assert path.name.endswith(f"-{os.getpid()}.spans.jsonl")
    assert len(list(read_spans(tmp_path / "traces"))) == 1


async def test_the_process_s_own_provider_is_left_alone(tmp_path: Path) -> None:
    config = PrefillLike(trace_exporter="file", trace_dir=str(tmp_path))

    async with tracing(config, "p0"):
        trace.get_tracer("vllm").start_span("llm_request").end()

    assert not isinstance(trace.get_tracer_provider(), TracerProvider), "the global one is ours"
    assert list(read_spans(tmp_path)) == [], "another library's spans among ours"


async def test_by_default_nothing_is_traced() -> None:
    async with tracing(PrefillLike(), "p0") as traces:
        assert traces is OFF


def test_a_console_gets_a_line_a_span(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleExporter().export(made(attributes={"splitwave.end": "stop"}))

    said = capsys.readouterr().out
    assert said == f"span {TRACE_ID} work 1000.000 ms splitwave.end='stop'\n"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = PrefillLike(trace_exporter="file", trace_dir=str(tmp_path / "file"))

    with pytest.raises(BadSetting, match="trace_dir: cannot write"):
        make_exporter(config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"trace_ratio": 1.5}, "trace_ratio: is 1.5; set it to a share from 0 to 1"),
        ({"trace_endpoint": "localhost:4317"}, "trace_endpoint: is 'localhost:4317'; write it as"),
        (
            {"trace_endpoint": "http://localhost"},
            "trace_endpoint: is 'localhost'; write it",
        ),
        ({"trace_queue_max": 0}, "trace_queue_max: is 0; set it to 1 or more"),
        ({"trace_dir": ""}, "trace_dir: is ''; set it to a directory"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        PrefillLike(**setting)
