"""Two repairs that expert parallelism needs of vLLM's CPU mixture of experts.

1. CPUUnquantizedExperts receives `expert_map` (global to local expert id, -1 if elsewhere) and
   ignores it, so its kernel indexes the local weights by global ids: out of bounds.
2. Under torch.compile the MoE layer is traced into its collectives, whose row counts depend on
   data. They have to be hidden from the tracer (compiled_moe.py).
"""

import functools
from collections.abc import Callable
from typing import Any  # vLLM's objects are untyped here

import torch

from splitwave.engine.vllm.cpu import compiled_moe

_MARK = "splitwave_installed"


def to_local_experts(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and local ids, both [tokens, top-k], of what this rank's experts have to compute.

    Slots of experts that live elsewhere become expert 0 with weight 0: they cost time, but add
    nothing to the sum that the ranks combine.
    """
    local_ids = expert_map[topk_ids.long()]
    weights = topk_weights.masked_fill(local_ids < 0, 0)
    return weights, local_ids.clamp_min_(0).to(topk_ids.dtype)


def install() -> None:
    """Apply both repairs in this process. Idempotent."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if getattr(CPUUnquantizedExperts, _MARK, False):
        return
    setattr(CPUUnquantizedExperts, _MARK, True)
    CPUUnquantizedExperts.apply = _with_expert_map(CPUUnquantizedExperts.apply)
    select = MoERunner._select_forward  # noqa: SLF001  # vLLM has no public seam here
    MoERunner._select_forward = compiled_moe.apart_across_ranks(select)  # noqa: SLF001  # likewise


def _with_expert_map(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def mapped(self: Any, **given: Any) -> None:  # vLLM's arguments, which it gives by name
        if given["expert_map"] is not None:
            given["topk_weights"], given["topk_ids"] = to_local_experts(
                given["topk_weights"], given["topk_ids"], given["expert_map"]
            )
        apply(self, **given)

    return mapped
