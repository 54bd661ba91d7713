"""How far a long run of the wave simulation has come, in a file from which it goes on."""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.sim.wave.runner import Failure, Tally

ROOT = Path(__file__).parents[1]
SOURCES = ("splitwave/core/wave.py", "splitwave/core/wave_message.py", "tests/sim/wave/*.py")


class OtherRun(Exception):
    """The file is of another run: of other code, or of other seeds."""


@dataclass
class Progress:
    """Seeds that have been run, in order from the first."""

    provenance: dict[str, object]
    """What the run was begun with."""
    first: int
    seeds: int
    processes: int
    tally: Tally = field(default_factory=Tally)
    wall_s: float = 0.0
    """While it ran; not between."""

    @property
    def left(self) -> range:
        """Seeds that have not been run."""
        return range(self.first + self.tally.schedules, self.first + self.seeds)


def save(progress: Progress, path: Path) -> None:
    """Write it so that a reader finds the old file or the new one, whenever this process dies."""
    known = dataclasses.asdict(progress) | {"sources": sources_digest()}
    known["tally"]["failures"] = [
        [failure.seed, failure.broken] for failure in progress.tally.failures
    ]
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(known))
    os.replace(part, path)


def load(path: Path) -> Progress:
    """Read it; raises OtherRun if the code has changed since."""
    known = json.loads(path.read_text())
    if known.pop("sources") != sources_digest():
        raise OtherRun(f"{path} counts seeds of other code: remove it to begin again")
    tally = known.pop("tally")
    failures = [Failure(seed, broken) for seed, broken in tally.pop("failures")]
    return Progress(**known, tally=Tally(**tally, failures=failures))


def go_on(path: Path, new: Progress) -> Progress:
    """Go on from the file if there is one, else begin; raises OtherRun if it is of other seeds."""
    if not path.exists():
        return new
    old = load(path)
    if (old.first, old.seeds) != (new.first, new.seeds):
        raise OtherRun(f"{path} is of {old.seeds} seeds from {old.first}: remove it to begin again")
    return old


def sources_digest() -> str:
    """Of the code that decides what a seed does."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
