"""A driver that boots engines in a process of its own, and the report that it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

ROOT = Path(__file__).parents[2]
RUN_LIMIT_S = 400


def drive(module: str, model: Path, out: Path) -> dict[str, Any]:
    """Run `python -m MODULE MODEL OUT` in its own session, so that a time limit ends all of it."""
    log = out / "driver.log"
    with log.open("w") as file:
        driver = subprocess.Popen(
            [sys.executable, "-m", module, str(model), str(out)],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = driver.wait(RUN_LIMIT_S)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, 9)  # its engines die with it
                driver.wait()
    assert status == 0, log.read_text()[-6000:]
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found
