"""The hammer one level up: vLLM's whole mixture-of-experts layer over the served transports.

Routing and walk are the same; the experts are real ones, so that a row's reference is computed
token by token beforehand and a right row may differ by what bfloat16 matrix products do.
"""

import dataclasses
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any  # vLLM's classes are untyped here

import torch
import torch.distributed as dist

from bench.hammer.graphs import Graphs
from bench.hammer.rows import Rows
from bench.hammer.settings import Settings
from bench.hammer.transports import device_group
from splitwave.certify.hammer.walk import Step
from splitwave.engine.vllm.switches import FAULTS, Fault

ERROR_MAX = 0.05
"""Largest error of a right row, as a share of its length. A slot that is lost makes up a third."""

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows, global expert ids and weights to the layer's output."""


def normed(rows: torch.Tensor) -> torch.Tensor:
    """Bring each row to length 1 an element, so that layers can be stacked."""
    wide = rows.float()
    return (wide * wide.square().mean(dim=-1, keepdim=True).add(1e-9).rsqrt()).bfloat16()


@dataclasses.dataclass(slots=True)
class Weights:
    """Of all experts: `gate_up` [experts, 2 * inner, hidden], `down` [experts, hidden, inner]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, settings: Settings, place: torch.device) -> "Weights":
        """Draw the same on every rank."""
        drawn = torch.Generator(device=place).manual_seed(settings.seed)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=drawn, device=place, dtype=torch.bfloat16)
            return values * shape[-1] ** -0.5

        experts, hidden, inner = settings.experts, settings.hidden, settings.inner
        return cls(normal(experts, 2 * inner, hidden), normal(experts, hidden, inner) * 2)

    def reference(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return one layer's output, expert by expert, in float32 but for the inner rounding."""
        out = torch.zeros(x.shape, device=x.device)
        inner = self.down.shape[-1]
        for expert in range(len(self.down)):
            hit = ids == expert
            rows = hit.any(dim=1).nonzero().flatten()
            wide = x[rows].float() @ self.gate_up[expert].float().T
            acted = torch.nn.functional.silu(wide[:, :inner]) * wide[:, inner:]
            made = acted.bfloat16().float() @ self.down[expert].float().T
            out[rows] += (weights * hit).sum(dim=1)[rows, None] * made
        return out.bfloat16()


class LayerRows(Rows):
    """Rows with their reference after all layers: expected [entries, rows, hidden]."""

    def __init__(self, settings: Settings, rank: int, place: torch.device) -> None:
        super().__init__(settings, rank, place)
        self.experts = Weights.draw(settings, place)
        hidden = self.pool.x.flatten(0, 1)
        for layer in range(settings.layers):
            ids = self.pool.ids[rank, :, layer].flatten(0, 1)
            weights = self.pool.weights[:, layer].flatten(0, 1)
            hidden = self.experts.reference(normed(hidden), ids, weights)
        self.expected = hidden.view(self.pool.x.shape).float()

    def stage(self, step: Step) -> None:
        """Lay out a step's inputs; experts are not linear, so that no factor changes them."""
        super().stage(dataclasses.replace(step, factor=1.0))

    def check(self, step: Step, replay: int) -> None:
        """Compare a replay's rows with the reference, without waiting for the device."""
        n, entry = step.tokens[self._rank], step.entries[self._rank]
        expected = self.expected[entry, :n]
        error = (self.out[:n].float() - expected).norm(dim=1)
        # Written so that NaN is wrong.
        right = error <= ERROR_MAX * expected.norm(dim=1)
        self.tally.rows(torch.cat((~right, right.new_zeros(1))), replay)


class LayerGraphs(Graphs):
    """Graphs whose layers are vLLM's."""

    layer: Layer

    def _serial(self, size: int) -> None:
        rows, part = self._rows, slice(0, size)
        hidden = rows.x[part]
        for layer in range(self._settings.layers):
            self._stage(layer, 0, "entered")
            x = normed(hidden) + rows.padding[part]
            hidden = self.layer(x, rows.ids[layer, part], rows.weights[layer, part])
            self._stage(layer, 0, "combined")
        rows.out[part].copy_(hidden)


