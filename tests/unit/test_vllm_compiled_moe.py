"""Experts of several ranks in a compiled step: what the tracer sees of them, and when."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any  # vLLM's layers are untyped here

import pytest
import torch
import vllm.distributed
import vllm.forward_context
from torch._dynamo.testing import CompileCounterWithBackend
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
    MoEPrepareAndFinalizeNaiveDPEPModular,
)
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.platforms.cpu import CpuPlatform

from splitwave.engine.vllm.cpu import compiled_moe
from splitwave.engine.vllm.cpu.platform import SplitwaveCpuPlatform

LAYER = "model.layers.0.experts"
EXPERTS, HIDDEN = 4, 16
NEAR = 2.0
"""What this rank's experts, the first two, multiply a row's share by; the other rank's give 0."""


class Peer:
    """The communicator of a group of two ranks; the other one sends rows of ones."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def all_gatherv(self, parts: Sequence[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        self.sizes.append(sizes)
        return [torch.cat([x, x.new_ones((sizes[1], *x.shape[1:]))]) for x in parts]

    def reduce_scatterv(self, rows: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        assert (dim, rows.shape[0]) == (0, sum(sizes))
        return rows[: sizes[0]] * 1.0


def near_share(**given: Any) -> None:
    """Stands for a rank's experts: a row's share by the weight of its slots that are here."""
    here = given["expert_map"][given["topk_ids"].long()] >= 0
    weight = (given["topk_weights"] * here).sum(-1, keepdim=True)
    given["output"].copy_(given["hidden_states"] * weight * NEAR)


def plain_layer() -> SimpleNamespace:
    """A layer as vLLM makes it for plain experts, down to what is read of it."""
    experts = object.__new__(CPUUnquantizedExperts)
    experts.apply = near_share  # No kernel is needed here.
    kernel = SimpleNamespace(
        fused_experts=experts, prepare_finalize=MoEPrepareAndFinalizeNaiveDPEPModular()
    )
    local = SimpleNamespace(
        quant_method=SimpleNamespace(moe_kernel=kernel, topk_indices_dtype=torch.int32),
        apply_router_weight_on_input=False, w13_weight=None, w2_weight=None, activation=None,
        global_num_experts=EXPERTS, expert_map=torch.tensor([0, 1, -1, -1], dtype=torch.int32),
    )  # fmt: skip
    return SimpleNamespace(
        layer_name=LAYER,
        routed_experts=local,
        router=CPURouter(top_k=2, global_num_experts=EXPERTS),
        shared_experts=None,
        shared_expert_gate=None,
        gate=None,
        moe_config=SimpleNamespace(
            is_sequence_parallel=False,
            pcp_size=1,
            moe_parallel_config=SimpleNamespace(dp_size=2),
        ),
    )


class Step:
    """One rank's layer amid a step of two ranks."""

    def __init__(self, layer: SimpleNamespace) -> None:
        self.layer, self.peer, self.direct_calls = layer, Peer(), 0
        self.context = SimpleNamespace(no_compile_layers={LAYER: layer}, dp_metadata=None)
        self.forward: Callable[..., Any] = compiled_moe.apart_across_ranks(lambda _: self.direct)(
            layer
        )

    def direct(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        self.direct_calls += 1
        return rows - 1.0

    def rows(self, own: int, others: int) -> torch.Tensor:
        self.context.dp_metadata = SimpleNamespace(
            num_tokens_across_dp_cpu=torch.tensor([own, others], dtype=torch.int32)
        )
        return torch.randn(own, HIDDEN)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    made = Step(plain_layer())
    group = SimpleNamespace(device_communicator=made.peer)
    monkeypatch.setattr(vllm.distributed, "get_dp_group", lambda: group)
    monkeypatch.setattr(vllm.forward_context, "get_forward_context", lambda: made.context)
    torch._dynamo.reset()  # noqa: SLF001  # torch has no public word for it
    return made


def test_a_step_is_traced_once_however_many_rows_the_other_rank_has(step: Step) -> None:
    backend = CompileCounterWithBackend("aot_eager")
    gate = torch.randn(HIDDEN, EXPERTS)

    def layer(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = step.forward(rows, rows @ gate, None, None, LAYER, 0)
        return out + 1.0

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for own, others in ((3, 5), (4, 1), (9, 9)):
        rows = step.rows(own, others)
        weights, ids = step.layer.router.select_experts(
            hidden_states=rows, router_logits=rows @ gate, topk_indices_dtype=torch.int32
        )
        near = (weights * (ids < 2)).sum(-1, keepdim=True)

        torch.testing.assert_close(compiled(rows), rows * near * NEAR + 1.0)

    assert backend.frame_count == 1
    assert step.peer.sizes == [[3, 5], [4, 1], [9, 9]]
    assert step.direct_calls == 0


def test_a_layer_that_holds_the_gate_asks_its_own(step: Step) -> None:
    gate = torch.randn(HIDDEN, EXPERTS)
    step.layer.gate = lambda rows: (rows @ gate, None)

    def layer(rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = step.forward(rows, logits, None, None, LAYER, 0)
        return out

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    rows = step.rows(6, 2)
    weights, ids = step.layer.router.select_experts(hidden_states=rows, router_logits=rows @ gate)
    near = (weights * (ids < 2)).sum(-1, keepdim=True)

    torch.testing.assert_close(compiled(rows, torch.randn(6, EXPERTS)), rows * near * NEAR)


def test_an_eager_step_goes_vllms_own_way(step: Step) -> None:
    rows = step.rows(3, 5)

    assert torch.equal(step.forward(rows, rows, None, None, LAYER, 0), rows - 1.0)
    assert (step.direct_calls, step.peer.sizes) == (1, [])


def test_one_rank_keeps_what_vllm_chose() -> None:
    layer = plain_layer()
    layer.moe_config.moe_parallel_config.dp_size = 1
    ours = compiled_moe.apart_across_ranks(lambda _: "chosen by vLLM")

    assert ours(layer) == "chosen by vLLM"


def change(layer: SimpleNamespace, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        layer = getattr(layer, parent)
    setattr(layer, name, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("routed_experts.quant_method.moe_kernel", None),
        ("routed_experts.quant_method.moe_kernel.fused_experts", object()),
        ("routed_experts.quant_method.moe_kernel.prepare_finalize", object()),
        ("routed_experts.quant_method.moe_kernel.prepare_finalize._lora_context", object()),
        ("router", object()),
        ("shared_experts", object()),
        ("shared_expert_gate", object()),
        ("routed_experts.apply_router_weight_on_input", True),
        ("moe_config.is_sequence_parallel", True),
        ("moe_config.pcp_size", 2),
    ],
)
def test_a_layer_with_more_in_between_stays_whole(path: str, value: object) -> None:
    layer = plain_layer()
    assert compiled_moe.is_separable(layer)

    change(layer, path, value)

    assert not compiled_moe.is_separable(layer)


@pytest.mark.parametrize("shared", [None, object()])
def test_a_compiled_layer_that_stays_whole_is_one_operator_of_vllms(
    step: Step, monkeypatch: pytest.MonkeyPatch, shared: object
) -> None:
    calls: list[tuple[str, tuple[object, ...]]] = []
    ops = {
        name: lambda *given, name=name: calls.append((name, given))
        for name in ("moe_forward", "moe_forward_shared")
    }
    monkeypatch.setattr(torch.ops, "vllm", SimpleNamespace(**ops))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step.layer.shared_experts, step.layer.router = shared, object()
    given = ("rows", "logits", "shared", "ids", LAYER, 0)

    compiled_moe.apart_across_ranks(lambda _: step.direct)(step.layer)(*given)

    assert calls == [("moe_forward_shared" if shared else "moe_forward", given)]
    assert step.direct_calls == 0


def test_code_compiled_with_a_fault_is_not_taken_for_that_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda _config: None)
    monkeypatch.setenv("SPLITWAVE_FORK", "0")
    keys = []
    for faults in ("", "shift_routing"):
        monkeypatch.setenv("SPLITWAVE_FAULTS", faults)
        config = SimpleNamespace(additional_config={"of": "the user"})
        SplitwaveCpuPlatform.check_and_update_config(config)
        SplitwaveCpuPlatform.check_and_update_config(config)
        assert config.additional_config.pop("of") == "the user"
        keys.append(config.additional_config)

    assert keys[0] != keys[1]
    assert all(key["splitwave_operators"] == "experts" for key in keys)
