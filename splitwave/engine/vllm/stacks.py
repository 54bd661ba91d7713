"""Where the threads of a process that hangs are: written to its log when a signal asks for it.

The handler is C code that needs no interpreter's lock: a thread that waits in C with the lock held
is just what must be seen. DeepEP's host-synchronised dispatch waits so for its peers.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterable

SIGNAL = signal.SIGUSR2
ANSWER_S = 0.3


def answer() -> None:
    """Have this process answer from now on. Another one would be ended by the signal."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


async def ask(pids: Iterable[int]) -> None:
    """Ask processes that answer, and give them the time for it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
    await asyncio.sleep(ANSWER_S)
