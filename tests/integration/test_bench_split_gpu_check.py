"""The check of a split on shared devices, whole, on simulated engines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest

ROOT = Path(__file__).parents[2]


def checked(scratch: Path, *flags: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and what was wrong by claim."""
    out = scratch / "out.json"
    command = [
        *(sys.executable, "-m", "bench.split_gpu_check", "--device", "cpu", "--engine", "sim"),
        *("--work-dir", str(scratch / "work"), "--out", str(out), *flags),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert out.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return done.returncode, {c["name"]: c["wrong"] for c in found["checks"] if c["wrong"]}


@pytest.mark.timeout(120)
def test_two_and_two_ranks_are_right_by_every_claim(tmp_path: Path) -> None:
    assert checked(tmp_path) == (0, {})
