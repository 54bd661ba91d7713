"""Processes that a test has started through something else."""

import contextlib

import psutil


def is_gone(pid: int) -> bool:
    """True also if nobody has asked yet how it ended. It may go while it is asked about."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
