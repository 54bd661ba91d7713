"""Traces read back from the files of several processes, while those write on."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final  # Any: JSON

import msgspec

from splitwave.runtime.tracing_export import SUFFIX
from splitwave.runtime.tracing_names import REQUEST_ID

UNSET, OK, ERROR = "unset", "ok", "error"
_STATUSES: Final = (UNSET, OK, ERROR)
_VALUES: Final = {"stringValue": str, "boolValue": bool, "intValue": int, "doubleValue": float}


class BadTraceFile(Exception):
    """A line that is no OTLP JSON. The message names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A moment of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One span as it was exported. Times are Unix nanoseconds; 0: never."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root of a trace."""
    name: str
    service: str
    began_ns: int
    ended_ns: int
    status: str
    """unset, ok or error."""
    message: str
    attributes: Mapping[str, object]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[str, ...] = ()
    """Ids of spans, of this or another trace."""

    @property
    def is_request(self) -> bool:
        """True for the span of a whole request, which the router makes."""
        return self.service == "splitwave-router" and not self.name.startswith("splitwave.")


def read_spans(directory: Path, *, about: str = "") -> Iterator[SpanRecord]:
    """All spans in a directory's files, or those on lines that hold `about`.

    A last line without its end is still being written and is left out. Raises BadTraceFile,
    and OSError if the directory cannot be read.
    """
    wanted = msgspec.json.encode(about)[1:-1]
    for path in sorted(directory.iterdir()):
        if SUFFIX in path.name:
            # A writer may turn its file over between the look and the reading.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                yield from _spans_in(file, path, wanted)


def _spans_in(lines: Iterable[bytes], path: Path, wanted: bytes) -> Iterator[SpanRecord]:
    for number, line in enumerate(lines, 1):
        if wanted in line and line.endswith(b"\n"):
            try:
                yield from spans_of(line)
            except (ValueError, LookupError, TypeError) as error:
                message = f"{path}, line {number}: not a line of OTLP JSON ({error!r})"
                raise BadTraceFile(message) from error


def find_traces(directory: Path, wanted: str) -> dict[str, list[SpanRecord]]:
    """Spans by trace id, of the trace of that id or of every one that has a request of that id.

    Raises as `read_spans` does.
    """
    wanted = wanted.strip()
    if re.fullmatch("[0-9a-fA-F]{32}", wanted):
        wanted = wanted.lower()
    trace_ids = {
        span.trace_id
        for span in read_spans(directory, about=wanted)
        if wanted in (span.trace_id, span.attributes.get(REQUEST_ID))
    }
    return {
        trace_id: by_trace(read_spans(directory, about=trace_id)).get(trace_id, [])
        for trace_id in sorted(trace_ids)
    }


def by_trace(spans: Iterable[SpanRecord]) -> dict[str, list[SpanRecord]]:
    """Spans by trace id."""
    traces: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    return dict(traces)


def spans_of(line: bytes) -> Iterator[SpanRecord]:
    """The spans on one line. Raises ValueError, LookupError or TypeError if it is no such line."""
    for resource in msgspec.json.decode(line)["resourceSpans"]:
        service = str(_attributes(resource["resource"]).get("service.name", ""))
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield _span(span, service)


def _span(span: dict[str, Any], service: str) -> SpanRecord:
    status = span.get("status", {})
    return SpanRecord(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span["name"],
        service=service,
        began_ns=int(span.get("startTimeUnixNano", 0)),
        ended_ns=int(span.get("endTimeUnixNano", 0)),
        status=_STATUSES[status.get("code", 0)],
        message=status.get("message", ""),
        attributes=_attributes(span),
        events=tuple(
            SpanEvent(
                name=event["name"],
                at_ns=int(event["timeUnixNano"]),
                attributes=_attributes(event),
            )
            for event in span.get("events", ())
        ),
        links=tuple(link["spanId"] for link in span.get("links", ())),
    )


def _attributes(of: dict[str, Any]) -> dict[str, object]:
    return {each["key"]: _value(each["value"]) for each in of.get("attributes", ())}


def _value(value: dict[str, Any]) -> object:
    ((kind, given),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in given.get("values", ())]
    return _VALUES[kind](given)
