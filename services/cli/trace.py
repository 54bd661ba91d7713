"""`splitwave trace REQUEST_ID`: where the time of a request went, from the files of its trace."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.cli.trace_tree import tree, wave_lines
from splitwave.runtime.tracing_check import faults, missing, of_requests
from splitwave.runtime.tracing_files import (
    BadTraceFile,
    SpanRecord,
    by_trace,
    find_traces,
    read_spans,
)
from splitwave.runtime.wave_spans import WAVE_SEGMENT

DIR_DEFAULT = Path("traces")
_PREFIXES = ("chatcmpl-", "cmpl-")
"""What stands before the request's id in the answers of the HTTP API."""


class TraceFailed(Exception):
    """There is nothing to print. The message says why, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("id", nargs="?", help="id of a request (X-Request-Id), or of a trace")
    parser.add_argument(
        "--dir", type=Path, default=DIR_DEFAULT, metavar="DIR",
        help=f"where the services write their spans (--trace-dir of `up`); default: {DIR_DEFAULT}",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="say instead whether every trace in the directory is whole",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print; 1 if there is nothing to print, or a trace is not whole."""
    try:
        lines = _check(arguments.dir) if arguments.check else _trees(arguments.id, arguments.dir)
    except (TraceFailed, BadTraceFile) as error:
        print(f"splitwave trace: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        fix = "give the services' --trace-dir with --dir"
        print(f"splitwave trace: {arguments.dir}: {error.strerror}; {fix}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _trees(wanted: str | None, directory: Path) -> Sequence[str]:
    if not wanted:
        raise TraceFailed("say which request: its id, or the id of its trace")
    traces = find_traces(directory, wanted)
    for prefix in _PREFIXES:
        if not traces and wanted.startswith(prefix):
            traces = find_traces(directory, wanted.removeprefix(prefix))
    if not traces:
        raise TraceFailed(
            f"no span of {wanted!r} in {directory}: the request may not have been traced"
            " (--trace-dir, sampling), or it ended less than a second ago"
        )
    ordered = sorted(traces.values(), key=lambda spans: min(span.began_ns for span in spans))
    lines: list[str] = []
    for spans in ordered:
        lines += [*tree(spans), *wave_lines(_waves(directory, spans)), ""]
    return lines[:-1]


def _waves(directory: Path, spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """The wave segments that the request links to, as far as they are written."""
    wanted = [link for span in spans if span.is_request for link in span.links]
    return [
        span
        for link in dict.fromkeys(wanted)
        for span in read_spans(directory, about=link)
        if span.name == WAVE_SEGMENT and span.span_id == link
    ]


def _check(directory: Path) -> Sequence[str]:
    spans = list(read_spans(directory))
    traces = len(by_trace(of_requests(spans)))
    found = {
        "faults": faults(spans),
        "spans missing with all below them, since their worker was lost": missing(spans),
    }
    if any(found.values()):
        counts = ", ".join(f"{len(lines)} {what}" for what, lines in found.items() if lines)
        words = "\n".join(line for lines in found.values() for line in lines)
        raise TraceFailed(f"not whole: {counts}, in {traces} traces of {directory}:\n{words}")
    return [f"{traces} traces, {len(spans)} spans: all whole"]
