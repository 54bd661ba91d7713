"""Ranks that are there but do not run."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from splitwave.core.mode import Device
from splitwave.engine.vllm.pulse import (
    SILENT_MAX_S,
    STOPPED_MAX_S,
    Pulse,
    is_stopped,
    silent_max_s,
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One with a name that a careless reader of /proc stumbles over."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as child:
        yield child
        child.kill()


def until_stopped(pid: int, stopped: bool) -> None:
    deadline_s = time.monotonic() + 5
    while is_stopped(pid) is not stopped:
        assert time.monotonic() < deadline_s


def test_a_rank_that_stays_stopped_is_named_and_one_that_goes_on_is_not(
    process: subprocess.Popen[bytes],
) -> None:
    pulse = Pulse([process.pid], 0.0)
    process.send_signal(signal.SIGSTOP)
    until_stopped(process.pid, True)
    assert pulse.look([], STOPPED_MAX_S - 0.1) is None

    assert pulse.look([], STOPPED_MAX_S) == (0, "has been stopped by a signal for 1.0 s")
    process.send_signal(signal.SIGCONT)
    until_stopped(process.pid, False)
    assert pulse.look([], STOPPED_MAX_S + 1) is None


def test_a_rank_that_was_heard_of_and_falls_silent_hangs(
    process: subprocess.Popen[bytes],
) -> None:
    pulse = Pulse([process.pid] * 2, 0.0)

    assert pulse.look([None, 1.0], SILENT_MAX_S) is None
    stuck = pulse.look([None, 1.0], SILENT_MAX_S + 1.0)
    assert stuck == (1, "has said nothing for 10.0 s: it hangs")


def test_on_gpus_a_rank_may_be_silent_as_long_as_it_may_wait_in_a_collective() -> None:
    assert silent_max_s(Device.CPU, {}) == SILENT_MAX_S
    assert silent_max_s(Device.GPU, {}) == 30.0
    assert silent_max_s(Device.GPU, {"SPLITWAVE_COLLECTIVE_TIMEOUT_S": "60"}) == 60.0
    assert silent_max_s(Device.GPU, {"SPLITWAVE_COLLECTIVE_TIMEOUT_S": "2"}) == SILENT_MAX_S

    pulse = Pulse([0], 0.0, silent_max_s=30.0)
    assert pulse.look([1.0], 30.9) is None
    assert pulse.look([1.0], 31.0) == (0, "has said nothing for 30.0 s: it hangs")


def test_a_process_that_has_ended_is_not_called_stopped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()

    assert not is_stopped(process.pid)
