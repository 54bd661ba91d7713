"""Where kernels that are compiled at run time are kept: a folder a role and rank.

Ranks that start on a fresh machine compile the same kernels at the same moment. In one folder they
disturb each other (DeepEP refuses a folder that it finds half written), or wait for one another
while a collective spins.
"""

import multiprocessing
import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from splitwave.engine.vllm.switches import MODE

FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "EP_JIT_CACHE_DIR": "deep_ep",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables that name such folders, and ours for each. One that is set is kept, as the root."""
MARK = "SPLITWAVE_JIT_CACHES"
_RANK = re.compile(r"_DP(\d+)$")


def rank_of(process_name: str) -> int | None:
    """Return the rank that vLLM has named an engine's process by; None for any other process."""
    found = _RANK.search(process_name)
    return None if found is None else int(found[1])


def separate(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this process folders of its rank. Idempotent; call it before kernels are compiled.

    A process of no rank keeps its environment, and so do processes below one that is done.
    """
    rank = rank_of(multiprocessing.current_process().name)
    if rank is None or environ.get(MARK):
        return
    mode = environ.get(MODE, "")
    role = f"{mode.partition('_')[0]}-" if mode else ""
    root = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitwave" / "jit"
    for variable, folder in FOLDERS.items():
        own = Path(environ.get(variable) or root / folder) / f"{role}rank{rank}"
        own.mkdir(parents=True, exist_ok=True)
        environ[variable] = str(own)
    environ[MARK] = str(rank)
