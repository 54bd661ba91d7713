"""Random weights that tell modes apart: by expert's number, the same in every process."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from bench.decode_modes.spec import BRANCH_GAIN
from bench.decode_modes.weights import LOAD_FORMAT, RandomLoader, spread

EXPERTS = 8
HIDDEN, SIZE = 256, 64


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, 7.0).to(dtype), requires_grad=False)


def model(local: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Parameters as vLLM names them, with `local` experts."""
    made, experts, norm, cache = (torch.nn.Module() for _ in range(4))
    embedding, gate = torch.nn.Module(), torch.nn.Module()
    experts.w13_weight = parameter(local, 2 * SIZE, HIDDEN, dtype=dtype)
    experts.w13_weight_scale_inv = parameter(local, 1, 2)
    norm.weight, gate.weight = parameter(HIDDEN), parameter(EXPERTS, HIDDEN)
    gate.e_score_correction_bias = parameter(EXPERTS)
    cache.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
    embedding.weight = parameter(512, HIDDEN)
    for name, child in {
        "experts": experts, "norm": norm, "gate": gate, "attn": cache, "embed_tokens": embedding,
    }.items():  # fmt: skip
        made.add_module(name, child)
    return made


def loaded(
    monkeypatch: pytest.MonkeyPatch, rank: int, local: int, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    monkeypatch.setattr(
        "vllm.distributed.get_ep_group", lambda: SimpleNamespace(rank_in_group=rank)
    )
    made = model(local, dtype)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts=EXPERTS))
    RandomLoader(LoadConfig(load_format=LOAD_FORMAT)).load_weights(made, config)
    return made


def test_vllm_finds_the_loader_by_its_format() -> None:
    assert isinstance(get_model_loader(LoadConfig(load_format=LOAD_FORMAT)), RandomLoader)


def test_an_expert_is_the_same_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded(monkeypatch, 0, EXPERTS).experts.w13_weight
    halves = [loaded(monkeypatch, rank, EXPERTS // 2).experts.w13_weight for rank in (0, 1)]

    assert torch.equal(torch.cat(halves), whole)
    assert len({float(expert[0, 0]) for expert in whole}) == EXPERTS


def test_what_all_ranks_have_is_equal_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (loaded(monkeypatch, rank, EXPERTS // 2) for rank in (0, 1))

    assert torch.equal(one.gate.weight, other.gate.weight)
    assert torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)
    assert not torch.equal(one.embed_tokens.weight[:EXPERTS], one.gate.weight)


def test_a_row_keeps_its_size_through_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(monkeypatch, 0, EXPERTS)

    assert float(made.experts.w13_weight.std()) == pytest.approx(HIDDEN**-0.5, rel=0.05)
    assert float(made.gate.weight.std()) == pytest.approx(2 * HIDDEN**-0.5, rel=0.1)
    assert float(made.embed_tokens.weight.std()) == pytest.approx(1.0, rel=0.05)
    assert made.norm.weight.unique().tolist() == [1.0]
    assert made.gate.e_score_correction_bias.unique().tolist() == [0.0]
    assert float(made.attn.k_scale) == -1.0


def test_fp8_weights_are_as_large_once_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = loaded(monkeypatch, 0, EXPERTS, torch.float8_e4m3fn).experts

    scale = experts.w13_weight_scale_inv.unique()
    assert len(scale) == 1
    wide = experts.w13_weight.to(torch.float32) * scale
    assert bool(wide.isfinite().all())
    assert float(wide.std()) == pytest.approx(HIDDEN**-0.5, rel=0.05)


def test_what_layers_add_can_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["layers.0.mlp.experts.w2_weight", "o_proj.weight", "down_proj.weight_scale_inv"]
    others = ["qkv_proj.weight", "w13_weight", "lm_head.weight"]
    before = [spread(name, (4, 100)) for name in names + others]
    monkeypatch.setenv(BRANCH_GAIN, "0.5")
    after = [spread(name, (4, 100)) for name in names + others]

    assert before == [0.1] * 6
    assert after == [0.05] * 3 + [0.1] * 3
