"""Notices ranks whose process is there but does not run: stopped by a signal, or hung.

The end of a process is noticed by its sentinel, at once. A process that does not run ends
nothing, and its peers wait for it in their next step for ever.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from splitwave.core.mode import Device
from splitwave.engine.vllm.switches import collective_timeout_s

LOOK_S = 0.1
STOPPED_MAX_S = 1.0
"""How long a process may be stopped by a signal before its group is given up: half of the two
seconds within which a client hears of it."""
SILENT_MAX_S = 10.0
"""The same for one that says nothing. Its reports come from a thread of their own, at least one a
second: what keeps that thread from running for so long is no long step. On GPUs it may be one:
DeepEP's host-synchronised dispatch keeps the interpreter's lock while it waits for its peers."""


def silent_max_s(device: Device, environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank may say nothing: on GPUs as long as it may wait in a collective."""
    if device is Device.GPU:
        return max(SILENT_MAX_S, collective_timeout_s(environ))
    return SILENT_MAX_S


class Pulse:
    """Since when each rank has been stopped. Ranks are in order; times are monotonic seconds."""

    def __init__(
        self, pids: Sequence[int], now_s: float, silent_max_s: float = SILENT_MAX_S
    ) -> None:
        self._pids = pids
        self._silent_max_s = silent_max_s
        self._ran_at_s = [now_s] * len(pids)

    def look(self, heard_at_s: Sequence[float | None], now_s: float) -> tuple[int, str] | None:
        """The first rank that has not run for too long and why one thinks so, or None.

        `heard_at_s`: when each rank was last heard of, None if never; empty if ranks of this
        group say nothing.
        """
        for rank, pid in enumerate(self._pids):
            if not is_stopped(pid):
                self._ran_at_s[rank] = now_s
            elif (stopped_s := now_s - self._ran_at_s[rank]) >= STOPPED_MAX_S:
                return rank, f"has been stopped by a signal for {stopped_s:.1f} s"
        for rank, at_s in enumerate(heard_at_s):
            if at_s is not None and now_s - at_s >= self._silent_max_s:
                return rank, f"has said nothing for {now_s - at_s:.1f} s: it hangs"
        return None


def is_stopped(pid: int) -> bool:
    """True if a process is stopped by job control. One that a debugger holds is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False  # It has ended, which is told elsewhere.
    # The name before it may hold any character.
    return stat.rpartition(")")[2].split()[0] == "T"