def build_layer(
    settings: Settings, rows: LayerRows, rank: int, experts: Callable[[Any, Any], Any] | None = None
) -> Layer:
    """Build vLLM's layer over the served transport; `experts` stands for Triton's. Collective."""
    plant_poison(settings)
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager

    place, local = rows.x.device, rows.local
    init_workspace_manager(place)
    config = layer_config(settings, rank, place)
    kernel = modular_kernel.FusedMoEKernel(
        prepare_finalize(settings, rank, local), (experts or triton_experts)(*config)
    )
    mine = slice(rank * local, (rank + 1) * local)
    gate_up, down = rows.experts.gate_up[mine].contiguous(), rows.experts.down[mine].contiguous()
    here = torch.full((settings.experts,), -1, dtype=torch.int32, device=place)
    here[mine] = torch.arange(local, dtype=torch.int32, device=place)
    context = SimpleNamespace(dp_metadata=None)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with override_forward_context(context):
            out: torch.Tensor = kernel.apply(
                x, gate_up, down, topk_weights=weights, topk_ids=ids, activation=MoEActivation.SILU,
                global_num_experts=settings.experts, expert_map=here,
                apply_router_weight_on_input=False,
            )  # fmt: skip
        return out

    return layer


def plant_poison(settings: Settings) -> None:
    """Have the served transports poison what lies past the received rows, in every dispatch."""
    faults = [Fault.POISON_PADDING]
    if not settings.sanitise:
        faults.append(Fault.NO_SANITISE)
    if settings.transport == "legacy_shared":
        faults.append(Fault.SHARED_BUFFER)
    os.environ[FAULTS] = ",".join(faults)


def layer_config(settings: Settings, rank: int, place: torch.device) -> tuple[Any, Any]:
    """Return vLLM's configuration of the layer and of its (absent) quantisation."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    backend = "deepep_v2" if settings.transport == "v2" else "deepep_high_throughput"
    parallel = config.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=settings.ranks, ep_size=settings.ranks, tp_rank=0,
        pcp_rank=0, dp_rank=rank, ep_rank=rank, sp_size=1, use_ep=True, all2all_backend=backend,
        enable_eplb=False,
    )  # fmt: skip
    layer = config.FusedMoEConfig(
        num_experts=settings.experts, experts_per_token=settings.topk, hidden_dim=settings.hidden,
        intermediate_size=settings.inner, num_local_experts=settings.experts // settings.ranks,
        num_logical_experts=settings.experts, activation=MoEActivation.SILU, device=place,
        routing_method=config.RoutingMethodType.Renormalize, moe_parallel_config=parallel,
        in_dtype=torch.bfloat16, max_num_tokens=max(settings.sizes),
    )  # fmt: skip
    return layer, config.FUSED_MOE_UNQUANTIZED_CONFIG


def triton_experts(layer: Any, quantisation: Any) -> Any:
    """Return the experts that vLLM chooses for bfloat16 on a GPU."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return TritonExperts(layer, quantisation)


def host_group() -> dist.ProcessGroup:
    """Return the group of all ranks that a legacy buffer is made over."""
    return dist.group.WORLD


def prepare_finalize(settings: Settings, rank: int, local: int) -> Any:
    """Return vLLM's prepare and finalize, with the served transport for its buffer. Collective."""
    from splitwave.engine.vllm.worst_token import bridge, elastic, install, legacy

    install.state.warming = True  # Whatever runs here is a graph, or its warm-up.
    places = {"num_dispatchers": settings.ranks, "dp_size": settings.ranks}
    if settings.transport == "v2":
        from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

        make = bridge.elastic_maker(device_group(settings), max(settings.sizes))
        buffer = elastic.ElasticTransport(make(settings.hidden, settings.topk), install.state)
        return deepep_v2.DeepEPV2PrepareAndFinalize(
            buffer, **places, rank_expert_offset=rank * local, num_experts=settings.experts,
            num_topk=settings.topk, use_cudagraph=True,
        )  # fmt: skip
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht

    make_buffer = legacy.buffer_maker(host_group())
    shared = legacy.LegacyTransport(make_buffer(2 * settings.hidden), make_buffer, install.state)
    whole = install._without_host_counts(deepep_ht.DeepEPHTPrepareAndFinalize)  # noqa: SLF001  # engines get it so
    return whole(shared, **places, rank_expert_offset=rank * local)
