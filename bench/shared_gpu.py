"""Ranks that share a GPU, for checks of what is right where there are fewer GPUs than ranks.

`SPLITWAVE_BENCH_DEVICES="0 0"` says the device of each rank. Figures taken so are no one's: ranks
take turns, or halves of a GPU. NCCL allows it from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import os
from collections.abc import Mapping

VARIABLE = "SPLITWAVE_BENCH_DEVICES"


def devices(environ: Mapping[str, str] = os.environ) -> list[int]:
    """The device of each rank, in order; empty if rank n has the n-th. ValueError if no numbers."""
    words = environ.get(VARIABLE, "").split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{VARIABLE} is {' '.join(words)!r}; write a number a rank, such as 0 0")
    return [int(word) for word in words]


def device(rank: int, environ: Mapping[str, str] = os.environ) -> int:
    """The device of a rank."""
    numbers = devices(environ)
    return numbers[rank] if numbers else rank
