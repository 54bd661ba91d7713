"""A decode worker's process is killed under load: its clients are told within two seconds."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_check import faults, missing
from splitwave.runtime.tracing_files import ERROR, read_spans
from splitwave.wire.client import Ask, generate
from tests.e2e.live_stack import LiveStack, running

pytestmark = pytest.mark.timeout(120)

TOLD_WITHIN_S = 2.0
BACK_WITHIN_S = 30.0
STREAMS = 8
FLAGS = ("--engine", "sim", "--decode-setting", "step_fixed_s=0.02")
ENDLESS = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)


def listener(stack: LiveStack, name: str) -> psutil.Process:
    """The process that listens on a program's port."""
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            if stack.ports[name] in ports:
                return process
    raise AssertionError(f"nobody listens for {name}")


async def stream(stack: LiveStack, number: int, begun: list[int]) -> tuple[float, Reason | None]:
    """When a stream ended, and why."""
    ask = Ask(prompt=[65 + number] * 20, sampling=ENDLESS)
    async with stack.channel("grpc") as channel:
        try:
            async for answer in generate(channel, ask, 60.0):
                if answer.offset > 3 and number not in begun:
                    begun.append(number)
        except ServingError as error:
            return time.monotonic(), error.reason
    return time.monotonic(), None


async def until(true: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110  # nothing says so
            await asyncio.sleep(0.01)


async def served_again(stack: LiveStack) -> bool:
    """True once a request is served to its end."""
    ask = Ask(prompt=[65] * 20, sampling=Sampling(max_tokens=3, temperature=0.0))
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < deadline_s:
        async with stack.channel("grpc") as channel:
            with contextlib.suppress(ServingError):
                async for _ in generate(channel, ask, 10.0):
                    pass
                return True
        await asyncio.sleep(0.1)
    return False


def check_traces(directory: Path) -> None:
    """See that each stream's trace says whose spans it lacks, and what its handoff had cost."""
    spans = list(read_spans(directory))
    assert faults(spans) == []
    lacks = missing(spans)
    assert len(lacks) == STREAMS
    assert all("splitwave.decode.serve of decode-0" in lack for lack in lacks), lacks
    lost = [span for span in spans if span.name == names.DECODE and span.status == ERROR]
    streams = {span.trace_id for span in lost}
    assert len(streams) == STREAMS
    for span in [*lost, *(span for span in spans if span.is_request and span.trace_id in streams)]:
        assert span.attributes["splitwave.handoff.bytes"], "it was pulled before the worker died"


def test_streams_of_a_killed_worker_end_by_name_within_two_seconds(tmp_path: Path) -> None:
    model, traces = tmp_path / "tiny", tmp_path / "traces"
    build(model, DemoModelOptions(variant=Variant.TINY))

    async def scenario(stack: LiveStack) -> None:
        begun: list[int] = []
        streams = [asyncio.create_task(stream(stack, i, begun)) for i in range(STREAMS)]
        await until(lambda: len(begun) == STREAMS, 30.0)

        listener(stack, "decode").kill()
        killed_s = time.monotonic()

        for ended_s, reason in await asyncio.gather(*streams):
            assert reason is Reason.POOL_UNAVAILABLE
            assert ended_s - killed_s <= TOLD_WITHIN_S
        assert await served_again(stack)

    with running(model, tmp_path / "run", *FLAGS, "--trace-dir", str(traces)) as stack:
        asyncio.run(scenario(stack))
    check_traces(traces)
