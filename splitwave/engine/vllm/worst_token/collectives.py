"""Sequence numbers of dispatches and combines: launched by the host, ended on the device.

Two ranks that hang are told apart by them: all waiting in the same collective (a peer's kernel or
link is stuck), or waiting in different ones (they have diverged).
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # a report is a message of plain values

KINDS = ("dispatch", "combine")
MICROBATCHES_MAX = 2


@dataclass(slots=True)
class Recorded:
    """Collectives of one captured graph, by (kind, microbatch)."""

    counts: dict[tuple[str, int], int] = field(default_factory=dict)


class CollectiveLog:
    """What one rank has launched, and what its host is doing. Safe to read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched: dict[tuple[str, int], int] = {}
        self._recording: Recorded | None = None
        self._graphs: dict[object, Recorded] = {}
        self.steps = 0
        """Steps that the host has launched."""
        self.replays = 0
        self.step_kind = "none"
        self.step_tokens = 0
        self.phase = "idle"
        """`idle`, `agree` (waiting for peers to agree on the step's shape), `launch` or `vote`."""
        self.phase_since_s = 0.0

    def begin_recording(self, graph: object) -> None:
        """Collectives launched until `end_recording` belong to this graph and do not run now."""
        with self._lock:
            self._recording = self._graphs[graph] = Recorded()

    def end_recording(self) -> None:
        """The graph is captured."""
        with self._lock:
            self._recording = None

    def launched(self, kind: str, microbatch: int = 0) -> None:
        """The host has enqueued a collective, or captured it."""
        key = (kind, microbatch)
        with self._lock:
            into = self._launched if self._recording is None else self._recording.counts
            into[key] = into.get(key, 0) + 1

    def align(self, ended: Mapping[tuple[str, int], int]) -> None:
        """All that was launched has ended: count on from the device's own numbers."""
        with self._lock:
            self._launched = dict(ended)

    def replayed(self, graph: object) -> None:
        """A captured graph is enqueued with all its collectives."""
        with self._lock:
            self.replays += 1
            recorded = self._graphs.get(graph)
            for key, count in ({} if recorded is None else recorded.counts).items():
                self._launched[key] = self._launched.get(key, 0) + count

    def step(self, kind: str, tokens: int) -> None:
        """A step is launched in this shape."""
        with self._lock:
            self.steps += 1
            self.step_kind = kind
            self.step_tokens = tokens

    def enter(self, phase: str, now_s: float) -> None:
        """The host goes on to another phase."""
        with self._lock:
            self.phase = phase
            self.phase_since_s = now_s

    def collectives_a_graph(self) -> dict[str, dict[str, int]]:
        """Collectives of each captured graph, by its name."""
        with self._lock:
            return {
                str(graph): {f"{kind}/{at}": n for (kind, at), n in recorded.counts.items()}
                for graph, recorded in self._graphs.items()
            }

    def report(self, ended: Mapping[tuple[str, int], int], now_s: float) -> dict[str, Any]:
        """Say where this rank stands; `ended` are the device's own counts."""
        with self._lock:
            launched = dict(self._launched)
            return {
                "steps": self.steps,
                "replays": self.replays,
                "step_kind": self.step_kind,
                "step_tokens": self.step_tokens,
                "phase": self.phase,
                "phase_s": round(now_s - self.phase_since_s, 3),
                "collectives": [
                    {
                        "kind": kind,
                        "microbatch": at,
                        "launched": launched.get((kind, at), 0),
                        "ended": ended.get((kind, at), 0),
                    }
                    for kind, at in sorted(launched, key=lambda key: (key[1], KINDS.index(key[0])))
                ],
            }


def position(report: Mapping[str, Any]) -> str:
    """Name the first collective that a rank has launched and not ended, or say that it has none."""
    stuck: list[tuple[int, int, str]] = []
    for one in report["collectives"]:
        if one["ended"] < one["launched"]:
            order = KINDS.index(one["kind"])
            name = f"{one['kind']} {one['ended'] + 1}"
            if one["microbatch"]:
                name += f" of microbatch {one['microbatch']}"
            stuck.append((one["ended"], order, name))
    if not stuck:
        return f"no collective (host phase: {report['phase']})"
    return min(stuck)[2]


def diagnose(reports: Mapping[int, Mapping[str, Any]], ranks: Iterable[int]) -> str:
    """Tell in one line whether the ranks are stuck in the same collective or have diverged.

    `reports` holds those that came; a rank without one has stopped running.
    """
    silent = [rank for rank in ranks if rank not in reports]
    places = {rank: position(report) for rank, report in sorted(reports.items())}
    listed = "; ".join(f"rank {rank}: {place}" for rank, place in places.items())
    if not places:
        return "no rank has reported"
    shapes = {(reports[rank]["step_kind"], reports[rank]["step_tokens"]) for rank in places}
    if len(set(places.values())) > 1:
        what = "ranks are in different collectives"
    elif len(shapes) > 1:
        what = "ranks are in the same collective of steps of different shapes"
    else:
        what = "all reporting ranks are in the same place"
    gone = f"; no report from rank {', '.join(map(str, silent))}" if silent else ""
    return f"{what}: {listed}{gone}"


def ended_counts(values: Sequence[int]) -> dict[tuple[str, int], int]:
    """Name the device's counters: for each microbatch its dispatches, then its combines."""
    return {
        (kind, at): int(values[at * len(KINDS) + order])
        for at in range(MICROBATCHES_MAX)
        for order, kind in enumerate(KINDS)
    }
