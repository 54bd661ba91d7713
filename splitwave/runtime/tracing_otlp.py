"""Spans as OTLP's JSON, which tools read: one `TracesData` a line.

Source: opentelemetry.io, "OpenTelemetry Protocol", JSON Protobuf encoding (ids in hex, 64-bit
numbers as text, enumerations as numbers) and "File Exporter" (JSON lines). The official encoders
of Python know the binary form only; a test holds this one to them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # JSON

import msgspec
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode

KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
STATUSES = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}

_REMOTE_KNOWN, _REMOTE = 0x100, 0x200


def line_of(spans: Sequence[ReadableSpan]) -> bytes:
    """A line with spans of one provider: they share resource and scope."""
    assert spans
    scope = spans[0].instrumentation_scope
    data = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(spans[0].resource.attributes)},
                "scopeSpans": [
                    {
                        "scope": {"name": scope.name if scope else ""},
                        "spans": [_span(span) for span in spans],
                    }
                ],
            }
        ]
    }
    return msgspec.json.encode(data) + b"\n"


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    made: dict[str, Any] = {
        **_ids(context),
        "name": span.name,
        "kind": KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "flags": _REMOTE_KNOWN,
        "status": {"code": STATUSES[span.status.status_code]},
    }
    if span.parent is not None:
        made["parentSpanId"] = f"{span.parent.span_id:016x}"
        if span.parent.is_remote:
            made["flags"] |= _REMOTE
    if span.status.description:
        made["status"]["message"] = span.status.description
    if span.attributes:
        made["attributes"] = _attributes(span.attributes)
    if span.events:
        made["events"] = [_event(event) for event in span.events]
    if span.links:
        made["links"] = [_link(link) for link in span.links]
    return made


def _ids(context: SpanContext) -> dict[str, str]:
    ids = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if context.trace_state:
        ids["traceState"] = context.trace_state.to_header()
    return ids


def _event(event: Event) -> dict[str, Any]:
    made: dict[str, Any] = {"name": event.name, "timeUnixNano": str(event.timestamp)}
    if event.attributes:
        made["attributes"] = _attributes(event.attributes)
    return made


def _link(link: Link) -> dict[str, Any]:
    made: dict[str, Any] = _ids(link.context)
    if link.attributes:
        made["attributes"] = _attributes(link.attributes)
    return made


def _attributes(attributes: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    assert isinstance(value, Iterable), f"no value of an attribute: {value!r}"
    return {"arrayValue": {"values": [_value(each) for each in value]}}
