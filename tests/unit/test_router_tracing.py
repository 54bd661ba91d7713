"""One trace a request: the client's context above, the hops below, and on to the workers."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.router import tracing
from services.router.attempts import Call, Trail
from services.router.generate import generate
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Request, Sampling
from tests.fakes import FakeDecode, FakeFleet, FakePrefill, FakeSink, now_s

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    provider, made = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("test"))
    return made


async def serve(decode_ends: list[tuple[int, ServingError]]) -> FakeDecode:
    prefill = FakePrefill()
    decode = FakeDecode("d0", prefill)
    decode.ends = decode_ends
    request = Request("r", (1, 2, 3), Sampling(max_tokens=4, temperature=0.0))
    call = Call(request=request, key="r#1", deadline=Deadline(now_s() + 60), stall_max_s=60)
    with tracing.request_span("generate", CLIENT):
        await generate(call, FakeFleet(prefill, decode), FakeSink(), Trail())
    return decode


async def test_each_hop_is_a_child_of_the_requests_span(exporter: InMemorySpanExporter) -> None:
    decode = await serve([])

    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("generate")
    assert set(spans) == {
        "splitwave.decode_room",
        "splitwave.prefill",
        "splitwave.handoff",
        "splitwave.decode",
    }
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert {span.parent and span.parent.span_id for span in spans.values()} == {
        root.context.span_id
    }
    assert decode.submits[0].traceparent.split("-")[1] == TRACE_ID


async def test_a_second_attempt_adds_its_hops_to_the_same_trace(
    exporter: InMemorySpanExporter,
) -> None:
    await serve([(1, ServingError(Reason.PREEMPTED, "no blocks"))])

    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("splitwave.prefill") == 2
    assert names.count("generate") == 1


async def test_without_a_provider_nothing_is_traced_and_nothing_fails() -> None:
    decode = await serve([])

    assert decode.submits[0].traceparent in ("", CLIENT["traceparent"])
