"""Many seeds of the wave simulation over several processes, with what they amount to as JSON.

    python -m bench.wave_sim --seeds 1000000 --processes 2 --minutes 7 > bench/results/wave_sim.json

It stops at the first seed that breaks an invariant and says how to replay it.
"""

import argparse
import json
import os
import sys
import time

from bench.provenance import provenance
from tests.sim.wave.coverage import REACHABLE, rows
from tests.sim.wave.runner import Tally, run_in_processes

SAY_EVERY_S = 30.0


def main() -> int:
    """Run, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    args = parser.parse_args()
    began_s = said_s = time.monotonic()
    tally = Tally()
    for tally in run_in_processes(range(args.first, args.first + args.seeds), args.processes):
        now_s = time.monotonic()
        if tally.failures or now_s - began_s > 60 * args.minutes:
            break
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            left_s = (now_s - began_s) * (args.seeds / tally.schedules - 1)
            sys.stderr.write(f"{tally.schedules} of {args.seeds} seeds, {left_s:.0f} s left\n")
    report = provenance(
        "python -m bench.wave_sim " + " ".join(sys.argv[1:]),
        paths=["splitwave/core", "tests/sim/wave", "bench/wave_sim.py"],
        packages=[],
    ) | figures(tally, time.monotonic() - began_s, args.processes)
    print(json.dumps(report, indent=1))
    for failure in tally.failures:
        sys.stderr.write(f"{failure}\n")
    return 1 if tally.failures else 0


def figures(tally: Tally, wall_s: float, processes: int) -> dict[str, object]:
    """What is worth keeping of a run."""
    hits = {triple: count for triple, count in rows(tally.coverage) if triple in REACHABLE}
    scarcest = min(hits, key=lambda triple: hits[triple])
    seeds_per_s = tally.schedules / wall_s
    return {
        "seeds": tally.schedules,
        "broken": [str(failure) for failure in tally.failures],
        "processes": processes,
        "wall_s": round(wall_s, 1),
        "seeds_per_s": round(seeds_per_s, 1),
        "cpu_ms_per_seed": round(tally.cpu_s / max(1, tally.schedules) * 1e3, 2),
        "cpu_hours_for_a_million_seeds": round(
            tally.cpu_s / max(1, tally.schedules) * 1e6 / 3600, 2
        ),
        "events": tally.events,
        "events_per_seed": round(tally.events / max(1, tally.schedules), 1),
        "events_per_seed_min": tally.events_min,
        "fault_kinds_per_seed_min": tally.fault_kinds_min,
        "steps": tally.steps,
        "starts": tally.starts,
        "requests": tally.requests,
        "triples": len(hits),
        "triple_hits_min": hits[scarcest],
        "scarcest_triple": " ".join(part.name for part in scarcest),
    }


if __name__ == "__main__":
    sys.exit(main())
