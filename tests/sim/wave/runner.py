"""Many seeds: run, counted and, where one fails, made small."""

import gc
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from services.cli.tether import die_with_parent
from tests.sim.wave.coverage import empty
from tests.sim.wave.draw import draw
from tests.sim.wave.schedule import Schedule
from tests.sim.wave.world import Make, World, production

CHUNK = 100
WORLDS_A_COLLECTION = 20


class Failure(Exception):
    """A schedule breaks an invariant."""

    def __init__(self, seed: int, broken: str) -> None:
        super().__init__(f"seed {seed}: {broken}; replay it with: python -m tests.sim.wave {seed}")
        self.seed = seed
        self.broken = broken

    def __reduce__(self) -> tuple[type["Failure"], tuple[int, str]]:
        """Failures travel between processes."""
        return Failure, (self.seed, self.broken)


@dataclass
class Tally:
    """What some seeds amount to."""

    schedules: int = 0
    events: int = 0
    events_min: int = 1 << 62
    fault_kinds_min: int = 1 << 62
    steps: int = 0
    starts: int = 0
    requests: int = 0
    cpu_s: float = 0.0
    coverage: list[int] = field(default_factory=empty)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add other seeds to these."""
        self.schedules += other.schedules
        self.events += other.events
        self.events_min = min(self.events_min, other.events_min)
        self.fault_kinds_min = min(self.fault_kinds_min, other.fault_kinds_min)
        self.steps += other.steps
        self.starts += other.starts
        self.requests += other.requests
        self.cpu_s += other.cpu_s
        self.coverage = [a + b for a, b in zip(self.coverage, other.coverage, strict=True)]
        self.failures += other.failures


def broken_by(schedule: Schedule, make: Make = production, log: list[str] | None = None) -> str:
    """Say which invariant a schedule breaks; empty if none."""
    try:
        World(schedule, make, log=log).run()
    except AssertionError as error:
        return str(error) or "an assertion"
    return ""


def run(seeds: Iterable[int], make: Make = production) -> Tally:
    """Run seeds in this process."""
    tally = Tally()
    began_s = time.process_time()
    gc.disable()  # A world is one knot of cycles: collecting while it lives finds nothing.
    try:
        for count, seed in enumerate(seeds):
            if count % WORLDS_A_COLLECTION == 0:
                gc.collect()
            _run_one(seed, make, tally)
    finally:
        gc.enable()
    tally.cpu_s = time.process_time() - began_s
    return tally


def _run_one(seed: int, make: Make, tally: Tally) -> None:
    """Run a seed and count it."""
    tally.schedules += 1
    world = World(draw(seed), make, coverage=tally.coverage)
    try:
        outcome = world.run()
    except AssertionError as error:
        tally.failures.append(Failure(seed, str(error)))
        return
    tally.events += outcome.events
    tally.steps += outcome.steps
    tally.starts += outcome.starts
    tally.requests += outcome.requests
    tally.events_min = min(tally.events_min, outcome.events)
    tally.fault_kinds_min = min(tally.fault_kinds_min, outcome.fault_kinds)


def run_in_processes(seeds: range, processes: int, tally: Tally | None = None) -> Iterator[Tally]:
    """Run seeds in several processes; yields the tally so far after each chunk.

    Chunks are counted in the order of their seeds, onto `tally` if there is one. The
    processes end with this one, however it ends.
    """
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    tally = tally or Tally()
    pool = ProcessPoolExecutor(processes, initializer=die_with_parent)
    try:
        for part in pool.map(run, chunks):
            tally.add(part)
            yield tally
    finally:
        pool.shutdown(cancel_futures=True)  # Whoever has seen enough does not wait for the rest.


def first_failure(make: Make, seeds: Iterable[int]) -> Failure | None:
    """Run seeds until one fails."""
    for seed in seeds:
        broken = broken_by(draw(seed), make)
        if broken:
            return Failure(seed, broken)
    return None


def shrink(schedule: Schedule, make: Make = production, runs_max: int = 2_000) -> Schedule:
    """Drop actions while the schedule still breaks the same invariant.

    Halves go first, then quarters, down to single actions, again and again until
    nothing more can go.
    """
    kind = broken_by(schedule, make)[:3]
    assert kind, "only a failing schedule can be made smaller"
    size = len(schedule.actions)
    while size >= 1 and runs_max > 0:
        start = 0
        was = len(schedule.actions)
        while start < len(schedule.actions) and runs_max > 0:
            actions = schedule.actions[:start] + schedule.actions[start + size :]
            smaller = schedule._replace(actions=actions)
            runs_max -= 1
            if broken_by(smaller, make)[:3] == kind:
                schedule = smaller
            else:
                start += size
        if size == 1 and len(schedule.actions) == was:
            break
        size = max(1, size // 2)
    return schedule
