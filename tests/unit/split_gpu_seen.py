"""Spans of requests that ended well, and of waves, as a split stack's processes write them."""

from typing import Any  # attributes

from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_files import OK, UNSET, SpanEvent, SpanRecord
from splitwave.runtime.wave_spans import LINKS_DROPPED, WAVE_SEGMENT

PARENTS = {
    names.ATTEMPT: "POST", names.GRANT: names.ATTEMPT, names.PREFILL: names.ATTEMPT,
    names.DECODE: names.ATTEMPT, names.PREFILL_SERVE: names.PREFILL,
    names.PREFILL_QUEUE: names.PREFILL_SERVE, names.PREFILL_COMPUTE: names.PREFILL_SERVE,
    names.LEASE: names.PREFILL_SERVE, names.DECODE_SERVE: names.DECODE,
    names.HANDOFF: names.DECODE_SERVE, names.CONFIRM: names.DECODE_SERVE,
    names.TOKENS: names.DECODE_SERVE,
}  # fmt: skip
ROUTER_SPANS = 5


def spans_of(request: int, handoff_bytes: int) -> list[SpanRecord]:
    """A whole trace."""
    found = [
        _span(
            request, "POST", "", "router", status=OK,
            attributes={
                names.OUTCOME: names.FINISHED, names.REQUEST_ID: f"r{request}",
                names.ROUTER_SPANS: ROUTER_SPANS,
            },
        )
    ]  # fmt: skip
    said: dict[str, dict[str, Any]] = {
        names.PREFILL_SERVE: {"attributes": {"splitwave.held": True}},
        names.LEASE: {
            "attributes": {names.LEASE_END: "pulled"},
            "events": (SpanEvent(name="pulled", at_ns=2_000_000_000, attributes={}),),
        },
        names.DECODE: {
            "events": (SpanEvent(name=names.ACCEPTED, at_ns=2_000_000_000, attributes={}),)
        },
        names.DECODE_SERVE: {"attributes": {"splitwave.end": "length"}},
        names.HANDOFF: {"attributes": {"splitwave.handoff.bytes": handoff_bytes}},
    }
    for name, parent in PARENTS.items():
        service = names.BY_NAME[name].service
        found.append(_span(request, name, parent, service, **said.get(name, {})))
    return found


def wave(role: str, said: dict[str, int]) -> SpanRecord:
    """A segment of a group's wave that no request links to."""
    attributes: dict[str, object] = {"splitwave.group": f"{role}-0", LINKS_DROPPED: 0}
    attributes |= {f"splitwave.wave.{name}": count for name, count in said.items()}
    return _span(role, WAVE_SEGMENT, "", role, attributes=attributes)


def _span(trace: object, name: str, parent: str, service: str, **more: Any) -> SpanRecord:
    fields: dict[str, Any] = {
        "trace_id": f"t{trace}", "span_id": f"{trace}/{name}",
        "parent_id": f"{trace}/{parent}" if parent else "", "name": name,
        "service": f"splitwave-{service}", "began_ns": 1_000_000_000, "ended_ns": 3_000_000_000,
        "status": UNSET, "message": "", "attributes": {},
    }  # fmt: skip
    return SpanRecord(**fields | more)
