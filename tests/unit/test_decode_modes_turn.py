"""Rows boot side by side and measure one after the other."""

import sys
from pathlib import Path

from bench.decode_modes.turn import commands, run

ROW = """
import sys, time
from pathlib import Path
from bench.decode_modes.turn import wait_for_turn
name, folder = sys.argv[1], Path(sys.argv[2])
assert not (folder / "turns/go").exists()
wait_for_turn(1, name)  # Only rank 0 waits.
wait_for_turn(0, name)
with (folder / "log").open("a") as log:
    print("begin", name, file=log, flush=True)
    time.sleep(0.2)
    print("end", name, file=log, flush=True)
"""


def test_commands_are_split_at_their_dashes() -> None:
    assert commands(["--", "a", "b", "--", "c"]) == [["a", "b"], ["c"]]
    assert commands([]) == []


def test_rows_measure_one_at_a_time_once_all_have_booted(tmp_path: Path) -> None:
    lines = [[sys.executable, "-c", ROW, name, str(tmp_path)] for name in ("a", "b", "c")]

    failed = run(tmp_path / "turns", 30.0, lines)

    told = (tmp_path / "log").read_text().splitlines()
    assert failed == 0
    assert len(told) == 6
    begins, ends = told[::2], told[1::2]
    assert [line.replace("begin", "end") for line in begins] == ends
    assert {line.split()[1] for line in begins} == {"a", "b", "c"}


def test_a_row_that_ends_early_keeps_no_other_waiting(tmp_path: Path) -> None:
    lines = [[sys.executable, "-c", ROW, "a", str(tmp_path)], [sys.executable, "-c", "exit(1)"]]

    assert run(tmp_path / "turns", 30.0, lines) == 1
    assert (tmp_path / "log").read_text().splitlines() == ["begin a", "end a"]
