"""A rank that waits too long for its peers, or for a collective, says where it stands and ends.

Without it a hung group looks like a slow one: the host of each rank sits in a CUDA or gloo call
that returns after minutes or never. The end of the process is what the worker watches for.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # a report is a message of plain values

from splitwave.engine.vllm.worst_token.collectives import (
    CollectiveLog,
    diagnose,
    ended_counts,
    position,
)

EXIT_CODE = 71
LOOK_S = 0.5
GATHER_S = 2.0
"""Given to the other ranks to report, before the first to notice says what it sees of all."""

WAITING_PHASES = ("agree", "vote")


class WedgeWatch:
    """Looks at one rank's log from a thread of its own. Times in seconds."""

    def __init__(
        self,
        log: CollectiveLog,
        read_marks: Callable[[], list[int]],
        *,
        timeout_s: float,
        counts: bool = True,
    ) -> None:
        """`counts` is False where the device counts nothing, so only phases are watched."""
        self._log = log
        self._read_marks = read_marks
        self._timeout_s = timeout_s
        self._counts = counts
        self._seen: list[int] = []
        self._moved_s = 0.0

    def look(self, now_s: float) -> dict[str, Any] | None:
        """Return this rank's report if it has waited for too long, else None."""
        ended = self._read_marks()
        if ended != self._seen or not self._moved_s:
            self._seen, self._moved_s = ended, now_s
        report = self._log.report(ended_counts(ended), now_s)
        waits = report["phase"] in WAITING_PHASES and report["phase_s"] >= self._timeout_s
        pending = self._counts and any(
            one["ended"] < one["launched"] for one in report["collectives"]
        )
        if not pending:
            self._moved_s = now_s
        stuck = pending and now_s - self._moved_s >= self._timeout_s
        return report if waits or stuck else None


def write_report(directory: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Leave a rank's report where the worker and the other ranks find it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"wedge-rank-{rank}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, sort_keys=True))
    partial.replace(path)


def read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the reports that ranks have left, by rank; none if there is no such directory."""
    found = {}
    for path in sorted(directory.glob("wedge-rank-*.json")):
        found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank watches itself, and where the ranks of its group leave their reports."""

    rank: int
    ranks: int
    directory: Path


def run(
    watch: WedgeWatch,
    place: Place,
    *,
    end: Callable[[int], None] = os._exit,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look until the rank is wedged; then report, say what all ranks' reports show, and end."""
    for stale in place.directory.glob(f"wedge-rank-{place.rank}.json"):
        stale.unlink()
    while True:
        sleep(LOOK_S)
        if (report := watch.look(time.monotonic())) is not None:
            break
    write_report(place.directory, place.rank, report)
    sleep(GATHER_S)
    for line in (
        f"rank {place.rank}: {position(report)}; {json.dumps(report)}",
        diagnose(read_reports(place.directory), range(place.ranks)),
    ):
        # Straight to the log's end: the process has no time left for handlers.
        sys.stderr.write(f"splitwave: wedged: {line}\n")
    sys.stderr.flush()
    end(EXIT_CODE)


def start(watch: WedgeWatch, place: Place) -> threading.Thread:
    """Run the watch in a daemon thread."""
    thread = threading.Thread(
        target=run, args=(watch, place), name="splitwave wedge watch", daemon=True
    )
    thread.start()
    return thread
