"""Run a command and fail if it leaves a process behind: `leave_nothing.py COMMAND ...`.

A process whose parent ends is handed to this one (Linux's child subreaper), so a daemon that
forked twice or renamed itself is found too. What is left is named, then killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_S = 5.0
"""Time that a process which is ending already gets to end."""


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children() -> dict[int, str]:
    """Return this process's living children and their command lines, after reaping the dead."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return {}
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in listed}
    return {pid: line.replace("\0", " ").strip() for pid, line in lines.items()}


def left_behind() -> dict[int, str]:
    """Wait out the grace; return the children that still live."""
    ends_at_s = time.monotonic() + GRACE_S
    while (left := children()) and time.monotonic() < ends_at_s:
        time.sleep(0.1)
    return left


def run(command: list[str]) -> int:
    """Run the command and return its status; what it orphans is buried as soon as it has died.

    Tests look whether processes are gone, and one that nobody has waited for is still there.
    """
    process = subprocess.Popen(command)
    while True:
        pid, how = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(how)
            return process.returncode


def hear_signals() -> None:
    """Do not pass on that signals are ignored: a shell's background jobs ignore Ctrl-C.

    Tests interrupt programs, and programs that begin with a signal ignored go on ignoring it.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def main(command: list[str]) -> int:
    """Return the command's status, or 1 if it succeeded and left something running."""
    adopt_orphans()
    hear_signals()
    status = run(command)
    left = left_behind()
    for pid, line in left.items():
        print(f"left running: {pid} {line}", file=sys.stderr)
    while left:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        left = children()  # the orphans of those just killed come to us
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
