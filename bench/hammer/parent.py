"""Starts a process a rank, watches where each is, ends all of them, and writes the result."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from bench.hammer.beat import read_beat, read_end
from bench.hammer.settings import Settings
from bench.provenance import ROOT
from splitwave.certify.hammer.verdict import (
    EXIT_CODE,
    Limits,
    Position,
    RankEnd,
    Verdict,
    Watch,
    judge,
    same_place,
)
from splitwave.certify.hammer.walk import pair_minimum, plan, skew_figures

POLL_S = 0.1
GRACE_S = 3.0
"""How long the others may go on once a rank has failed: they may have something to say too."""
STACK_S = 1.0
"""How long a stuck rank gets to print its stacks."""
KILL_S = 20.0
"""How long a killed rank may take to be gone."""
LOG_LINES = 60

FOLDERS = re.compile(rf"{re.escape(str(ROOT))}/|/[^\"\s]*/(?:site-packages|python3\.\d+)/")

Process = subprocess.Popen[bytes]


class Ranks:
    """The ranks' processes, each in a session of its own so that its children end with it."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._processes: dict[int, Process] = {}
        self.ended: dict[int, tuple[int, float]] = {}
        """Exit code, and when it was seen, of each rank that ended by itself."""
        for rank in range(count):
            with self.log(rank).open("wb") as log:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "bench.hammer.rank", str(folder), str(rank)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip

    def log(self, rank: int) -> Path:
        """Return where a rank's output goes."""
        return self._folder / f"rank{rank}.log"

    def poll(self, now_s: float) -> None:
        """Note who has ended."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                self.ended.setdefault(rank, (code, now_s))

    def alive(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank in self._processes if rank not in self.ended]

    def broken(self) -> bool:
        """Say whether a rank has failed."""
        good = (EXIT_CODE[Verdict.PASSED], EXIT_CODE[Verdict.SHORT])
        return any(code not in good for code, _ in self.ended.values())

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[rank].pid, number)

    def stacks(self) -> None:
        """Have each rank that still runs print where its threads are."""
        if not self.alive():
            return
        for rank in self.alive():
            self._signal(rank, signal.SIGUSR1)
        time.sleep(STACK_S)

    def kill(self) -> list[int]:
        """Kill whatever is left; returns the ranks that would not go, which nobody can help."""
        for rank in self._processes:
            self._signal(rank, signal.SIGKILL)
        stuck = []
        end_s = time.monotonic() + KILL_S
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(rank)
        return stuck


def hammer(settings: Settings, folder: Path) -> tuple[Verdict, dict[str, object]]:
    """Run all ranks to their end; returns the verdict and the whole result."""
    settings.save(folder / "settings.json")
    limits = Limits(settings.setup_s, settings.stall_s, settings.seconds)
    began_s = time.monotonic()
    with killed_with_us():
        ranks = Ranks(folder, settings.ranks)
        stuck: list[int] = []
        try:
            overdue = attend(ranks, Watch(limits, began_s), folder, settings.ranks)
            positions = {rank: read_beat(folder, rank) for rank in range(settings.ranks)}
            ranks.stacks()
        finally:
            stuck = ranks.kill()
    verdict, found = result(settings, ends(folder, ranks, positions), overdue)
    return verdict, found | {
        "seconds": round(time.monotonic() - began_s, 2),
        "not_killed": stuck,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def attend(ranks: Ranks, watch: Watch, folder: Path, count: int) -> str:
    """Watch until all ranks have ended or one must be ended; returns why, if so."""
    broken_s: float | None = None
    while True:
        now_s = time.monotonic()
        for rank in range(count):
            watch.see(rank, read_beat(folder, rank), now_s)
        ranks.poll(now_s)
        if not ranks.alive():
            return ""
        if ranks.broken():
            broken_s = broken_s or now_s
            if now_s - broken_s > GRACE_S:
                return ""
        else:
            overdue = watch.overdue(now_s)
            if overdue:
                return overdue
        time.sleep(POLL_S)


@contextlib.contextmanager
def killed_with_us() -> Iterator[None]:
    """Turn a polite kill into an exception, so that no rank outlives this program."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    was = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in was.items():
            signal.signal(number, handler)


def ends(folder: Path, ranks: Ranks, positions: dict[int, Position]) -> list[RankEnd]:
    """Return how each rank ended, with what it left behind."""
    found = []
    for rank, position in positions.items():
        code, ended_s = ranks.ended.get(rank, (None, 0.0))
        said = read_end(folder, rank)
        log = [] if code == 0 else tail(ranks.log(rank))
        found.append(RankEnd(rank, code, position, ended_s, said, log))
    return found


def result(
    settings: Settings, ends: list[RankEnd], overdue: str
) -> tuple[Verdict, dict[str, object]]:
    """Return the verdict, and what stands beside it."""
    verdict, why = judge(ends, overdue)
    replays = min(end.position.finished for end in ends)
    walked = plan(settings.walk())[:replays]
    found: dict[str, object] = {
        "verdict": verdict,
        "why": why,
        "replays": replays,
        "pair_min": pair_minimum(walked, settings.sizes),
        "skews": skew_figures(walked),
        "where": "" if verdict is Verdict.PASSED else same_place([end.position for end in ends]),
        "ranks": [dataclasses.asdict(end) for end in ends],
    }
    return verdict, found


def tail(path: Path) -> list[str]:
    """Return the end of a log, without this machine's folders."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
    return [FOLDERS.sub("", line) for line in lines]
