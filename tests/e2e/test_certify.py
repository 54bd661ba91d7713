"""The battery on real engines: every check passes, each control is caught; `up` serves by it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.core.evidence import Check, Level, required_checks
from splitwave.core.generation import Sampling
from splitwave.core.mode import MODES
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.wire.client import Ask, describe_worker, generate
from tests.e2e.live_stack import free_ports, running

SOAK_S = 10.0
COSTLIER = (" times what early ones did", " as long at the end as at the start")
"""How the words of a check end that compares what steps cost."""
MODES_PROVED = ("prefill_cpu_eager", "decode_cpu_eager")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    build(path, DemoModelOptions(variant=Variant.TINY), lambda line: None)
    return path


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
    model: Path, state: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Battery:
    """All checks on a rig, with a short soak; accuracy needs the harness, and is left out."""
    out = tmp_path_factory.mktemp("battery")
    flags = ("--level", "full", "--leave-out", "accuracy", "--soak-s", str(SOAK_S))
    return certify(model, out, state, *flags)


def test_up_makes_smoke_certificates_once_and_serves_by_them(
    model: Path, state: Mapping[str, str], tmp_path: Path
) -> None:
    certify = ("--certify", "smoke")
    with running(model, tmp_path / "first", *certify, environment=state) as stack:
        assert asyncio.run(answered(stack.channel)) == 4
        assert asyncio.run(levels(stack.channel)) == ["smoke", "smoke"]
        assert any("making smoke ones" in line for line in stack.output)
    with running(model, tmp_path / "second", *certify, environment=state) as stack:
        assert asyncio.run(levels(stack.channel)) == ["smoke", "smoke"]
        assert not any("making smoke ones" in line for line in stack.output)


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


def test_a_grid_is_walked_in_every_order_and_its_padding_is_poisoned(
    model: Path, state: Mapping[str, str], tmp_path: Path
) -> None:
    kept = {Check.ORACLE, Check.GRID, Check.PADDING_POISON}
    left_out = [word for check in set(Check) - kept for word in ("--leave-out", check.value)]
    mode = ("--mode", "decode_cpu_compiled", "--decode-ranks", "1")

    done, reports = certify(model, tmp_path, state, "--level", "full", *mode, *left_out)

    assert set(reports) == {"decode_cpu_compiled"}, done.stderr
    assert proved(reports["decode_cpu_compiled"]) == kept


def test_a_battery_without_one_check_is_not_signed(
    battery: Battery,
) -> None:
    done, reports = battery

    assert done.returncode == 1
    assert done.stdout.count("not signed: certificate refused (check_missing)") == 2, done.stdout
    assert [report["certificate_id"] for report in reports.values()] == ["", ""]


async def answered(channel_to: Any) -> int:  # LiveStack.channel
    async with channel_to("grpc") as channel:
        ask = Ask(prompt=[1, 2, 3], sampling=Sampling(max_tokens=4, temperature=0.0))
        answers = [answer async for answer in generate(channel, ask, 60.0)]
    return sum(len(answer.token_ids) for answer in answers)


async def levels(channel_to: Any) -> list[str]:  # LiveStack.channel
    found = []
    for name in ("prefill", "decode"):
        async with channel_to(name) as channel:
            found.append((await describe_worker(channel, 10.0)).certification.level)
    return found
