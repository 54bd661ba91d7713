"""A fault for a positive control: every token goes to the experts after those it was routed to."""

import functools
from collections.abc import Callable
from typing import Any  # vLLM's router and tensors are untyped here

_MARK = "splitwave_shifted"


def install() -> None:
    """Shift the choice of every router of this process by one expert. Idempotent."""
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    if getattr(FusedMoERouter, _MARK, False):
        return
    setattr(FusedMoERouter, _MARK, True)
    FusedMoERouter.select_experts = _shifted(FusedMoERouter.select_experts)


def _shifted(select: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    @functools.wraps(select)
    def selected(
        self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        weights, ids = select(self, hidden_states, router_logits, *args, **kwargs)
        return weights, (ids + 1) % router_logits.shape[-1]

    return selected
