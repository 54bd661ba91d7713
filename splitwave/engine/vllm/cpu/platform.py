"""vLLM's CPU platform, with our communicator and, if asked for, forked engines."""

import os
from typing import Any  # vLLM's objects are untyped here

from vllm.platforms.cpu import CpuPlatform

from splitwave.engine.vllm.cpu import compiled_moe
from splitwave.engine.vllm.switches import fork_wanted


class SplitwaveCpuPlatform(CpuPlatform):
    """Still the CPU to vLLM (`is_cpu()` holds), so it picks its own CPU worker and kernels."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Class path of the communicator that can gather and scatter uneven rows."""
        return "splitwave.engine.vllm.cpu.communicator.CpuEpCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:  # vLLM's VllmConfig
        """Undo two of vLLM's choices when engines are to be forked; complete its cache's key.

        It forces spawned processes and a worker process of its own, to pin OpenMP threads.
        Each costs an import of a quarter of a minute. Called in the front and in each engine.
        """
        super().check_and_update_config(vllm_config)
        vllm_config.additional_config |= compiled_moe.cache_key()
        if fork_wanted():
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            vllm_config.parallel_config.distributed_executor_backend = "uni"

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """No core for vLLM's NIXL connector to pin its thread to, where that thread also computes.

        It reserves the last core for a worker's transfers. With the worker in the engine's own
        process all engines of a host would run on that core, and the others would be idle.
        """
        found: list[list[int]] = [] if fork_wanted() else super().discover_numa_topology()
        return found
