"""A trace as a tree for people: a line a span, with its times and what it says. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from splitwave.runtime import tracing_names as names
from splitwave.runtime.tracing_files import ERROR, SpanRecord

_HIDDEN = frozenset(
    {
        "error.type",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.response.model",
        "splitwave.attempt_id",
        "splitwave.group",
        "splitwave.epoch",
        names.ROUTER_SPANS,
        names.REQUEST_ID,
    }
)
"""What a reader of the tree knows, or does not look for."""


def tree(spans: Sequence[SpanRecord]) -> Iterator[str]:
    """Lines for all spans of one trace, the earliest first among those of one parent."""
    by_id = {span.span_id: span for span in spans}
    below: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda span: (span.began_ns, span.ended_ns)):
        below.setdefault(span.parent_id if span.parent_id in by_id else "", []).append(span)
    zero_ns = min(span.began_ns for span in spans)
    began = datetime.fromtimestamp(zero_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")
    rows = [row for root in below[""] for row in _rows(root, below, "", "")]
    width = max(len(name) for name, _ in rows)
    yield f"trace {spans[0].trace_id}, {len(spans)} spans, began {began}"
    yield f"{'':{width}}  {'at ms':>10} {'took ms':>10}"
    for name, span in rows:
        at_ms, took_ms = (span.began_ns - zero_ns) / 1e6, (span.ended_ns - span.began_ns) / 1e6
        yield f"{name:{width}}  {at_ms:10.1f} {took_ms:10.1f}  {_facts(span, zero_ns)}".rstrip()


def wave_lines(waves: Iterable[SpanRecord]) -> Iterator[str]:
    """A line for each segment of a wave that the request's first or last step was in."""
    for wave in waves:
        said = {name.removeprefix("splitwave.wave."): x for name, x in wave.attributes.items()}
        yield (
            f"{wave.service.removeprefix('splitwave-')} wave {said.get('splitwave.wave')}"
            f".{said.get('segment_number')}: {said.get('why')} to {said.get('end')},"
            f" {(wave.ended_ns - wave.began_ns) / 1e6:.1f} ms, {said.get('steps')} steps,"
            f" {_percent(said.get('dummy_share'))} dummy, {len(wave.links)} requests,"
            f" trace {wave.trace_id}"
        )


def _percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, float | int) else "?"


def _rows(
    span: SpanRecord, below: dict[str, list[SpanRecord]], lead: str, branch: str
) -> Iterator[tuple[str, SpanRecord]]:
    service = span.service.removeprefix("splitwave-")
    yield f"{lead}{branch}{span.name.removeprefix('splitwave.')} ({service})", span
    lead += {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    children = below.get(span.span_id, [])
    for child in children:
        last = child is children[-1]
        yield from _rows(child, below, lead, "└─ " if last else "├─ ")


def _facts(span: SpanRecord, zero_ns: int) -> str:
    words = []
    if span.status == ERROR:
        words.append(f"ERROR {span.attributes.get('error.type')}")
        if span.message and span.message != span.attributes.get("error.type"):
            words.append(f"({span.message})")
    hidden = _HIDDEN if span.name == names.PREFILL else _HIDDEN | {"splitwave.handoff.id"}
    for name, value in span.attributes.items():
        if name not in hidden:
            words.append(f"{_short(name)}={_shown(value)}")
    for event in span.events:
        said = "".join(f" {_shown(value)}" for value in event.attributes.values())
        words.append(f"[{event.name}{said} at {(event.at_ns - zero_ns) / 1e6:.1f}]")
    return " ".join(words)


def _short(name: str) -> str:
    for prefix in ("splitwave.", "gen_ai.request.", "gen_ai.response.", "gen_ai.usage."):
        name = name.removeprefix(prefix)
    return name


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
