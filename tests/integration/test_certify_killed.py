"""A `splitwave certify` that is killed takes its battery with it, and so the battery's engines."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.cli.battery import Battery, run_battery
from services.cli.plan import Plan

GONE_WITHIN_S = 10.0
STAND_IN = """#!/bin/sh
if [ "$2" = splitwave.certify.battery ]; then echo $$ > {told}; exec sleep 600; fi
exec {python} "$@"
"""


def command(out: Path) -> None:
    """What `splitwave certify` does, with a battery that does nothing, and for long."""
    stand_in, told = out / "python", out / "pid"
    stand_in.write_text(STAND_IN.format(told=told, python=sys.executable))
    stand_in.chmod(0o700)
    sys.executable = str(stand_in)
    plan = Plan(model_path=out, served_model="m", run_dir=out)
    battery = Battery(
        plan=plan, level="smoke", targets=(), out=out / "out", certificates=out, key=out
    )
    asyncio.run(run_battery(battery, lambda who, what: None))


def pid_of(told: Path) -> int:
    """The battery's, once it runs."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while not (told.exists() and told.read_text().endswith("\n")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return int(told.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_no_battery(number: signal.Signals, tmp_path: Path) -> None:
    words = f"import pathlib, {__name__} as this; this.command(pathlib.Path(r'{tmp_path}'))"
    killed = psutil.Popen([sys.executable, "-c", words], cwd=os.getcwd())
    battery = psutil.Process(pid_of(tmp_path / "pid"))
    assert battery.status() != psutil.STATUS_ZOMBIE

    killed.send_signal(number)

    killed.wait(GONE_WITHIN_S)
    _, left = psutil.wait_procs([battery], timeout=GONE_WITHIN_S)
    for process in left:
        process.kill()
    assert not left
