"""What the router tells of a request: its root, its steps, and what goes along to the workers."""

import asyncio
import contextlib
import logging

import pytest

from services.router import tracing
from services.router.attempts import Call, Trail
from services.router.generate import generate
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Request, Sampling
from splitwave.runtime import tracing_names as names
from splitwave.runtime.logs import HumanLines, JsonLines
from splitwave.runtime.tracing import OFF, Tracing
from splitwave.runtime.tracing_files import SpanRecord
from tests.fakes import FakeDecode, FakeFleet, FakePrefill, FakeSink, now_s
from tests.unit.traced import Kept

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
WAVES = tuple(f"00-{TRACE_ID}-{i:016x}-01" for i in (1, 2, 3))
CLIENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


def origin(headers: dict[str, str] | None = None) -> tracing.Origin:
    return tracing.Origin("demo", "r", CLIENT if headers is None else headers)


async def serve(
    traces: Tracing,
    decode_ends: list[tuple[int, ServingError]],
    sampling: Sampling,
    decode: FakeDecode | None = None,
) -> FakeDecode:
    decode = decode or FakeDecode("d0", FakePrefill())
    prefill = decode.prefill
    decode.ends = decode_ends
    call = Call(
        request=Request("r", (1, 2, 3), sampling),
        key="r#1",
        deadline=Deadline(now_s() + 60),
        stall_max_s=60,
    )
    with tracing.request(traces, tracing.GRPC, origin()):
        await generate(call, FakeFleet(prefill, decode), FakeSink(), Trail())
    return decode


GREEDY = Sampling(max_tokens=4, temperature=0.0)


def named(kept: Kept, name: str) -> list[SpanRecord]:
    return [span for span in kept.spans() if span.name == name]


def root_of(kept: Kept) -> SpanRecord:
    (root,) = [span for span in kept.spans() if span.is_request]
    return root


async def test_the_steps_of_an_attempt_stand_below_it_and_it_below_the_request() -> None:
    kept = Kept()

    decode = await serve(kept.traces().router, [], GREEDY)

    root, (attempt,) = root_of(kept), named(kept, names.ATTEMPT)
    assert (root.name, root.trace_id, root.parent_id) == (
        "text_completion demo", TRACE_ID, "b7ad6b7169203331",
    )  # fmt: skip
    assert attempt.parent_id == root.span_id
    steps = [span for span in kept.spans() if span.parent_id == attempt.span_id]
    assert [span.name for span in steps] == [names.GRANT, names.PREFILL, names.DECODE]
    (accepted,) = steps[-1].events
    assert (accepted.name, accepted.attributes) == ("accepted", {"splitwave.decode_worker": "d0"})
    assert decode.submits[0].traceparent == f"00-{TRACE_ID}-{steps[-1].span_id}-01"
    assert root.attributes[names.ROUTER_SPANS] == 5


async def test_a_request_and_its_steps_link_to_the_waves_that_they_were_in() -> None:
    kept, prefill = Kept(), FakePrefill()
    decode = FakeDecode("d0", prefill)
    prefill.waves, decode.waves = (WAVES[0],), WAVES[1:]

    await serve(kept.traces().router, [], GREEDY, decode)

    ids = [wave[36:52] for wave in WAVES]
    (step,), (call,) = named(kept, names.PREFILL), named(kept, names.DECODE)
    assert (list(step.links), list(call.links)) == (ids[:1], ids[1:])
    assert list(root_of(kept).links) == ids


async def test_a_second_attempt_is_a_span_of_its_own_that_says_where_it_goes_on() -> None:
    kept = Kept()

    lost = ServingError(Reason.PREEMPTED, "no blocks")
    await serve(kept.traces().router, [(1, lost)], GREEDY)

    first, second = named(kept, names.ATTEMPT)
    assert (first.status, first.attributes["error.type"]) == ("error", "preempted")
    assert second.status == "unset"
    calls = named(kept, names.DECODE)
    assert [x.attributes["splitwave.handoff.bytes"] for x in calls] == [4, 6], "pulled, then failed"
    numbers = [x.attributes["splitwave.attempt"] for x in (first, second)]
    offsets = [x.attributes["splitwave.offset"] for x in (first, second)]
    assert (numbers, offsets) == ([1, 2], [0, 2])


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (None, "finished", ""),
        (ServingError(Reason.OVERLOADED, "full"), "overloaded", "full"),
        (asyncio.CancelledError(), "cancelled", "the client left, or the time was over"),
        (ConnectionResetError(), "cancelled", "the client left, or the time was over"),
        (ZeroDivisionError("secret"), "internal", "ZeroDivisionError"),
    ],
)
async def test_whatever_way_a_request_ends_its_root_says_so(
    error: BaseException | None, outcome: str, message: str
) -> None:
    kept = Kept()

    with (
        contextlib.suppress(BaseException),
        tracing.request(kept.traces().router, tracing.GRPC, origin()),
    ):
        if error is not None:
            raise error

    root = root_of(kept)
    assert root.attributes[names.OUTCOME] == outcome
    assert root.status == ("error" if error else "ok")
    assert root.attributes.get("error.type") == (outcome if error else None)
    assert root.message == message


async def test_a_request_within_another_is_that_one_and_its_first_failure_stands() -> None:
    kept = Kept()

    with tracing.request(kept.traces().router, tracing.GRPC, origin()) as outer:
        with tracing.request(kept.traces().router, tracing.UNNAMED, origin({})) as inner:
            inner.ended(names.FINISHED)
            inner.ended("stalled", "no token")
            inner.ended("cancelled")
        assert inner is outer

    assert root_of(kept).attributes[names.OUTCOME] == "stalled"


async def test_a_request_that_is_not_sampled_leaves_no_span_and_passes_that_on() -> None:
    kept = Kept()
    unsampled = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-00"}

    with (
        tracing.request(kept.traces().router, tracing.GRPC, origin(unsampled)),
        tracing.span(names.ATTEMPT),
    ):
        assert tracing.traceparent().startswith(f"00-{TRACE_ID}-")
        assert tracing.traceparent().endswith("-00")

    assert kept.lines == []


async def test_without_tracing_the_client_s_context_is_passed_on_and_nothing_fails() -> None:
    decode = await serve(OFF, [], GREEDY)

    assert decode.submits[0].traceparent == CLIENT["traceparent"]


async def test_lines_about_a_request_carry_its_ids() -> None:
    log = logging.getLogger("services.test")
    with tracing.request(OFF, tracing.GRPC, origin()):
        record = log.makeRecord("services.test", logging.INFO, "f", 1, "hello", (), None)
        human, machine = HumanLines("router").format(record), JsonLines("router").format(record)

    assert human.endswith(f"INFO router: hello trace_id={TRACE_ID} request_id=r")
    assert f'"trace_id": "{TRACE_ID}", "request_id": "r"' in machine
    assert "trace_id" not in HumanLines("router").format(record), "the request is over"
