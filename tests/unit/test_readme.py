"""What the README shows is what a run printed."""

import json
from pathlib import Path

import msgspec

from services.cli.status_text import text_of
from services.router.status_page.view import Status

ROOT = Path(__file__).parents[2]


def test_the_demos_output_in_the_readme_is_that_of_the_recorded_run() -> None:
    recorded = json.loads((ROOT / "bench/results/demo.json").read_text())["demo"]["output"]
    shown = (ROOT / "README.md").read_text()

    assert "\n".join(recorded) in shown


def test_the_pools_in_the_readme_are_as_status_prints_them_and_mark_who_is_uncertified() -> None:
    recorded = (ROOT / "tests/unit/readme_pools.json").read_bytes()
    printed = text_of(msgspec.json.decode(recorded, type=Status))

    assert f"$ splitwave status\n{printed}\n```" in (ROOT / "README.md").read_text()
    assert printed.count(", uncertified (no certificate is given)") == 2
