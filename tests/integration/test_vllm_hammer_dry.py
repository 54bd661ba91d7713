"""The whole hammer on the CPU: two processes, a fake transport, faults on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any  # a result file

import psutil
import pytest

from bench.hammer.settings import parse
from splitwave.certify.hammer.walk import pair_minimum, plan

ROOT = Path(__file__).parents[2]
SMALL = [
    "--dry", "--sizes", "8,16", "--hidden", "16", "--experts", "8", "--topk", "2",
    "--replays", "40", "--skew-ms", "5", "--skew-budget-s", "0.1", "--stall-s", "4",
]  # fmt: skip


def hammered(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Run the program; returns its exit code and what it wrote. No process may be left."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.hammer", *SMALL, *more, "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=50,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert out.exists(), done.stderr
    assert left(tmp_path) == []
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["not_killed"] == []
    assert found["verdict"] in done.stdout
    return done.returncode, found


def left(folder: Path) -> list[int]:
    """Return the processes that work in a folder."""
    lines = {p.pid: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if str(folder) in " ".join(line)]


def test_a_right_transport_passes_with_two_microbatches(tmp_path: Path) -> None:
    code, found = hammered(tmp_path, "--tbo", "--drain", "barrier")

    assert (code, found["verdict"]) == (0, "passed")
    assert found["replays"] == 40
    assert found["pair_min"] == pair_minimum(plan(parse(SMALL).walk()), (8, 16)) >= 9
    assert found["skews"]["count"] > 0
    assert [rank["found"]["tally"]["wrong_rows"] for rank in found["ranks"]] == [0, 0]
    assert all(rank["found"]["versions"]["torch"] for rank in found["ranks"])
    assert found["date"]


@pytest.mark.parametrize(
    ("arguments", "code", "verdict", "why"),
    [
        (["--plant", "wrong_row@20:1"], 1, "wrong_rows", "first in replay 20, row 0"),
        (["--no-sanitise"], 1, "wrong_rows", "wrong loads in"),
        (["--plant", "error@20:1"], 3, "fault", "a planted error"),
        (["--plant", "setup@0:1"], 4, "setup", "a planted error"),
        (["--seconds", "0"], 5, "short", "the time was over"),
    ],
)
def test_each_end_has_its_code(
    tmp_path: Path, arguments: list[str], code: int, verdict: str, why: str
) -> None:
    if verdict == "short":
        # The ranks look at the time every 200 replays, which a loaded machine takes seconds for.
        arguments = [*arguments, "--replays", "400", "--skew-ms", "0", "--stall-s", "25"]
    ended, found = hammered(tmp_path, *arguments)

    assert (ended, found["verdict"]) == (code, verdict)
    assert why in found["why"]


@pytest.mark.parametrize("plant", ["hang", "freeze"])
def test_a_rank_that_stops_is_reported_with_where_each_rank_was(tmp_path: Path, plant: str) -> None:
    code, found = hammered(tmp_path, "--plant", f"{plant}@20:1")

    waiting, stopped = found["ranks"]
    assert (code, found["verdict"]) == (2, "hang")
    assert "stood still" in found["why"]
    assert (waiting["code"], stopped["code"]) == (None, None)
    assert waiting["position"]["issued"] == 21
    assert waiting["position"]["finished"] == 20
    assert waiting["position"]["marks"] == ["layer 0 entered"]
    assert stopped["position"]["finished"] <= 20
    assert waiting["found"]["device"] == "CPU"
    assert waiting["found"]["versions"]["torch"]
    assert "in dispatch" in "\n".join(waiting["log"])


def test_a_rank_that_is_killed_is_a_fault_and_takes_nobody_along(tmp_path: Path) -> None:
    code, found = hammered(tmp_path, "--plant", "crash@20:0")

    assert (code, found["verdict"]) == (3, "fault")
    assert "killed by signal 9" in found["why"]
