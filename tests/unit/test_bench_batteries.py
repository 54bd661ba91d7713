"""What is kept of a battery's report."""

import json
from pathlib import Path
from typing import Any  # JSON

import pytest

from bench import batteries

SMOKE_CPU_S_MAX = 60.0
"""Of a smoke battery with the demo stack, both groups, imports and boots: design.md, section 4."""


def report(
    *, caught: bool = True, not_signed_for: str = "", names: tuple[str, ...] = ("oracle", "soak")
) -> dict[str, Any]:
    soak = {"seconds": 1800.0, "steps": 9}
    return {
        "cpu_s": 46.1, "envelope": {"traffic": {"output_max_tokens": 256}},
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
    assert (row["cpu_s"], row["output_max_tokens"]) == (46.1, 256)
    assert "weights.x" not in row["fingerprint"]


def test_a_row_says_what_was_not_signed_or_not_caught() -> None:
    assert batteries.row(report(not_signed_for="the soak"))["signed"] is False
    assert batteries.row(report(caught=False))["controls_caught"] is False


def test_the_recorded_batteries_were_signed_and_their_soaks_within_the_bound() -> None:
    rows = json.loads(batteries.RESULT.read_text(encoding="utf-8"))["batteries"]
    soaks = [row["soak"] for row in rows if row["level"] == "full"]

    assert all(row["signed"] and row["passed"] and row["controls_caught"] for row in rows)
    assert len(soaks) == 3
    assert max(soak["seconds"] for soak in soaks) == 1800.0
    assert all(soak["drift_high"] < soak["drift_max"] for soak in soaks)
    assert batteries.text().count("\n") == len(rows) + 1


def test_the_recorded_smoke_battery_of_the_demo_stack_kept_its_budget() -> None:
    rows = json.loads(batteries.RESULT.read_text(encoding="utf-8"))["batteries"]
    smoke = [row for row in rows if row["level"] == "smoke"]

    assert [row["mode"] for row in smoke] == ["prefill_cpu_eager", "decode_cpu_eager"]
    assert max(row["cpu_s"] for row in smoke) <= SMOKE_CPU_S_MAX


def test_a_battery_without_a_soak_has_a_row_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "cpu.json"
    result.write_text(json.dumps({"batteries": [batteries.row(report(names=("oracle",)))]}))
    monkeypatch.setattr(batteries, "RESULT", result)

    assert batteries.text().splitlines()[-1] == "| `m` | full | 256 | 46 | 1 | 5 |  |  |  |"


def test_without_a_report_it_says_how_it_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batteries.main([]) == 2
    assert "REPORT.json" in capsys.readouterr().err

    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert batteries.main([str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["batteries"][0]["mode"] == "m"
