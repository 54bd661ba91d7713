"""Keeps what runs eagerly on a CPU eager in all its parts.

vLLM has its sampler's small helpers compiled whatever `enforce_eager` says: the first request that
asks for log probabilities, or for a ban on tokens, waits for a C++ compiler on each rank, for some
seconds of CPU and once more on each start.
"""

from typing import Any  # vLLM's configuration is untyped here


def compile_nothing_more(vllm_config: Any) -> bool:
    """Have torch.compile return functions as they are from now on in this thread.

    torch keeps such settings by thread: call it in the one that steps. For eager engines on a CPU
    only; returns whether it is one. Elsewhere a helper that is not compiled is many kernels instead
    of one.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and vllm_config.model_config.enforce_eager):
        return False
    from torch._dynamo import config

    config.disable = True
    return True
