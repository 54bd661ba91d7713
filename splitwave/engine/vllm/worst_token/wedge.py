"""A rank that waits too long for its peers, or for a collective, says where it stands and ends.

Without it a hung group looks like a slow one: the host of each rank sits in a CUDA or gloo call
that returns after minutes or never. The end of the process is what the worker watches for.
"""

import contextlib
import functools
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
"""Given at most to the other ranks to report, before the first to notice says what all show."""

REPORTS = "wedge-rank-*.json"
WAITING_PHASES = ("agree", "vote")


class Latest:
    """The device's counts as they were when it last answered; a thread of its own asks.

    A call of the driver may block for as long as a kernel hangs, so whoever ends the rank makes
    none, and neither a blocked call nor a failed one keeps it from judging.
    """

    def __init__(self, read: Callable[[], list[int]]) -> None:
        """`read` is called here for the first time, so call this while the device still answers."""
        self._read = read
        self._counts = read()
        self.failure = ""
        """Why the device is asked no more; empty while it answers."""

    def counts(self) -> list[int]:
        """Return the last counts, at once."""
        return self._counts

    def run(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Ask on and on; return once the device fails, which its next user hears of."""
        while not self.failure:
            sleep(LOOK_S)
            try:
                self._counts = self._read()
            except Exception as error:  # noqa: BLE001  # whatever it is, the watch goes on
                self.failure = f"{type(error).__name__}: {error}"


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
        self._moved_s: float | None = None

    def look(self, now_s: float) -> dict[str, Any] | None:
        """Return this rank's report if it has waited for too long, else None."""
        ended = self._read_marks()
        if ended != self._seen or self._moved_s is None:
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

    def witness(self, now_s: float) -> dict[str, Any]:
        """Return where this rank stands, wedged or not."""
        return self._log.report(ended_counts(self._read_marks()), now_s)


def _name(rank: int) -> str:
    return f"wedge-rank-{rank}.json"


def write_report(directory: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Leave a rank's report where the worker and the other ranks find it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _name(rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, sort_keys=True))
    partial.replace(path)


def read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the reports that ranks have left, by rank; none if there is no such directory."""
    found = {}
    for path in sorted(directory.glob(REPORTS)):
        # One that is gone or no JSON tells nothing, and must not silence the others.
        with contextlib.suppress(OSError, ValueError):
            found[int(path.stem.rpartition("-")[2])] = json.loads(path.read_text())
    return found


def clear(directory: Path) -> None:
    """Remove what an earlier group left in its place."""
    for path in directory.glob(REPORTS):
        path.unlink(missing_ok=True)


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
    report = _wedged(watch, place, sleep)
    try:
        said = f"rank {place.rank}: {position(report)}; {json.dumps(report)}"
        # Straight to the log's end: the process has no time left for handlers.
        sys.stderr.write(f"splitwave: wedged: {said}\n")
        write_report(place.directory, place.rank, report)
        _gather(place, sleep)
        said = diagnose(read_reports(place.directory), range(place.ranks))
        sys.stderr.write(f"splitwave: wedged: {said}\n")
        sys.stderr.flush()
    finally:
        end(EXIT_CODE)  # A full disk costs the report, never the end.


def _wedged(watch: WedgeWatch, place: Place, sleep: Callable[[float], None]) -> dict[str, Any]:
    """Wait until this rank is wedged and return its report; bear witness if another one is."""
    (place.directory / _name(place.rank)).unlink(missing_ok=True)
    stale = _written(place.directory)
    witnessed = False
    while True:
        sleep(LOOK_S)
        now_s = time.monotonic()
        if (report := watch.look(now_s)) is not None:
            return report
        if not witnessed and _written(place.directory) - stale:
            # The group ends with the first rank that does: later is too late.
            witnessed = True
            with contextlib.suppress(OSError):
                write_report(place.directory, place.rank, watch.witness(now_s))


def _written(directory: Path) -> set[tuple[str, int]]:
    """Return the reports that are there, told from later ones of the same rank."""
    found = set()
    for path in directory.glob(REPORTS):
        with contextlib.suppress(OSError):
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _gather(place: Place, sleep: Callable[[float], None]) -> None:
    """Wait for the other ranks' reports, for a while."""
    for _ in range(int(GATHER_S / LOOK_S)):
        if len(read_reports(place.directory)) == place.ranks:
            return
        sleep(LOOK_S)


def start(watch: WedgeWatch, place: Place, latest: Latest) -> None:
    """Run the watch and what it reads in daemon threads."""
    for what, called in (("marks", latest.run), ("watch", functools.partial(run, watch, place))):
        threading.Thread(target=called, name=f"splitwave wedge {what}", daemon=True).start()
