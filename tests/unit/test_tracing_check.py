"""The check of traces finds what it is for; tests/integration/test_traces.py has the real ones."""

from dataclasses import replace

import pytest

from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_check import faults, missing
from splitwave.runtime.tracing_files import SpanEvent, SpanRecord

ROUTER, PREFILL, DECODE = "splitwave-router", "splitwave-prefill", "splitwave-decode"


def span(name: str, span_id: str, parent_id: str, service: str, **facts: object) -> SpanRecord:
    return SpanRecord(
        trace_id="t",
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        service=service,
        began_ns=1_000_000_000,
        ended_ns=2_000_000_000,
        status="unset",
        message="",
        attributes=facts,
    )


def failed(whole: SpanRecord, error: str) -> SpanRecord:
    return replace(whole, status="error", attributes={**whole.attributes, "error.type": error})


def event(name: str) -> tuple[SpanEvent, ...]:
    return (SpanEvent(name=name, at_ns=1, attributes={names.DECODE_WORKER: "decode-0"}),)


def finished() -> dict[str, SpanRecord]:
    """The trace of a request that ended in prefill, by short names."""
    outcome = {names.REQUEST_ID: "r", names.OUTCOME: "finished", names.ROUTER_SPANS: 3}
    return {
        "root": replace(span("chat demo", "1", "client", ROUTER, **outcome), status="ok"),
        "attempt": span(names.ATTEMPT, "2", "1", ROUTER),
        "prefill": span(names.PREFILL, "3", "2", ROUTER),
        "serve": span(names.PREFILL_SERVE, "4", "3", PREFILL),
        "queue": span(names.PREFILL_QUEUE, "5", "4", PREFILL),
        "compute": span(names.PREFILL_COMPUTE, "6", "4", PREFILL),
    }


def found(trace: dict[str, SpanRecord], **wanted: str) -> str:
    return "\n".join(faults(trace.values(), wanted))


def test_a_whole_trace_has_no_fault() -> None:
    assert found(finished(), r="finished") == ""


@pytest.mark.parametrize("lost", finished())
def test_a_span_that_is_lost_is_found(lost: str) -> None:
    trace = finished()
    del trace[lost]

    assert found(trace, r="finished")


@pytest.mark.parametrize("unended", finished())
def test_a_span_without_an_end_is_found(unended: str) -> None:
    trace = finished()
    trace[unended] = replace(trace[unended], ended_ns=0)

    assert "it has no end" in found(trace)


CHANGES = [
    ("root", {"attributes": {names.REQUEST_ID: "r", names.ROUTER_SPANS: 3}}, "outcome is None"),
    ("root", {"status": "unset"}, "its outcome is 'finished' and its status unset"),
    ("root", {"status": "error"}, "its status is error and its error.type None"),
    ("serve", {"parent_id": "9"}, "its parent is not there"),
    ("queue", {"parent_id": "3"}, "its parent is splitwave.prefill where"),
    ("serve", {"began_ns": 900_000_000}, "it begins before its parent"),
    ("compute", {"span_id": "5"}, "2 spans have the id 5"),
    ("queue", {"name": "splitwave.prefill.sleep"}, "unknown from splitwave-prefill"),
    ("queue", {"service": ROUTER}, "unknown from splitwave-router"),
    ("serve", {"attributes": {"splitwave.held": True}}, "0 splitwave.prefill.lease below it"),
]


@pytest.mark.parametrize(("name", "change", "fault"), CHANGES, ids=lambda x: str(x)[:40])
def test_a_span_that_is_not_as_it_must_be_is_found(
    name: str, change: dict[str, object], fault: str
) -> None:
    trace = finished()
    trace[name] = replace(trace[name], **change)  # type: ignore[arg-type]  # its fields

    assert fault in found(trace)


def accepted() -> dict[str, SpanRecord]:
    """A decode attempt below a router's span, cancelled while its tokens came."""
    trace = finished()
    root = failed(trace["root"], "cancelled")
    told = {**root.attributes, names.OUTCOME: "cancelled", names.ROUTER_SPANS: 4}
    decode = span(names.DECODE, "7", "2", ROUTER)
    end = {"splitwave.end": "cancelled"}
    return {
        **trace,
        "root": replace(root, attributes=told),
        "attempt": failed(trace["attempt"], "cancelled"),
        "decode": replace(failed(decode, "cancelled"), events=event(names.ACCEPTED)),
        "work": failed(span(names.DECODE_SERVE, "8", "7", DECODE, **end), "cancelled"),
        "handoff": span(names.HANDOFF, "9", "8", DECODE),
        "confirm": span(names.CONFIRM, "10", "8", DECODE),
        "tokens": failed(span(names.TOKENS, "11", "8", DECODE), "cancelled"),
    }


def test_a_cancelled_attempt_is_whole_if_each_service_has_told_of_it() -> None:
    assert found(accepted(), r="cancelled") == ""


@pytest.mark.parametrize("lost", accepted())
def test_a_span_that_a_cancelled_attempt_lost_is_found(lost: str) -> None:
    trace = accepted()
    del trace[lost]

    assert found(trace, r="cancelled")


TAKEN = ("work", "handoff", "confirm", "tokens")
REACHED = [("accepted", "decode"), ("asked", "prefill")]


def bereft(reached: str = "accepted", of: str = "decode") -> dict[str, SpanRecord]:
    """A trace whose worker was killed with all that it had to tell."""
    trace = accepted()
    for name in TAKEN if of == "decode" else ("serve", "queue", "compute"):
        del trace[name]
    told = SpanEvent(name=reached, at_ns=1, attributes={f"splitwave.{of}_worker": "w0"})
    trace[of] = replace(failed(trace[of], "worker_lost"), events=(told,))
    return trace


@pytest.mark.parametrize(("reached", "of"), REACHED)
def test_what_a_lost_worker_took_along_is_missing_by_name_and_no_fault(
    reached: str, of: str
) -> None:
    trace = bereft(reached, of)
    lacks = missing(trace.values())

    assert found(trace) == ""
    assert lacks == [
        f"trace t: splitwave.{of}.serve of w0, and all below it, is missing: worker_lost after it"
        f" had {reached} (splitwave.{of}, {trace[of].span_id})"
    ]
    assert missing(accepted().values()) == []


def test_what_is_missing_for_another_reason_than_a_lost_worker_is_a_fault() -> None:
    trace = bereft()
    trace["decode"] = failed(trace["decode"], "stalled")

    assert missing(trace.values()) == []
    assert "0 splitwave.decode.serve below it" in found(trace)


def test_a_worker_that_refused_or_was_not_reached_has_nothing_to_tell() -> None:
    trace = bereft("asked", "prefill")
    refused = SpanEvent(name="refused", at_ns=2, attributes={"error.type": "worker_draining"})

    for events in ((), (*trace["prefill"].events, refused)):
        trace["prefill"] = replace(trace["prefill"], events=events)
        assert missing(trace.values()) == []


def test_a_request_that_has_no_trace_or_two_is_found() -> None:
    again = {name: replace(x, trace_id="u") for name, x in finished().items()}
    twice = [*finished().values(), *again.values()]

    assert "other: finished is wanted once, there is []" in found(finished(), other="finished")
    assert "r: finished is wanted once" in "\n".join(faults(twice, {"r": "finished"}))
