"""The log of a worker that is started over."""

import subprocess
import sys
from pathlib import Path

WRITES = "import sys; from services.cli.zygote import _redirect; "


def test_a_worker_that_is_started_over_writes_behind_why_it_was(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "prefill.log"

    for again, words in ((False, "old"), (False, "the engines died"), (True, "starting engines")):
        code = f"{WRITES}_redirect({str(log)!r}, again={again}); print({words!r})"
        subprocess.run([sys.executable, "-c", code], check=True)

    assert log.read_text() == "the engines died\nstarting engines\n"
