"""Requests and the waves that they were in, followed both ways through a real stack's files."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from splitwave.core.errors import ServingError
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_check import broken_links, faults, of_requests
from splitwave.runtime.tracing_files import SpanRecord, by_trace, read_spans
from splitwave.runtime.wave_spans import WAVE_SEGMENT
from splitwave.wire.client import Ask, generate
from tests.e2e.adapter_cases import greedy, prompt
from tests.e2e.live_stack import LiveStack, running

REQUESTS = 500
LEAVES_EVERY = 10
AT_ONCE = 16
FINISHED, CANCELLED = names.FINISHED, "cancelled"


@dataclass(frozen=True, slots=True)
class Served:
    """What clients saw, and what the services told."""

    wanted: dict[str, str]
    spans: list[SpanRecord]


async def serve(stack: LiveStack, number: int, turns: asyncio.Semaphore) -> tuple[str, str]:
    """One request; every tenth client leaves in the middle of its stream."""
    name, leaves = f"r{number}", number % LEAVES_EVERY == 3
    ask = Ask(prompt=prompt(24, number), sampling=greedy(200 if leaves else 3), request_id=name)
    async with turns, stack.channel("grpc") as channel:
        answers = generate(channel, ask, 120.0)
        try:
            async for answer in answers:
                if leaves and answer.offset > 1:
                    await answers.aclose()
                    return name, CANCELLED
        except ServingError as error:
            return name, error.reason.value
    return name, FINISHED


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """All requests, served by groups of two ranks each, and the stack stopped in order."""
    traces = tmp_path_factory.mktemp("traces")

    async def all_of_them(stack: LiveStack) -> dict[str, str]:
        turns = asyncio.Semaphore(AT_ONCE)
        return dict(await asyncio.gather(*(serve(stack, i, turns) for i in range(REQUESTS))))

    flags = ("--trace-dir", str(traces), "--prefill-ranks", "2")
    with running(tiny_model, tmp_path_factory.mktemp("stack"), *flags) as stack:
        wanted = asyncio.run(all_of_them(stack))
    return Served(wanted, list(read_spans(traces)))


pytestmark = pytest.mark.timeout(600)


def test_500_requests_a_tenth_of_them_cancelled_leave_no_orphan(served: Served) -> None:
    outcomes = Counter(served.wanted.values())

    assert outcomes == {FINISHED: REQUESTS - REQUESTS // 10, CANCELLED: REQUESTS // 10}
    assert faults(served.spans, served.wanted) == []
    assert len(by_trace(of_requests(served.spans))) == REQUESTS


def test_every_link_between_a_request_and_a_wave_can_be_followed(served: Served) -> None:
    assert broken_links(served.spans) == []

    roots = [span for span in served.spans if span.is_request]
    assert [root for root in roots if root.status == "ok" and not root.links] == []


def test_a_request_s_waves_are_those_of_both_groups_and_did_its_steps(served: Served) -> None:
    waves = {span.span_id: span for span in served.spans if span.name == WAVE_SEGMENT}
    root = next(x for x in served.spans if x.is_request and x.status == "ok")
    mine = [waves[link] for link in root.links]
    trace = [span for span in served.spans if span.trace_id == root.trace_id]

    assert {wave.service for wave in mine} == {"splitwave-prefill", "splitwave-decode"}
    for wave in mine:
        steps = wave.attributes["splitwave.wave.steps"]
        assert isinstance(steps, int)
        assert steps > 0
        serve = next(x for x in trace if wave.span_id in x.links and x.service == wave.service)
        assert wave.began_ns <= serve.ended_ns
        assert serve.began_ns <= wave.ended_ns


def test_the_waves_of_a_group_are_each_there_once(served: Served) -> None:
    waves = [span for span in served.spans if span.name == WAVE_SEGMENT]
    keys = Counter(
        (x.service, x.attributes["splitwave.wave"], x.attributes["splitwave.wave.segment_number"])
        for x in waves
    )

    assert set(keys.values()) == {1}
    assert {x.service for x in waves} == {"splitwave-prefill", "splitwave-decode"}
