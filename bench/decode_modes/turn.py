"""Rows that boot side by side and measure one after the other.

A boot takes minutes and a measurement seconds, and a machine's GPUs hold several engines. Rows
started with SPLITWAVE_BENCH_TURN=FOLDER boot at once, wait until FOLDER/go is there, and then
measure one row at a time; the others do nothing meanwhile.

    python -m bench.decode_modes.turn --folder F --boot-s 240 -- COMMAND ... [-- COMMAND ...]

starts the commands and makes FOLDER/go when each row has booted or ended, or time is up.
"""

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "SPLITWAVE_BENCH_TURN"
SLOT = "SPLITWAVE_BENCH_SLOT"
"""Which of the rows that run side by side this is; from 0."""
LOOK_S = 0.1


def wait_for_turn(rank: int, name: str) -> None:
    """Wait, on rank 0, until it is this row's turn to measure; the process's end gives it up."""
    folder = os.environ.get(VARIABLE)
    if not folder or rank != 0:
        return
    (Path(folder) / f"booted.{name.replace('/', '.')}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(LOOK_S)
    turn = (Path(folder) / "turn").open("w")
    fcntl.flock(turn, fcntl.LOCK_EX)
    _HELD.append(turn)


_HELD: list[object] = []
"""Open files keep their locks."""


def commands(words: Sequence[str]) -> list[list[str]]:
    """Split at each `--`."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return [command for command in found if command]


def run(folder: Path, boot_s: float, lines: Sequence[Sequence[str]]) -> int:
    """Start all, give the word, wait for all; returns how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    running = [
        subprocess.Popen(line, env=os.environ | {VARIABLE: str(folder), SLOT: str(slot)})
        for slot, line in enumerate(lines)
    ]
    end_s = time.monotonic() + boot_s
    while time.monotonic() < end_s:
        ended = sum(process.poll() is not None for process in running)
        if len(list(folder.glob("booted.*"))) + ended >= len(running):
            break
        time.sleep(LOOK_S)
    (folder / "go").touch()
    sys.stderr.write(f"turn: measurements begin, {len(list(folder.glob('booted.*')))} booted\n")
    return sum(process.wait() != 0 for process in running)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--boot-s", type=float, default=240.0)
    parser.add_argument("commands", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    sys.exit(min(1, run(given.folder, given.boot_s, commands(given.commands))))


if __name__ == "__main__":
    main()
