"""What the README shows is what a run printed."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demos_output_in_the_readme_is_that_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "bench/results/demo.json").read_text())["demo"]["output"]
    shown = (ROOT / "README.md").read_text()

    assert "\n".join(recorded) in shown
