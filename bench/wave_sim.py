"""Many seeds of the wave simulation over several processes, with what they amount to as JSON.

    python -m bench.wave_sim --seeds 1000000 --processes 2 > bench/results/wave_sim.json

It stops at the first seed that breaks an invariant and says how to replay it. With `--state FILE`
it writes there every few seconds how far it is, and goes on from there when it is run again;
`--report` makes the result of such a file, and runs nothing. `bench/wave_compiled.py` has it run
faster.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from bench.provenance import provenance
from bench.wave_progress import SOURCES, Progress, go_on, load, save
from tests.sim.wave.coverage import REACHABLE, rows
from tests.sim.wave.runner import Tally, run_in_processes

SAY_EVERY_S = 30.0
SAVE_EVERY_S = 5.0


def main() -> int:
    """Run, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--state", type=Path, help="file to go on from")
    parser.add_argument("--report", action="store_true", help="print the result of --state")
    args = parser.parse_args()
    if args.report:
        progress = load(args.state)
    else:
        progress = Progress(_provenance(), args.first, args.seeds, args.processes)
        if args.state:
            progress = go_on(args.state, progress)
        run_on(progress, 60 * args.minutes, args.state)
    print(json.dumps(figures(progress), indent=1))
    for failure in progress.tally.failures:
        sys.stderr.write(f"{failure}\n")
    return 1 if progress.tally.failures else 0


def run_on(progress: Progress, for_s: float, state: Path | None) -> None:
    """Run what is left of it, until a seed fails or time is up."""
    if progress.tally.failures:
        return
    began_s = said_s = saved_s = time.monotonic()
    done, before_s = progress.tally.schedules, progress.wall_s
    for tally in run_in_processes(progress.left, progress.processes, progress.tally):
        now_s = time.monotonic()
        progress.wall_s = before_s + now_s - began_s
        if tally.failures or now_s - began_s > for_s:
            break
        if state and now_s - saved_s > SAVE_EVERY_S:
            saved_s = now_s
            save(progress, state)
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            left_s = (now_s - began_s) * len(progress.left) / (tally.schedules - done)
            sys.stderr.write(f"{tally.schedules} of {progress.seeds} seeds, {left_s:.0f} s left\n")
    if state:
        save(progress, state)


def _provenance() -> dict[str, object]:
    return provenance(
        "python -m bench.wave_sim " + " ".join(sys.argv[1:]),
        paths=[*SOURCES, "bench/wave_sim.py"],
        packages=[],
    )


def figures(progress: Progress) -> dict[str, object]:
    """What is worth keeping of a run."""
    tally = progress.tally
    seeds = max(1, tally.schedules)
    return progress.provenance | {
        "seeds": tally.schedules,
        "broken": [str(failure) for failure in tally.failures],
        "processes": progress.processes,
        "wall_s": round(progress.wall_s, 1),
        "seeds_per_s": round(tally.schedules / max(progress.wall_s, 1e-9), 1),
        "cpu_ms_per_seed": round(tally.cpu_s / seeds * 1e3, 2),
        "cpu_hours_for_a_million_seeds": round(tally.cpu_s / seeds * 1e6 / 3600, 2),
        "events": tally.events,
        "events_per_seed": round(tally.events / seeds, 1),
        "events_per_seed_min": tally.events_min,
        "fault_kinds_per_seed_min": tally.fault_kinds_min,
        "steps": tally.steps,
        "starts": tally.starts,
        "requests": tally.requests,
        **scarcest(tally),
    }


def scarcest(tally: Tally) -> dict[str, object]:
    """The triple of state, message and fault that was met most seldom."""
    hits = {triple: count for triple, count in rows(tally.coverage) if triple in REACHABLE}
    triple = min(hits, key=lambda triple: hits[triple])
    return {
        "triples": len(hits),
        "triple_hits_min": hits[triple],
        "scarcest_triple": " ".join(part.name for part in triple),
    }


if __name__ == "__main__":
    sys.exit(main())
