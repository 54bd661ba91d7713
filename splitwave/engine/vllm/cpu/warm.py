"""Batch sizes that a compiled decode rank has run before it serves: the only ones it may run.

vLLM compiles a CPU model once, for every size. What a size costs its first time all the same
(oneDNN prepares a primitive for each shape, buffers grow) is paid here, before a request waits.
All ranks of a group run the same sizes in the same order, since their experts step together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any  # vLLM's objects are untyped here

from vllm.config import CompilationMode
from vllm.v1.worker.cpu_worker import CPUWorker

from splitwave.engine.vllm import steps

_MARK = "splitwave_installed"


def sizes_to_warm(vllm_config: Any) -> Sequence[int]:
    """Every number of tokens that a compiled decode step can have: one to all of its seats.

    Empty for an engine that is not compiled, or that also computes prompts.
    """
    transfer = vllm_config.kv_transfer_config
    decodes = transfer is not None and transfer.kv_role == "kv_consumer"
    if vllm_config.compilation_config.mode == CompilationMode.NONE or not decodes:
        return ()
    return range(1, vllm_config.scheduler_config.max_num_seqs + 1)


def install() -> None:
    """Warm every size up when a worker of this process gets ready. Idempotent."""
    if getattr(CPUWorker, _MARK, False):
        return
    setattr(CPUWorker, _MARK, True)
    CPUWorker.compile_or_warm_up_model = _then_each_size(CPUWorker.compile_or_warm_up_model)


def _then_each_size(warm_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(warm_up)
    def warmed(self: Any) -> Any:  # vLLM's CPUWorker; its CompilationTimes
        times = warm_up(self)
        sizes = sizes_to_warm(self.vllm_config)
        for size in sizes:
            self.model_runner._dummy_run(size, uniform_decode=True)  # noqa: SLF001  # vLLM has no public call
        if sizes:
            steps.allow_sizes(sizes)
        return times

    return warmed
