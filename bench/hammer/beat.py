"""What a rank leaves on disk for its parent: where it is, and how it ended."""

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from splitwave.certify.hammer.verdict import Phase, Position

BEAT_S = 0.25


def _replace(path: Path, values: object) -> None:
    """Write so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    os.replace(partial, path)


def beat_path(folder: Path, rank: int) -> Path:
    """Return where a rank's position is kept."""
    return folder / f"rank{rank}.beat.json"


def end_path(folder: Path, rank: int) -> Path:
    """Return where a rank's result is kept."""
    return folder / f"rank{rank}.end.json"


def write_end(folder: Path, rank: int, values: dict[str, object]) -> None:
    """Add to what a rank leaves: a rank that hangs has said by then what it ran on."""
    _replace(end_path(folder, rank), read_end(folder, rank) | values)


def read_end(folder: Path, rank: int) -> dict[str, object]:
    """Return a rank's result, empty if it left none."""
    try:
        found = json.loads(end_path(folder, rank).read_text())
    except (OSError, ValueError):
        return {}
    return dict(found)


def read_beat(folder: Path, rank: int) -> Position:
    """Return a rank's last position; where it starts if it left none."""
    try:
        values = json.loads(beat_path(folder, rank).read_text())
    except (OSError, ValueError):
        return Position()
    values["phase"] = Phase(values["phase"])
    values["marks"] = tuple(values["marks"])
    return Position(**values)


class Beat:
    """Writes a rank's position four times a second, from a thread of its own.

    The rank's own thread may wait for its GPU for ever: the thread asks the GPU for the marks by
    `look`, which must never wait long and returns None when it cannot say.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = beat_path(folder, rank)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.position = Position()
        self._seen: tuple[int, tuple[str, ...]] = (0, ())
        self.look: Callable[[], tuple[int, tuple[str, ...]] | None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Write the position once more and end; returns within a second or so."""
        self._over.set()
        self._thread.join(timeout=2)
        self._seen = self.look() or self._seen
        self._write()

    def enter(self, phase: Phase, size: int = 0) -> None:
        """Take the next phase; written at once, since what follows may never return."""
        self.position = dataclasses.replace(self.position, phase=phase, size=size)
        self._write()

    def issue(self, size: int) -> None:
        """Count a replay, of this size, as given to the GPU."""
        was = self.position
        self.position = dataclasses.replace(was, issued=was.issued + 1, size=size)

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            if self.position.phase is Phase.REPLAY:
                self._seen = self.look() or self._seen
            self._write()

    def _write(self) -> None:
        finished, marks = self._seen
        with self._lock:
            position = dataclasses.replace(self.position, finished=finished, marks=marks)
            _replace(self._path, dataclasses.asdict(position))
