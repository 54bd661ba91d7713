"""Start the process over in its own place, when its engine group has died.

Engines are forked, and a process that serves gRPC has threads which do not survive a fork. So a
group is never started again beside a running server: everything is closed, and the process
becomes a new one by exec, with the same id, flags and supervisor. docs/adr/0004 says why.
"""

import logging
import os
import sys
from collections.abc import MutableMapping

from splitwave.runtime.serve import EXIT_EPOCH_OVER

log = logging.getLogger(__name__)

RESTARTS = "SPLITWAVE_RESTARTS"
"""Counts, from one image of the process to the next."""


def restarts(environ: MutableMapping[str, str] = os.environ) -> int:
    """How often this process has started over."""
    return int(environ.get(RESTARTS, "0"))


def start_over(code: int, restarts_max: int) -> int:
    """Become a new process if the code asks for it and it may; else return the code."""
    done = restarts()
    if code != EXIT_EPOCH_OVER or done >= restarts_max:
        return code
    log.warning("starting over (%d of at most %d times)", done + 1, restarts_max)
    os.environ[RESTARTS] = str(done + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)
    raise AssertionError("exec returned")
