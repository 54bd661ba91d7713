"""The hammer over vLLM's whole layer: right rows pass, wrong ones are found, poison is planted."""

import os
import sys
import types
from typing import Any  # vLLM's classes are untyped here

import pytest
import torch

from bench.hammer import layers
from bench.hammer.device import Cpu
from bench.hammer.graphs import FINISHED
from bench.hammer.layers import LayerGraphs, LayerRows, Weights, build_layer, normed
from bench.hammer.settings import Settings, parse
from splitwave.certify.hammer.walk import Step, plan
from splitwave.engine.vllm.switches import FAULTS
from tests.unit.deep_ep_stand_in import Buffer, ElasticBuffer, module

CPU = torch.device("cpu")
ARGUMENTS = [
    "--level", "layer", "--sizes", "8,16", "--hidden", "64", "--experts", "8", "--topk", "2",
    "--inner", "32", "--ranks", "1", "--replays", "30",
]  # fmt: skip
GROUP = types.SimpleNamespace(size=lambda: 1)


@pytest.fixture(autouse=True)
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", module())
    for name in ("deepep_v2", "deepep_ht"):
        whole = f"vllm.model_executor.layers.fused_moe.prepare_finalize.{name}"
        monkeypatch.delitem(sys.modules, whole, raising=False)
    monkeypatch.setenv(FAULTS, "")
    monkeypatch.setattr(layers, "device_group", lambda settings: GROUP)
    monkeypatch.setattr(layers, "host_group", lambda: GROUP)
    zeros = torch.zeros

    def here(*shape: Any, **options: Any) -> torch.Tensor:
        """Take what is meant for a GPU to the CPU: NCCL's first collective, which is left out."""
        return zeros(*shape, **(options | {"device": "cpu"}))

    monkeypatch.setattr(torch, "zeros", here)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)


def settings(*more: str) -> Settings:
    return parse([*ARGUMENTS, *more])


def plain_experts(spoil: bool) -> Any:
    """Return experts in plain torch, which add their neighbour's row if told to spoil."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class Experts(modular_kernel.FusedMoEExpertsModular):  # type: ignore[misc]  # untyped base
        @staticmethod
        def activation_format() -> Any:
            return modular_kernel.FusedMoEActivationFormat.Standard

        def workspace_shapes(self, rows: int, n: int, k: int, *_: Any) -> Any:
            return (0,), (0,), (rows, k)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, **call: Any) -> None:
            x, ids = call["hidden_states"], call["topk_ids"].clamp(min=0)
            local = call["expert_map"][ids].masked_fill(call["topk_ids"] < 0, -1)
            out = Weights(call["w1"], call["w2"]).reference(x, local, call["topk_weights"])
            call["output"].copy_(out.roll(1, 0) if spoil else out)

    Experts.__abstractmethods__ = frozenset()
    return Experts


def walked(*more: str, spoil: bool = False) -> dict[str, int]:
    """Walk over both sizes through vLLM's layer and return the tally."""
    asked = settings(*more)
    rows = LayerRows(asked, 0, CPU)
    graphs = LayerGraphs(asked, Cpu(), None, rows)
    graphs.layer = build_layer(asked, rows, 0, plain_experts(spoil))
    for size in asked.sizes:
        graphs.capture(size)
    for replay, step in enumerate(plan(asked.walk())):
        rows.stage(step)
        graphs.replay(step.size, replay)
        rows.check(step, replay)
        graphs.mark(FINISHED, replay + 1)
    return rows.tally.read()


@pytest.fixture
def globalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put plain torch in place of vLLM's Triton kernel that sanitises ids."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

    def sanitised(ids: Any, counts: Any, offset: int, experts: int) -> Any:
        row = torch.arange(len(ids))[:, None]
        return torch.where((ids >= 0) & (row < counts[-1]), ids + offset, -1)

    monkeypatch.setattr(deepep_v2, "_globalize_recv_topk_idx", sanitised)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "buffers"), [("v2", 1), ("legacy", 3), ("legacy_shared", 1)])
@pytest.mark.usefixtures("globalised")
def test_whole_layers_pass_over_each_transport(transport: str, buffers: int) -> None:
    found = walked("--transport", transport)

    assert (found["wrong_rows"], found["replay"]) == (0, -1)
    assert ElasticBuffer.made + Buffer.made == buffers
    assert "poison_padding" in os.environ[FAULTS]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("globalised")
def test_experts_that_mix_up_rows_fail() -> None:
    assert walked("--transport", "v2", spoil=True)["wrong_replays"] > 25


def test_the_reference_is_what_a_token_makes_of_its_experts_alone() -> None:
    asked = settings("--layers", "1")
    rows = LayerRows(asked, 0, CPU)
    x = normed(rows.pool.x[3, 5:6]).float()[0]
    out = torch.zeros(64)
    for expert, weight in zip(rows.pool.ids[0, 3, 0, 5], rows.pool.weights[3, 0, 5], strict=True):
        wide = rows.experts.gate_up[expert].float() @ x
        out += (
            weight
            * rows.experts.down[expert].float()
            @ (torch.nn.functional.silu(wide[:32]) * wide[32:])
        )

    assert torch.allclose(rows.expected[3, 5], out, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["swapped", "nan", "lost_slot"])
def test_a_wrong_row_is_found(kind: str) -> None:
    asked = settings("--layers", "1", "--experts", "16", "--topk", "8")
    rows = LayerRows(asked, 0, CPU)
    step = Step(16, (12,), (2,), 1.0)
    rows.stage(step)
    out = rows.expected[2, :12].bfloat16()
    rows.out[:12] = out
    rows.check(step, 1)
    assert rows.tally.read()["wrong_rows"] == 0

    if kind == "swapped":
        rows.out[4] = out[5]
    elif kind == "nan":
        rows.out[4, 9] = torch.nan
    else:
        weights = rows.pool.weights[2, 0, :12].clone()
        weights[4, weights[4].argmin()] = 0
        x = normed(rows.pool.x[2, :12])
        rows.out[:12] = rows.experts.reference(x, rows.pool.ids[0, 2, 0, :12], weights)
    rows.check(step, 2)

    assert rows.tally.read() | {"wrong_loads": 0} == {
        "wrong_replays": 1, "wrong_rows": 1, "replay": 2, "row": 4, "wrong_loads": 0,
        "load_replay": -1,
    }  # fmt: skip


def test_whole_layers_refuse_what_they_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--transport", "legacy_unfixed"], ["--tbo"]):
        with pytest.raises(SystemExit):
            settings(*more)
        assert "without microbatches" in capsys.readouterr().err
