"""The mixture of experts of a compiled step whose experts live on several ranks.

How many rows the other ranks send depends on data, so what lies between the two collectives must
stay hidden from the tracer. vLLM's own operator would hide the whole layer. Ours takes a rank's
rows with the experts chosen for them and gives back as many: gather, experts of this rank,
combine. Gate and choice are traced with the rest of the model.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any  # vLLM's objects are untyped here

import torch

from splitwave.engine.vllm import seams, switches

OF_EXPERTS = ("w13_weight", "w2_weight", "activation", "global_num_experts", "expert_map")
"""What the operator reads of a layer."""
_LIBRARY = torch.library.Library("splitwave", "DEF")
"""The operator lives as long as this does."""
_LIBRARY.define("experts(Tensor rows, Tensor weights, Tensor ids, str layer) -> Tensor")


def experts(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: str
) -> torch.Tensor:
    """What the experts of all ranks give for this rank's `rows`, [rows, hidden].

    `weights` and the global `ids` are [rows, top-k]; `layer` is vLLM's name of the layer. All
    ranks call together.
    """
    from vllm.distributed import get_dp_group
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    assert context.dp_metadata is not None
    sizes = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
    local = context.no_compile_layers[layer].routed_experts
    communicator: Any = get_dp_group().device_communicator  # CpuEpCommunicator
    rows, weights, ids = communicator.all_gatherv([rows, weights, ids], sizes=sizes)
    shares = torch.empty_like(rows)
    local.quant_method.moe_kernel.fused_experts.apply(
        output=shares, hidden_states=rows, w1=local.w13_weight, w2=local.w2_weight,
        topk_weights=weights, topk_ids=ids, activation=local.activation,
        global_num_experts=local.global_num_experts, expert_map=local.expert_map,
        a1q_scale=None, a2_scale=None, workspace13=None, workspace2=None,
        expert_tokens_meta=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    combined: torch.Tensor = communicator.reduce_scatterv(shares, dim=0, sizes=sizes)
    return combined


def _shape_of_experts(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: str
) -> torch.Tensor:
    return torch.empty_like(rows)


_LIBRARY.impl("experts", experts, "CPU")
torch.library.register_fake("splitwave::experts", _shape_of_experts, lib=_LIBRARY)


def cache_key(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What of ours goes into compiled code and vLLM's key of its cache leaves out.

    Without it a model that was compiled with a fault planted, or by a Splitwave without the
    operator, would be taken from the cache.
    """
    return {
        "splitwave_operators": "experts",
        "splitwave_faults": environ.get(switches.FAULTS, ""),
    }


def is_separable(runner: Any) -> bool:  # vLLM's MoERunner
    """True if the layer's choice of experts can be traced apart from the experts.

    So for plain experts behind a plain gather. What has more to do in between (shared experts or
    a gate of theirs, quantized or weighted inputs, adapters, sequence parallelism) stays whole.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
        MoEPrepareAndFinalizeNaiveDPEPModular,
    )
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    local = runner.routed_experts
    kernel = getattr(local.quant_method, "moe_kernel", None)
    seams.require_attributes(local, OF_EXPERTS)
    return (
        kernel is not None
        and isinstance(kernel.fused_experts, CPUUnquantizedExperts)
        and isinstance(kernel.prepare_finalize, MoEPrepareAndFinalizeNaiveDPEPModular)
        and kernel.prepare_finalize._lora_context is None  # noqa: SLF001  # vLLM has no public word
        and isinstance(runner.router, CPURouter)
        and runner.shared_experts is None
        and runner.shared_expert_gate is None  # vLLM makes one matrix of it and the gate.
        and not local.apply_router_weight_on_input
        and not runner.moe_config.is_sequence_parallel
        and runner.moe_config.pcp_size == 1
    )


@torch.compiler.assume_constant_result
def _is_separable(layer: str) -> bool:
    """Answered by name: the tracer takes names as they are and looks into nothing here."""
    from vllm.forward_context import get_forward_context

    return is_separable(get_forward_context().no_compile_layers[layer])


def apart_across_ranks(select: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap MoERunner._select_forward: across ranks, hide from the tracer what it cannot know."""

    @functools.wraps(select)
    def chosen(self: Any) -> Any:  # vLLM's MoERunner; the callable that it calls
        direct = select(self)
        if self.moe_config.moe_parallel_config.dp_size == 1:
            return direct
        ops = torch.ops.vllm
        whole = ops.moe_forward if self.shared_experts is None else ops.moe_forward_shared

        def forward(rows: Any, logits: Any, shared: Any, token_ids: Any, *rest: Any) -> Any:
            if not torch.compiler.is_compiling():
                return direct(rows, logits, shared, token_ids, *rest)
            if not _is_separable(self.layer_name):
                return whole(rows, logits, shared, token_ids, *rest)
            if self.gate is not None:
                logits, _ = self.gate(rows)
            weights, ids = self.router.select_experts(
                hidden_states=rows,
                router_logits=logits,
                topk_indices_dtype=self.routed_experts.quant_method.topk_indices_dtype,
                input_ids=token_ids,
            )
            return torch.ops.splitwave.experts(rows, weights, ids, self.layer_name)

        return forward

    return chosen
