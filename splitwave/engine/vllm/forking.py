"""Whether engines on GPUs may be forked: not from a process that has touched CUDA.

A child of such a process cannot use a GPU, and cannot be told apart from one that has never tried:
the driver says `not initialised` to both. So each process looks before it forks, and what it has
found goes to its children. vLLM itself asks torch alone, which knows only of what torch did.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any  # a C library

from splitwave.engine.vllm import plugin
from splitwave.engine.vllm.switches import FORK

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
LIBRARY = "libcuda.so.1"
NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED, which every call but cuInit returns before cuInit."""

_touched = False
"""Of this process, or of one that it was forked from."""


def driver_is_initialised(load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """True if something in this process has called cuInit; False where there is no driver."""
    try:
        library = load(LIBRARY)
    except OSError:
        return False
    count = ctypes.c_int()
    status: int = library.cuDeviceGetCount(ctypes.byref(count))
    return status != NOT_INITIALISED


def look(load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """Look whether CUDA was touched here, now or before a fork. Call it before each fork."""
    global _touched
    _touched = _touched or driver_is_initialised(load)
    return _touched


def start_method(
    load: Callable[[str], Any] = ctypes.CDLL, environ: Mapping[str, str] = os.environ
) -> str:
    """How engines on GPUs are started: forked, or spawned where a fork could not use them.

    Forked ones start sooner, and each has a log of its own; spawned ones write where we do.
    SPLITWAVE_FORK=0 has them spawned, and so has an earlier group of another kind in this process.
    """
    touched = look(load)
    return "spawn" if touched or environ.get(FORK) == "0" or not plugin.fits() else "fork"
