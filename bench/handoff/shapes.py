"""KV caches that are handed over: layers and heads of real models, with next to no weights."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.decode_modes.models import Attention, Shape

_QWEN = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_SOFTMAX = {
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One kind of KV cache."""

    words: str
    layers: int
    attention: Attention
    block_tokens: Mapping[str, int]
    """By device: what the device's attention is written for."""
    dtype: Mapping[str, str]

    def block_bytes(self, device: str) -> int:
        """Bytes of one block over all layers."""
        value = {"float32": 4, "bfloat16": 2}[self.dtype[device]]
        return self.layers * self.block_tokens[device] * self.attention.cache_values() * value

    def shape(self, name: str, device: str) -> Shape:
        """A model with this cache, whose other parts are as small as can be."""
        latent = bool(self.attention.kv_rank)
        return Shape(
            name=f"handoff_{name}_{device}", words=self.words, layers=self.layers, hidden=256,
            architecture="DeepseekV2ForCausalLM" if latent else "Qwen3MoeForCausalLM",
            model_type="deepseek_v2" if latent else "qwen3_moe", vocabulary=512, experts=4,
            top_k=2, expert_size=64, shared_experts=1 if latent else 0,
            dense_layers=1 if latent else 0, dense_size=256 if latent else 0,
            dtype=self.dtype[device], attention=self.attention,
            more=_SOFTMAX if latent else _QWEN,
        )  # fmt: skip


CACHES: Mapping[str, Cache] = {
    "demo": Cache(
        words="the demo model: 30 layers, 3 KV heads of 64",
        layers=30,
        attention=Attention(heads=9, kv_heads=3, head_size=64),
        block_tokens={"cpu": 32, "cuda": 32},
        dtype={"cpu": "float32", "cuda": "bfloat16"},
    ),
    "deepseek_v2_lite": Cache(
        words="DeepSeek-V2-Lite: 27 layers, MLA, 576 values a token",
        layers=27,
        attention=Attention(
            heads=16, kv_heads=16, head_size=128, kv_rank=512, rope_size=64, value_size=128
        ),
        block_tokens={"cpu": 16, "cuda": 64},
        dtype={"cpu": "bfloat16", "cuda": "bfloat16"},
    ),
}
"""By name."""


def sizes(most: int) -> list[int]:
    """Numbers of blocks: powers of four up to `most`, and it."""
    found = []
    size = 1
    while size < most:
        found.append(size)
        size *= 4
    return [*found, most]
