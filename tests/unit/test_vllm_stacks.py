"""Stacks of processes that hang, the lock of the interpreter held or not."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitwave.engine.vllm import stacks

HANGS = """
import ctypes, threading
from splitwave.engine.vllm import stacks
stacks.answer()
print("ready", flush=True)
def waits_with_the_lock():
    ctypes.PyDLL(None).usleep(20_000_000)  # PyDLL keeps the interpreter's lock, CDLL would not.
thread = threading.Thread(target=waits_with_the_lock, daemon=True)
thread.start()
thread.join()
"""


@pytest.mark.timeout(30)
def test_a_process_that_waits_with_the_lock_held_says_where(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with log.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", HANGS], stdout=out, stderr=out)
    try:
        while "ready" not in log.read_text():
            assert child.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)

        asyncio.run(stacks.ask([child.pid]))

        assert "in waits_with_the_lock" in log.read_text()
        assert child.poll() is None, "it goes on"
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_is_not_asked() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    asyncio.run(stacks.ask([child.pid]))
