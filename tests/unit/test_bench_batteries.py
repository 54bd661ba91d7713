"""What is kept of a battery's report."""

import json
from pathlib import Path
from typing import Any  # JSON

import pytest

from bench import batteries


def report(*, caught: bool = True, not_signed_for: str = "") -> dict[str, Any]:
    soak = {"seconds": 1800.0, "steps": 9}
    names = ("oracle", "soak")
    return {
        "mode": "m", "level": "full", "made_at": "now", "not_signed_for": not_signed_for,
        "fingerprint": {"version.torch": "2", "weights.x": "a digest"},
        "checks": [
            {
                "evidence": {
                    "check": name, "passed": True, "seconds": 1.26, "replays": 5, "figures": soak,
                    "control": {"was_caught": caught or name == "oracle", "figures": {"steps": 1}},
                }
            }
            for name in names
        ],
    }  # fmt: skip


def test_a_row_has_each_checks_seconds_and_the_soaks_figures() -> None:
    row = batteries.row(report())

    assert row["seconds"] == {"oracle": 1.3, "soak": 1.3}
    assert (row["steps"], row["soak"]["steps"], row["soak_control"]["steps"]) == (10, 9, 1)
    assert (row["signed"], row["passed"], row["controls_caught"]) == (True, True, True)
    assert "weights.x" not in row["fingerprint"]


def test_a_row_says_what_was_not_signed_or_not_caught() -> None:
    assert batteries.row(report(not_signed_for="the soak"))["signed"] is False
    assert batteries.row(report(caught=False))["controls_caught"] is False


def test_the_recorded_batteries_were_signed_and_their_soaks_within_the_bound() -> None:
    rows = json.loads(batteries.RESULT.read_text(encoding="utf-8"))["batteries"]

    assert [row["signed"] and row["passed"] and row["controls_caught"] for row in rows] == [
        True
    ] * 3
    assert max(row["soak"]["seconds"] for row in rows) == 1800.0
    assert all(row["soak"]["drift_high"] < row["soak"]["drift_max"] for row in rows)
    assert batteries.text().count("\n") == len(rows) + 1


def test_without_a_report_it_says_how_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batteries.main([]) == 2
    assert "REPORT.json" in capsys.readouterr().err

    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert batteries.main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["batteries"][0]["mode"] == "m"
