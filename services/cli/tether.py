"""Tie a process's life to its parent's: `python -m services.cli.tether PROGRAM ARGUMENT...`.

A supervisor that is killed cannot stop its children. Linux can, if a child asks for
it before it becomes the program: the request survives execve(2).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent dies."""


def die_with_parent() -> None:
    """From now on this process gets SIGTERM when its parent dies; ends it if that has happened."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def main(command: list[str]) -> None:
    """Become `command`."""
    die_with_parent()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
