"""Every request has its whole trace, whatever became of it. Real gRPC and HTTP, simulated engines.

Three services write a file each, as three processes would; the traces are read back from those.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any  # fields of requests, right and wrong ones

import aiohttp
import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing import Origin, Tracing, traced
from splitwave.runtime.tracing_check import broken_links, faults, of_requests
from splitwave.runtime.tracing_export import FileExporter
from splitwave.runtime.tracing_files import SpanRecord, by_trace, find_traces, read_spans
from splitwave.runtime.tracing_queue import SpanQueue
from splitwave.runtime.wave_spans import LINKS_DROPPED, WAVE_SEGMENT
from splitwave.wire.client import Ask, generate
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually
from tests.unit.traced import Traces

SAMPLING = Sampling(max_tokens=8, temperature=0.0)
LONG = 3000
LIVE_MAX = 25
FINISHED, CANCELLED = names.FINISHED, Reason.CANCELLED.value
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@dataclass(slots=True)
class Files:
    """Three tracing services and the directory into which they write."""

    directory: Path
    traces: Traces
    services: list[Tracing] = field(default_factory=list)

    @classmethod
    def make(cls, directory: Path, *, ratio: float = 1.0) -> "Files":
        """Start three writers. Blocks, so call it before the loop runs."""
        made = {
            service: traced(
                Origin(service=service, instance="test", ratio=ratio),
                SpanQueue(FileExporter(directory / f"{service}.spans.jsonl"), delay_s=0.05),
            )
            for service in ("router", "prefill", "decode")
        }
        return cls(directory, Traces(**made), list(made.values()))

    async def spans(self, stack: RouterStack) -> list[SpanRecord]:
        """The spans of requests, of `all_spans`."""
        return of_requests(await self.all_spans(stack))

    async def all_spans(self, stack: RouterStack) -> list[SpanRecord]:
        """Stop everything once nothing is held, and read all that was written."""
        await stack.empty()
        stack.stop.set()
        await stack.exit_code
        for worker in (stack.workers.prefill, stack.workers.decode):
            worker.stop.set()
            await worker.task
        for service in self.services:
            await service.close(5.0)
        assert [each.counts.dropped for each in self.services] == [0, 0, 0]
        return await asyncio.to_thread(lambda: list(read_spans(self.directory)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.make(tmp_path / "traces")


@pytest.fixture
async def stack(model: Model, files: Files) -> AsyncIterator[RouterStack]:
    async with router_stack(model, traces=files.traces, live_max=LIVE_MAX) as started:
        yield started


# One client's ways. Each returns the outcome that its trace has to tell.


async def by_grpc(stack: RouterStack, request_id: str, **change: object) -> str:
    prompt = change.pop("prompt", f"{request_id} asks")
    sampling = replace(SAMPLING, **change)  # type: ignore[arg-type]  # named fields
    ask = Ask(prompt=prompt, sampling=sampling, request_id=request_id)  # type: ignore[arg-type]  # text or token ids
    try:
        async for _ in generate(stack.channel, ask, timeout_s=20.0):
            pass
    except ServingError as error:
        return error.reason.value
    return FINISHED


async def by_http(stack: RouterStack, request_id: str, **change: object) -> str:
    body = {"model": MODEL, "prompt": f"{request_id} asks", "max_tokens": 8, **change}
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
    data = body.pop("raw", None) or json.dumps(body)
    async with stack.http.post("/v1/completions", data=data, headers=headers) as response:
        text = await response.text()
        assert response.headers["X-Request-Id"] == request_id
    if response.status == 200:
        return FINISHED
    return str(json.loads(text)["error"]["code"])


async def leave_grpc(stack: RouterStack, request_id: str) -> str:
    sampling = replace(SAMPLING, max_tokens=LONG)
    ask = Ask(prompt="A long story", sampling=sampling, request_id=request_id)
    answers = generate(stack.channel, ask)
    async for answer in answers:
        if answer.offset > 3:
            break
    await answers.aclose()
    return CANCELLED


async def leave_http(stack: RouterStack, request_id: str) -> str:
    body = {"model": MODEL, "prompt": "A long story", "max_tokens": LONG, "stream": True}
    host, port = stack.http_address
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        headers = {"X-Request-Id": request_id}
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            for _ in range(5):
                await response.content.readuntil(b"\n\n")
            response.close()
    return CANCELLED


Change = Mapping[str, Any]
Way = Callable[..., Awaitable[str]]

FINISHING: list[tuple[Way, Change]] = [
    (by_http, {}),
    (by_grpc, {}),
    (by_http, {"stream": True}),
    (by_grpc, {"seed": 7, "temperature": 1.0}),
    (by_http, {"max_tokens": 1, "top_k": 5, "frequency_penalty": 0.5, "presence_penalty": 0.5}),
    (by_grpc, {"repetition_penalty": 1.2}),
    (by_http, {"n": 2}),
    (by_grpc, {"stop_token_ids": tuple(range(97, 110))}),
]
REFUSED: list[tuple[Way, Change]] = [
    (by_http, {"raw": "{"}),
    (by_grpc, {"prompt": ""}),
    (by_http, {"temperature": "hot"}),
    (by_grpc, {"top_p": 2.0}),
    (by_http, {"model": "another"}),
    (by_grpc, {"max_tokens": 5000}),
    (by_http, {"prompt": "x" * 5000}),
    (by_grpc, {"prompt": "x" * 5000}),
    (by_http, {"max_tokens": 0}),
]


async def ordinary(stack: RouterStack) -> dict[str, str]:
    """458 requests at their own pace: 400 that finish, 25 that leave, 33 that are refused."""
    wanted: dict[str, str] = {}
    at_once = asyncio.Semaphore(LIVE_MAX // 2)  # One with n = 2 counts twice.

    async def one(number: int) -> None:
        request_id = f"r{number}"
        async with at_once:
            if number < 400:
                call, change = FINISHING[number % len(FINISHING)]
                wanted[request_id] = await call(stack, request_id, **change)
                assert wanted[request_id] == FINISHED
            elif number < 425:
                leave = leave_grpc if number % 2 else leave_http
                wanted[request_id] = await leave(stack, request_id)
            else:
                call, change = REFUSED[number % len(REFUSED)]
                wanted[request_id] = await call(stack, request_id, **change)
                assert wanted[request_id] in ("invalid_request", "model_not_found")

    order = [(number * 137) % 458 for number in range(458)]  # Each once, mixed.
    await asyncio.gather(*(one(number) for number in order))
    return wanted


async def crowded(stack: RouterStack) -> dict[str, str]:
    """42 more: 25 fill the router, 17 are refused for that, and the 25 are cancelled."""
    await eventually(lambda: stack.door.admission.live == 0)
    sampling = replace(SAMPLING, max_tokens=LONG)
    asks = [Ask(prompt="Long", sampling=sampling, request_id=f"f{i}") for i in range(LIVE_MAX)]
    streams = [generate(stack.channel, ask) for ask in asks]
    await asyncio.gather(*(anext(stream) for stream in streams))
    wanted = {ask.request_id: CANCELLED for ask in asks}
    for i in range(17):
        call = by_grpc if i % 2 else by_http
        wanted[f"o{i}"] = await call(stack, f"o{i}")
        assert wanted[f"o{i}"] == Reason.OVERLOADED.value
    for stream in streams:
        await stream.aclose()
    return wanted


@pytest.mark.timeout(120)
async def test_500_requests_of_all_ends_have_500_whole_traces(
    stack: RouterStack, files: Files
) -> None:
    wanted = {**await ordinary(stack), **await crowded(stack)}
    spans = await files.all_spans(stack)

    assert Counter(wanted.values()) == {
        FINISHED: 400,
        CANCELLED: 50,
        "overloaded": 17,
        "invalid_request": 29,
        "model_not_found": 4,
    }
    assert faults(spans, wanted) == []
    assert broken_links(spans) == []
    check_waves(spans)
    spans = of_requests(spans)
    assert len(by_trace(spans)) == 500
    assert said(spans) == {kind.name: set(kind.says) - TEXTS for kind in names.SPANS}
    check_controls(spans)


def check_waves(spans: list[SpanRecord]) -> None:
    """See that requests that were served have waves, and that a lost one is found."""
    waves = [span for span in spans if span.name == WAVE_SEGMENT]
    served = [s for s in spans if s.is_request and s.attributes[names.OUTCOME] == FINISHED]
    assert all(span.links for span in served), "a request links to no wave"
    lost = next(x for x in waves if x.links and not x.attributes[LINKS_DROPPED])
    assert broken_links([span for span in spans if span is not lost])
    assert broken_links([replace(s, links=()) if s is lost else s for s in spans])
    assert broken_links([span for span in spans if span.span_id not in lost.links])


TEXTS = {"gen_ai.input.messages", "gen_ai.output.messages"}


def said(spans: list[SpanRecord]) -> dict[str, set[str]]:
    """Attributes by kind of span, those of failures apart: what the documentation has to list."""
    found: dict[str, set[str]] = {}
    for span in spans:
        name = names.REQUEST if span.is_request else span.name
        found.setdefault(name, set()).update(span.attributes.keys() - {"error.type"})
    return found


def check_controls(spans: list[SpanRecord]) -> None:
    """See that the check can fail: any span lost or unended, any outcome another."""
    whole = next(trace for trace in by_trace(spans).values() if len(trace) == len(names.SPANS))
    root = next(span for span in whole if span.is_request)
    request = {str(root.attributes[names.REQUEST_ID]): FINISHED}
    assert faults(whole, request) == []
    assert faults(whole, dict.fromkeys(request, CANCELLED))
    assert faults(whole, {**request, "nobody": FINISHED})
    for i, span in enumerate(whole):
        rest = [*whole[:i], *whole[i + 1 :]]
        assert faults(rest, request), f"{span.name} was lost"
        assert faults([*rest, replace(span, ended_ns=0)], request), f"{span.name} is unended"
        assert faults([*rest, replace(span, parent_id="b7ad6b7169203331")], request) or (
            span is root
        ), f"{span.name} is an orphan"


async def test_a_client_s_trace_goes_on_through_every_service(
    stack: RouterStack, files: Files
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "X-Request-Id": "mine"}
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    async with stack.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    spans = await files.spans(stack)

    assert {span.trace_id for span in spans} == {TRACE_ID}
    root = next(span for span in spans if span.is_request)
    assert (root.name, root.parent_id, root.status) == (
        "text_completion sim", "b7ad6b7169203331", "ok",
    )  # fmt: skip
    assert {span.name for span in spans} == {root.name, *names.BY_NAME} - {names.REQUEST}
    facts = root.attributes
    assert facts["gen_ai.usage.input_tokens"] == 5
    assert facts["gen_ai.usage.output_tokens"] == 4
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["splitwave.handoff.bytes"] == DECODE.block_bytes
    lease = next(span for span in spans if span.name == names.LEASE)
    decode = next(span for span in spans if span.name == names.DECODE)
    assert lease.attributes[names.LEASE_END] == "pulled"
    assert lease.links == (decode.span_id,), "the lease names whoever ended it"
    found = await asyncio.to_thread(find_traces, files.directory, "mine")
    assert [len(trace) for trace in found.values()] == [len(spans)]


async def test_a_client_that_does_not_sample_is_not_traced(
    stack: RouterStack, files: Files
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-00"}
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    async with stack.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    assert await files.spans(stack) == []


async def test_the_ratio_decides_over_requests_without_a_trace_only(
    model: Model, tmp_path: Path
) -> None:
    files = await asyncio.to_thread(lambda: Files.make(tmp_path / "traces", ratio=0.0))
    async with router_stack(model, traces=files.traces) as stack:
        headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        for extra in ({}, headers):
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
            async with stack.http.post("/v1/completions", json=body, headers=extra) as response:
                assert response.status == 200
        spans = await files.spans(stack)

    assert {span.trace_id for span in spans} == {TRACE_ID}
    assert faults(spans) == []


@pytest.mark.parametrize("shows_text", [False, True])
async def test_no_text_stands_in_a_span_unless_it_is_switched_on(
    model: Model, files: Files, shows_text: bool
) -> None:
    async with router_stack(model, traces=files.traces, trace_text=shows_text) as stack:
        await by_http(stack, "a", prompt="Zanzibar", stop=["Quagga"])
        await by_http(stack, "b", prompt="Zanzibar", temperature="Zanzibar")
        await by_http(stack, "c", model="Zanzibar" * 20, prompt="Zanzibar")
        await by_grpc(stack, "d", prompt="Zanzibar")
        spans = await files.spans(stack)

    told = [span for span in spans if "Zanzibar" in str(span) or "Quagga" in str(span)]
    named = [span for span in told if span.attributes.get(names.REQUEST_ID) == "c"]
    assert [span.attributes["error.type"] for span in named] == ["model_not_found"]
    assert len(told) - len(named) == (2 if shows_text else 0)


async def test_a_deadline_that_passes_ends_its_trace(stack: RouterStack, files: Files) -> None:
    sampling = replace(SAMPLING, max_tokens=LONG)
    ask = Ask(prompt="Long", sampling=sampling, request_id="late")
    with pytest.raises(ServingError):
        async for _ in generate(stack.channel, ask, timeout_s=0.3):
            pass
    spans = await files.spans(stack)

    assert faults(spans) == []
    root = next(span for span in spans if span.is_request)
    assert root.attributes[names.OUTCOME] in ("deadline_exceeded", "cancelled")
    assert root.attributes["error.type"] == root.attributes[names.OUTCOME]
