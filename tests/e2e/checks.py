"""Run checks against real engines in a process of their own, and collect what they saw.

`python -m tests.e2e.SOME_checks RESULTS.json MODEL` builds engines (forked, so pytest itself must
not have imported vLLM), runs each check once, and writes what it returned, or its traceback. The
tests assert on that. A process with everything below it is killed when its time is up.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar  # Any: JSON

ROOT = Path(__file__).parents[2]
LOG_TAIL_CHARS = 6000
BLOCK_SIZE_TOKENS = 32
CHECK_LIMIT_S = 150
Stack = TypeVar("Stack")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SPLITWAVE_FORK": "1",
    "SPLITWAVE_NIXL_PROGRESS_THREAD": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}


@dataclass(frozen=True)
class Report:
    """What the checks of one process saw, by name, and the end of what it printed."""

    seen: dict[str, Any]
    log: str

    def of(self, check: str) -> Any:  # as the check returned it, through JSON
        """What a check returned; fails the test if it raised, or never ran."""
        assert check in self.seen, f"{check} did not run:\n{self.log}"
        found = self.seen[check]
        assert not (isinstance(found, dict) and "traceback" in found), found["traceback"]
        return found


def run_module(module: str, model: Path, scratch: Path, timeout_s: float) -> Report:
    """Run a checks module in a child process; its partial results count if its time is up."""
    results, log = scratch / "results.json", scratch / "log.txt"
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(results), str(model)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with log.open("ab") as more:
                more.write(f"\nkilled after {timeout_s} s".encode())
        finally:
            _kill_session(child.pid)
            child.wait()
    seen = json.loads(results.read_text()) if results.exists() else {}
    return Report(seen, log.read_text(errors="replace")[-LOG_TAIL_CHARS:])


def _kill_session(leader: int) -> None:
    """Kill all processes that the child has started: engines lead groups, but share its session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


async def collect(
    results: Path, stack: Stack, checks: Sequence[Callable[[Stack], Awaitable[Any]]]
) -> None:
    """Run the checks in order on one stack, and write what is known after each."""
    seen: dict[str, Any] = {}
    for check in checks:
        name = check.__name__
        try:
            seen[name] = await asyncio.wait_for(check(stack), CHECK_LIMIT_S)
        except Exception:  # noqa: BLE001  # told to the test, which fails by it
            seen[name] = {"traceback": traceback.format_exc()}
        await asyncio.to_thread(results.write_text, json.dumps(seen))
