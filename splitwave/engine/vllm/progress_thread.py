"""NIXL without its progress thread, which spins on one core an engine, idle or not.

vLLM has no option for it. Without the thread transfers progress when the engine polls them,
which it does every millisecond while it has any. Meant for machines with few cores.
"""

import functools

from splitwave.engine.vllm.switches import nixl_progress_thread_wanted


def install() -> None:
    """Let vLLM's NIXL agents start no progress thread, if the environment says so. Idempotent."""
    if nixl_progress_thread_wanted():
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    config = base_worker.nixl_agent_config
    if config is None or isinstance(config, functools.partial):
        return
    base_worker.nixl_agent_config = functools.partial(config, enable_prog_thread=False)
