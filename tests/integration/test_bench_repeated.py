"""The repeated long prompt through router, prefill and decode over HTTP, on simulated engines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest

from bench.repeated import JUDGED

ROOT = Path(__file__).parents[2]
# A step costs by its tokens, so that a longer prompt takes longer.
SETTINGS = (
    "--prefill-setting",
    "step_per_prefill_token_s=0.0005",
    "--prefill-setting",
    "step_fixed_s=0.002",
)
RATIO_MAX = "1.3"
SLOWER = 1.1
"""Where the interval of a planted slow-down begins at the latest."""


def measured(scratch: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = scratch / "repeated.json"
    command = [
        *(sys.executable, "-m", "bench.repeated", "--device", "cpu", "--engine", "sim"),
        *("--work-dir", str(scratch), "--out", str(out), "--prompt-tokens", "301"),
        *("--ratio-max", RATIO_MAX, *SETTINGS, *flags),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.timeout(120)
def test_the_twentieth_long_prompt_is_told_to_be_no_slower_than_the_second(tmp_path: Path) -> None:
    """Other work may come to this machine meanwhile: then it is not told, but neither is more."""
    code, found = measured(tmp_path)

    assert {name: len(times) for name, times in found["series"].items()} == {
        "ttft_ms": 20, "prefill_ms": 20, "tpot_ms": 20,
    }  # fmt: skip
    assert found["outside_modes"] == {}
    assert all(any(rank.values()) for ranks in found["steps"].values() for rank in ranks)
    compared = found["compared"]
    is_shown = all(compared[name]["ratio_high"] < float(RATIO_MAX) for name in JUDGED)
    assert code == (0 if is_shown else 1), compared
    assert compared["prefill_ms"]["ratio_low"] < SLOWER, compared


@pytest.mark.timeout(120)
def test_a_prompt_that_takes_longer_from_the_middle_on_is_seen(tmp_path: Path) -> None:
    code, found = measured(tmp_path, "--control")

    assert code == 1
    assert found["compared"]["prefill_ms"]["ratio_low"] > SLOWER, found["compared"]
