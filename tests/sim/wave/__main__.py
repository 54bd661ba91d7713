"""Replay a seed: `python -m tests.sim.wave SEED [--shrink] [--as NAME]`."""

import argparse
import sys

from tests.sim.wave.draw import draw
from tests.sim.wave.mutants import MUTANTS
from tests.sim.wave.runner import broken_by, shrink
from tests.sim.wave.stock import stock
from tests.sim.wave.world import Make, production

COORDINATORS: dict[str, Make] = {"production": production, "stock": stock} | {
    name: mutant.make for name, mutant in MUTANTS.items()
}


def main() -> int:
    """Print the trace of one schedule, and what it breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.wave", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--shrink", action="store_true", help="drop what the failure does not need")
    parser.add_argument("--as", dest="name", choices=sorted(COORDINATORS), default="production")
    args = parser.parse_args()
    make = COORDINATORS[args.name]
    schedule = draw(args.seed)
    if args.shrink and broken_by(schedule, make):
        schedule = shrink(schedule, make)
    log: list[str] = []
    broken = broken_by(schedule, make, log)
    out = sys.stdout
    out.write(
        f"seed {schedule.seed}: {schedule.ranks} ranks, {schedule.fronts} front-ends,"
        f" a vote every {schedule.sync_interval} steps of {schedule.step_us} us,"
        f" {len(schedule.actions)} actions\n"
    )
    out.writelines(f"{line}\n" for line in log)
    out.write(f"{broken or 'nothing is broken'}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
