"""What traces cost, and whether they are whole, as JSON on stdout.

    python -m bench.tracing > bench/results/tracing.json

`cpu_us_per_request`: the calls that each service makes for the trace of one request, alone:
those of the router from its edge down, of the prefill worker, of the decode worker. `off`: no
exporter; `unsampled`: the client's traceparent says no. The others include the exporter's
thread, which encodes. Best of several rounds. `simulated`: requests on the simulator, through
the production code of every hop, and what the check of traces found.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from bench.provenance import provenance
from services.decode.attempt import Attempt
from services.decode.session import Session
from services.decode.spans import DecodeSpans
from services.prefill.floor import Call
from services.prefill.queue import Queued
from services.prefill.spans import PrefillSpans
from services.router import tracing
from splitwave.core.generation import Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Submit
from splitwave.core.worker import Role
from splitwave.engine.port import EngineRequest
from splitwave.engine.sim import SimSettings, write_vocabulary
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import OFF, Origin, Tracing, Value, traced
from splitwave.runtime.tracing_check import broken_links, faults, of_requests
from splitwave.runtime.tracing_export import FileExporter
from splitwave.runtime.tracing_queue import SpanQueue
from splitwave.text import Tokenizer
from tests.sim import virtual_loop
from tests.sim.test_traces_sim import many
from tests.unit.traced import Kept

REQUESTS, ROUNDS = 2000, 5
PATHS = [
    *(
        f"splitwave/runtime/tracing{part}.py"
        for part in ("", "_check", "_export", "_otlp", "_queue")
    ),
    *(f"services/{name}.py" for name in ("router/tracing", "prefill/spans", "decode/spans")),
    "bench/tracing.py",
]
PACKAGES = ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"]
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{SPAN_ID}-0{flag}" for flag in (1, 0))

GROUP = SimSettings(role=Role.DECODE).description()
HANDOFF = Handoff(
    handoff_id="r/0/1", prefill_worker_id="p0", prefill_address="p0:1", group_id="p", epoch=1,
    rank=0, prompt_tokens=20, block_count=2, kv_layout="layout", lease_remaining_s=10.0,
    connector="sim", connector_params=b"",
)  # fmt: skip
FACTS: dict[str, Value | None] = {
    "splitwave.attempts": 1, "splitwave.handoff.bytes": 131072, "gen_ai.request.max_tokens": 64,
    "gen_ai.request.temperature": 0.7, "gen_ai.request.top_p": 0.9, "gen_ai.request.seed": None,
    "gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 64,
    "gen_ai.response.finish_reasons": ["stop"],
}  # fmt: skip


class Nothing(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Forget them."""
        return SpanExportResult.SUCCESS


class Encoded(SpanExporter):
    """Encodes as OTLP's exporter does, and sends nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode them."""
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def router(traces: Tracing, traceparent: str) -> None:
    """What the router calls for one request that takes one attempt."""
    origin = tracing.Origin("demo", "r", {"traceparent": traceparent})
    with tracing.request(traces, tracing.COMPLETIONS, origin) as trace:
        about = {"splitwave.attempt": 1, "splitwave.choice": 0, "splitwave.offset": 0}
        with tracing.span(names.ATTEMPT, about):
            with tracing.span(names.GRANT, {"splitwave.room_tokens": 84}) as span:
                span.set_attribute("splitwave.decode_worker", "decode-0")
            with tracing.call(names.PREFILL, {"splitwave.handoff.id": "r/0/1"}):
                tracing.traceparent()
                tracing.event("asked", {"splitwave.prefill_worker": "prefill-0"})
            with tracing.call(names.DECODE) as span:
                tracing.traceparent()
                tracing.event(names.ACCEPTED, {"splitwave.decode_worker": "decode-0"})
                span.set_attribute("splitwave.handoff.bytes", 131072)
        trace.tell(FACTS)
        trace.event("first_token", 1.0)
        trace.ended(names.FINISHED)


