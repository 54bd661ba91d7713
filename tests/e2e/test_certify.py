"""The battery on real engines: every check passes, and each control is caught."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.core.evidence import Check, Level, required_checks
from splitwave.core.mode import MODES
from tests.e2e.live_stack import free_ports

SOAK_S = 60.0
"""Of each mode: the groups are under load for two minutes."""
COSTLIER = (" times what early ones did", " as long at the end as at the start")
"""How the words of a check end that compares what steps cost."""
STEPS_MIN = 400
MODES_PROVED = ("prefill_cpu_eager", "decode_cpu_eager")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A user who has no certificates yet."""
    return {"XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}


Battery = tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]


def certify(model: Path, out: Path, state: Mapping[str, str], *flags: str) -> Battery:
    """Run the command, and read the reports that it left, by mode."""
    first = free_ports(8)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "certify", "--model", str(model),
         "--out", str(out), "--prefill-setting", f"side_channel_port={first}",
         "--decode-setting", f"side_channel_port={first + 1}", *flags],
        env={**os.environ, **state}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    reports = {
        path.parents[1].name: json.loads(path.read_text()) for path in out.rglob("report.json")
    }
    return done, reports


@pytest.fixture(scope="module")
def battery(
    tiny_model: Path, state: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Battery:
    """All checks on a rig, with a shorter soak; accuracy needs the harness, and is left out."""
    out = tmp_path_factory.mktemp("battery")
    flags = ("--level", "full", "--leave-out", "accuracy", "--soak-s", str(SOAK_S))
    return certify(tiny_model, out, state, *flags)


def test_every_check_passes_and_every_control_is_caught(
    battery: Battery,
) -> None:
    done, reports = battery

    assert set(reports) == set(MODES_PROVED), done.stderr
    for mode, report in reports.items():
        ranks = report["envelope"]["ranks"]
        wanted = set(required_checks(MODES[mode], Level.FULL, ranks=ranks)) - {Check.ACCURACY}
        assert proved(report) == wanted


def proved(report: Mapping[str, Any]) -> set[Check]:
    """The checks of a report, each of which passed and has caught its control."""
    for check in report["checks"]:
        evidence, name = check["evidence"], (report["mode"], check["evidence"]["check"])
        # How much dearer steps became is no verdict here: other work shares a test's machine.
        problems = [words for words in check["problems"] if not words.endswith(COSTLIER)]
        assert not problems, (name, problems)
        assert evidence["passed"] or check["problems"], name
        assert evidence["control"]["was_caught"], (name, evidence["control"], check["noticed"])
        assert evidence["replays"] > 0, name
    return {Check(check["evidence"]["check"]) for check in report["checks"]}


def test_the_soak_lasts_two_minutes_without_a_failure_a_stray_step_or_growth(
    battery: Battery,
) -> None:
    soaks = {
        mode: check
        for mode, report in battery[1].items()
        for check in report["checks"]
        if check["evidence"]["check"] == Check.SOAK
    }

    assert sum(soak["evidence"]["figures"]["seconds"] for soak in soaks.values()) >= 120.0
    for mode, soak in soaks.items():
        figures, seen = soak["evidence"]["figures"], soak["seen"]
        ranks = len(seen["memory"])
        assert (figures["steps_outside_mode"], seen["failures"]) == (0, 0), mode
        assert figures["requests"] > 0, mode
        assert figures["steps"] >= ranks * STEPS_MIN, mode
        for rank in range(ranks):
            growth = figures[f"memory_growth_host_bytes_rank_{rank}"]
            held = seen["memory"][rank][0]["host_bytes"]
            assert growth * held <= max(0.02 * held, 24 * 2**20), (mode, rank)


def test_the_decode_certificate_is_for_the_longest_output_that_ran(battery: Battery) -> None:
    report = battery[1]["decode_cpu_eager"]
    oracle = next(c for c in report["checks"] if c["evidence"]["check"] == Check.ORACLE)
    envelope = report["envelope"]

    longest = oracle["evidence"]["figures"]["longest_output_tokens"]
    assert longest == envelope["traffic"]["output_max_tokens"] == 1023


def test_padding_that_is_poisoned_changes_nothing(
    tiny_model: Path, state: Mapping[str, str], tmp_path: Path
) -> None:
    """The grid's other check, that it is walked in every order, is a smoke battery's too."""
    kept = {Check.PADDING_POISON}
    left_out = [word for check in set(Check) - kept for word in ("--leave-out", check.value)]
    mode = ("--mode", "decode_cpu_compiled", "--decode-ranks", "1")

    done, reports = certify(tiny_model, tmp_path, state, "--level", "full", *mode, *left_out)

    assert set(reports) == {"decode_cpu_compiled"}, done.stderr
    assert proved(reports["decode_cpu_compiled"]) == kept


def test_a_battery_without_one_check_is_not_signed(
    battery: Battery,
) -> None:
    done, reports = battery

    assert done.returncode == 1
    assert done.stdout.count("not signed: certificate refused (check_missing)") == 2, done.stdout
    assert [report["certificate_id"] for report in reports.values()] == ["", ""]
