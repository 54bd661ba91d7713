"""Figures of one cell, from what its clients saw."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # numpy's arrays of any type

import numpy as np

from bench.split.client import Status
from bench.split.settings import Load, Slo, Times

Column = np.ndarray[Any, np.dtype[Any]]
QUANTILES = (50, 90, 99)
DROPPED_MAX = 200
"""Requests that are named one by one."""
NO_TIME = float("inf")


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests of all clients, by number. Times are seconds since the cell began."""

    columns: Mapping[str, Column]
    events_s: Sequence[Column]
    client_cores: tuple[float, ...]
    """How much of a core each client used."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Seen":
        """Read what the clients have written."""
        columns: dict[str, list[Column]] = {}
        events: list[Column] = []
        cores = []
        for path in paths:
            with np.load(path) as told:
                for name in told.files:
                    columns.setdefault(name, []).append(told[name])
                events += np.split(told["events_s"], np.cumsum(told["events"])[:-1])
                if not len(told["events"]):
                    events.pop()
                cores.append(float(told["used_s"][0] / told["used_s"][1]))
        whole = {name: np.concatenate(parts) for name, parts in columns.items()}
        order = np.argsort(whole["number"], kind="stable")
        kept = {n: c[order] for n, c in whole.items() if n not in ("events_s", "used_s", "events")}
        return cls(kept, [events[place] for place in order], tuple(cores))

    def __len__(self) -> int:
        return len(self.events_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """What requests had, one entry a measured request; a request that had no such time has an
    endless one, so that it keeps no limit."""

    ttft_ms: Column
    gaps_ms: Sequence[Column]
    itl_p99_ms: Column
    tpot_ms: Column
    total_ms: Column
    good: Column

    @classmethod
    def of(cls, seen: Seen, chosen: Sequence[int], slo: Slo) -> "Figures":
        """Of the chosen requests."""
        columns = {name: column[list(chosen)] for name, column in seen.columns.items()}
        events = [seen.events_s[place] for place in chosen]
        due, done = columns["due_s"], columns["status"] == Status.DONE
        gaps = [np.diff(each) * 1e3 for each in events]
        ttft = np.array(
            [(each[0] - at_s) * 1e3 if len(each) else NO_TIME
             for each, at_s in zip(events, due, strict=True)]
        )  # fmt: skip
        itl = np.array([float(np.percentile(each, 99)) if len(each) else 0.0 for each in gaps])
        spans = np.array([each[-1] - each[0] if len(each) else NO_TIME for each in events])
        tpot = spans * 1e3 / np.maximum(1, columns["tokens"] - 1)
        total = np.where(done, (columns["ended_s"] - due) * 1e3, NO_TIME)
        kept = (ttft <= slo.ttft_ms) & (itl <= slo.itl_p99_ms) & (tpot <= slo.tpot_ms)
        return cls(ttft, gaps, itl, tpot, total, done & kept)


def of_cell(seen: Seen, load: Load, times: Times, slo: Slo) -> dict[str, object]:
    """All figures of a cell. Only requests that were due in the measured time count."""
    begin_s, end_s = times.warm_s, times.warm_s + times.measure_s
    due = seen.columns["due_s"]
    chosen = [int(place) for place in np.flatnonzero((due >= begin_s) & (due < end_s))]
    made = Figures.of(seen, chosen, slo)
    done = [place for place in chosen if seen.columns["status"][place] == Status.DONE]
    done_places = np.isin(chosen, done)
    inside = _inside(seen.events_s, begin_s, end_s)
    events = sum(len(seen.events_s[place]) for place in done)
    tokens = int(seen.columns["tokens"][done].sum()) if done else 0
    late = (seen.columns["sent_s"] - due)[chosen] * 1e3
    ended = seen.columns["ended_s"][seen.columns["status"] == Status.DONE]
    return {
        "requests": len(chosen),
        "done": len(done),
        "offered_per_s": load.value if load.kind == "poisson" else None,
        "sent_per_s": round(len(chosen) / times.measure_s, 3),
        "ended_per_s": round(float(((ended >= begin_s) & (ended < end_s)).sum())
                             / times.measure_s, 3),
        "tokens_per_s": round(inside * (tokens / events if events else 1.0) / times.measure_s, 1),
        "tokens_per_event": round(tokens / events, 3) if events else None,
        "ttft_ms": quantiles(made.ttft_ms[done_places]),
        "itl_ms": quantiles(_joined([made.gaps_ms[i] for i in np.flatnonzero(done_places)])),
        "itl_p99_of_requests_ms": quantiles(made.itl_p99_ms[done_places]),
        "tpot_ms": quantiles(made.tpot_ms[done_places]),
        "total_ms": quantiles(made.total_ms[done_places]),
        "good": int(made.good.sum()),
        "good_share": round(float(made.good.mean()), 4) if chosen else None,
        "goodput_per_s": round(float(made.good.sum()) / times.measure_s, 3),
        "kept_ttft_share": _share(made.ttft_ms <= slo.ttft_ms),
        "kept_itl_share": _share((made.itl_p99_ms <= slo.itl_p99_ms) & done_places),
        "late_ms": quantiles(late),
        "client_cores_max": round(max(seen.client_cores, default=0.0), 3),
        **_dropped(seen, chosen),
    }  # fmt: skip


def rows(seen: Seen, times: Times) -> dict[str, object]:
    """One row a request, those that are not measured too, for whoever wants other figures."""
    columns = seen.columns
    gaps = [np.diff(each) * 1e3 for each in seen.events_s]
    return {
        "columns": ["number", "due_s", "sent_s", "first_s", "last_s", "ended_s", "tokens", "status",
                    "measured", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"],
        "rows": [
            [
                int(columns["number"][i]),
                *(round(float(columns[name][i]), 5) for name in ("due_s", "sent_s")),
                *((round(float(events[0]), 5), round(float(events[-1]), 5)) if len(events)
                  else (None, None)),
                round(float(columns["ended_s"][i]), 5),
                int(columns["tokens"][i]),
                Status(int(columns["status"][i])).name.lower(),
                bool(times.warm_s <= columns["due_s"][i] < times.warm_s + times.measure_s),
                *([round(float(x), 3) for x in (*np.percentile(gaps[i], (50, 99)), gaps[i].max())]
                  if len(gaps[i]) else [None] * 3),
            ]
            for i, events in enumerate(seen.events_s)
        ],
    }  # fmt: skip


def quantiles(values: Column) -> dict[str, float] | None:
    """Some quantiles; None of nothing."""
    if not len(values):
        return None
    cuts = np.percentile(values, QUANTILES)
    return {f"p{at}": round(float(cut), 3) for at, cut in zip(QUANTILES, cuts, strict=True)}


def _inside(events_s: Sequence[Column], begin_s: float, end_s: float) -> int:
    return sum(int(((each >= begin_s) & (each < end_s)).sum()) for each in events_s)


def _joined(parts: Sequence[Column]) -> Column:
    return np.concatenate(parts) if parts else np.zeros(0)


def _share(kept: Column) -> float | None:
    return round(float(kept.mean()), 4) if len(kept) else None


def _dropped(seen: Seen, chosen: Sequence[int]) -> dict[str, object]:
    """Measured requests that were not served, and why: the first by number, and counts of all."""
    found = []
    for place in chosen:
        status = Status(int(seen.columns["status"][place]))
        if status is not Status.DONE:
            why = str(seen.columns["reason"][place]) or "not over when the cell's time was"
            found.append((int(seen.columns["number"][place]), status, why))
    return {
        "failed": sum(status is Status.FAILED for _, status, _ in found),
        "unfinished": sum(status is Status.UNFINISHED for _, status, _ in found),
        "dropped_why": dict(Counter(why for _, _, why in found).most_common(10)),
        "dropped": [number for number, *_ in found[:DROPPED_MAX]],
    }