def prefill(spans: PrefillSpans, traceparent: str) -> None:
    """What a prefill worker calls for one prompt whose KV is pulled."""
    asked = PrefillCall(
        request_id="r", handoff_id="r/0/1", token_ids=(), sampling=SAMPLING,
        keep_first_token=True, kv_layout="layout", traceparent=traceparent,
    )  # fmt: skip
    result = cast("asyncio.Future[PrefillResult]", None)
    call = Call(asked, cast(EngineRequest, None), Queued(0, 20, 1.0, 1.1), result)
    call.held_s, call.blocks = 1.2, 2
    spans.served(call, 1.2, None)
    spans.lease_ended(call, 1.3, "pulled", traceparent)


def decode(spans: DecodeSpans, traceparent: str) -> None:
    """What a decode worker calls for one attempt that ends well."""
    submit = Submit(
        attempt_id="r/0/1", request_id="r", grant_id="g", handoff=HANDOFF, token_ids=(), offset=1,
        sampling=SAMPLING, remaining_s=60.0, stall_max_s=30.0, traceparent=traceparent,
    )  # fmt: skip
    attempt = Attempt(
        submit=submit, session=cast(Session, None), engine_id="r/0/1#1", slot=0, accepted_s=1.0,
        offset=64, progress_s=3.0, handoff_bytes=131072, handoff_s=0.1, shown_s=1.2, shown=True,
    )  # fmt: skip
    spans.ended(attempt, "stop", 3.0)


SAMPLING = Sampling(max_tokens=64)


def us_per_request(traces: Tracing, service: str, traceparent: str) -> float:
    """Best CPU microseconds of one service's calls, the exporter's thread included."""
    prefill_spans = PrefillSpans(traces, "prefill-0", GROUP)
    decode_spans = DecodeSpans(traces, "decode-0", GROUP)
    calls: dict[str, Callable[[], None]] = {
        "router": lambda: router(traces, traceparent),
        "prefill": lambda: prefill(prefill_spans, traceparent),
        "decode": lambda: decode(decode_spans, traceparent),
    }
    call, best_s = calls[service], float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(REQUESTS):
            call()
        while traces.counts.taken < traces.counts.queued:
            time.sleep(0.01)
        best_s = min(best_s, time.process_time() - began_s)
    return round(best_s / REQUESTS * 1e6, 2)


def costs(directory: Path) -> dict[str, dict[str, float]]:
    """CPU of each service by what it does about traces."""
    made: dict[str, Callable[[str], SpanExporter]] = {
        "on_no_export": lambda _: Nothing(),
        "on_file": lambda service: FileExporter(directory / f"{service}.spans.jsonl"),
        "on_otlp_encoded": lambda _: Encoded(),
    }
    found: dict[str, dict[str, float]] = {}
    for service in ("router", "prefill", "decode"):
        found[service] = {
            "off": us_per_request(OFF, service, ""),
            "off_client_samples": us_per_request(OFF, service, SAMPLED),
        }
        for name, exporter in made.items():
            queue = SpanQueue(exporter(service), queue_max=20 * REQUESTS, delay_s=0.05)
            traces = traced(Origin(service=service), queue)
            found[service]["unsampled"] = us_per_request(traces, service, UNSAMPLED)
            found[service][name] = us_per_request(traces, service, SAMPLED)
            queue.shutdown()
            assert traces.counts.dropped == 0
    return found


def simulated(requests: int, directory: Path) -> dict[str, object]:
    """Serve requests on the simulator and check their traces."""
    write_vocabulary(directory)
    kept, tokenizer = Kept(), Tokenizer.load(directory)
    began_s = time.process_time()
    wanted = virtual_loop.run(many(tokenizer, kept, requests, 1))
    every = list(kept.spans())
    spans = of_requests(every)
    return {
        "requests": requests,
        "outcomes": dict(sorted(Counter(wanted.values()).items())),
        "traces": len({span.trace_id for span in spans}),
        "spans": len(spans),
        "wave_segments": len(every) - len(spans),
        "bytes_per_span": round(sum(map(len, kept.lines)) / len(every)),
        "spans_dropped": sum(traces.dropped for traces in kept.made),
        "faults": len(faults(every, wanted)),
        "broken_links": len(broken_links(every)),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = {
            **provenance("python -m bench.tracing", paths=PATHS, packages=PACKAGES),
            "rounds": ROUNDS,
            "requests_a_round": REQUESTS,
            "cpu_us_per_request": costs(Path(directory)),
            "simulated": simulated(arguments.requests, Path(directory)),
        }
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
