"""What a split on GPUs is checked with, whole and on the CPU, so that it works where GPUs are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 280


def run(module: str, scratch: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = scratch / "out.json"
    command = [
        *(sys.executable, "-m", module, "--device", "cpu", "--work-dir", str(scratch / "work")),
        *("--out", str(out), *flags),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return done.returncode, json.loads(out.read_text())


@pytest.mark.timeout(300)
def test_a_split_of_two_and_two_ranks_is_right_by_every_claim(tmp_path: Path) -> None:
    code, found = run("bench.split_gpu_check", tmp_path)

    assert {check["name"]: check["wrong"] for check in found["checks"] if check["wrong"]} == {}
    assert code == 0
    tokens = found["checks"][0]
    assert tokens["equal"] == tokens["sequences"] == 32


@pytest.mark.timeout(300)
def test_long_prompts_are_repeated_through_the_whole_system(tmp_path: Path) -> None:
    """What the figures are is for quiet machines; that there are figures is for every commit."""
    small = ("--prefill-ranks", "1", "--count", "12", "--prompt-tokens", "301")

    code, found = run("bench.repeated", tmp_path, *small, "--ratio-max", "5")

    assert code == 0, found["compared"]
    assert {name: len(times) for name, times in found["series"].items()} == {
        "ttft_ms": 12, "prefill_ms": 12, "tpot_ms": 12,
    }  # fmt: skip
    assert found["outside_modes"] == {}
