"""Model shapes that are measured, and the least that a step of one has to read from memory."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BYTES = {"bfloat16": 2, "float32": 4}
FP8_BLOCK = 128
COPY_TB_PER_S = 4.3
"""Memory bandwidth that a copy reached on an H200; what a floor is computed with unless told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Projections of one attention layer. Latent ones (MLA) have `kv_rank`."""

    heads: int
    kv_heads: int
    head_size: int
    kv_rank: int = 0
    q_rank: int = 0
    rope_size: int = 0
    value_size: int = 0

    def weights(self, hidden: int) -> int:
        """Number of weights that a step reads."""
        if self.kv_rank == 0:
            return hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        query = self.heads * (self.head_size + self.rope_size)
        down = hidden * (self.kv_rank + self.rope_size)
        up = self.kv_rank * self.heads * (self.head_size + self.value_size)
        queries = hidden * query if not self.q_rank else self.q_rank * (hidden + query)
        return queries + down + up + self.heads * self.value_size * hidden

    def cache_values(self) -> int:
        """Values that the KV cache holds a token and layer."""
        return self.kv_rank + self.rope_size if self.kv_rank else 2 * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model without weights."""

    name: str
    words: str
    architecture: str
    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    attention: Attention
    experts: int
    top_k: int
    expert_size: int
    shared_experts: int = 0
    dense_layers: int = 0
    dense_size: int = 0
    fp8: bool = False
    dtype: str = "bfloat16"
    more: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further fields of its config.json."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight of a projection or an expert."""
        return 1 if self.fp8 else BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of weights that one rank reads in a step, and the time that takes at least."""

    attention_bytes: int
    expert_bytes: int
    dense_bytes: int
    head_bytes: int
    experts_hit: float
    """Expected number of this rank's experts, a layer, that any token of the group goes to."""
    floor_ms: float

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.attention_bytes + self.expert_bytes + self.dense_bytes + self.head_bytes


def floor(shape: Shape, *, batch: int, ranks: int, tb_per_s: float = COPY_TB_PER_S) -> Floor:
    """The memory floor of a step of `batch` sequences a rank, experts spread over `ranks`."""
    assert shape.experts % ranks == 0
    local = shape.experts // ranks
    missed = (1 - shape.top_k / shape.experts) ** (batch * ranks)
    hit = local * (1 - missed)
    moe_layers = shape.layers - shape.dense_layers
    one = 3 * shape.hidden * shape.expert_size * shape.weight_bytes
    if shape.fp8:  # a float32 scale a block
        one += 4 * 3 * shape.hidden * shape.expert_size // FP8_BLOCK**2
    gate = shape.experts * shape.hidden * BYTES[shape.dtype]
    dense = shape.dense_layers * 3 * shape.hidden * shape.dense_size * shape.weight_bytes
    attention = shape.layers * shape.attention.weights(shape.hidden) * shape.weight_bytes
    experts = round(moe_layers * hit * one)
    dense += moe_layers * (gate + shape.shared_experts * one)
    head = shape.vocabulary * shape.hidden * BYTES[shape.dtype]
    total = attention + experts + dense + head
    return Floor(attention, experts, dense, head, hit, 1000 * total / (tb_per_s * 1e12))


def kv_bytes(shape: Shape, *, batch: int, length_tokens: int) -> int:
    """Bytes of KV cache that a step of `batch` sequences of this length reads."""
    a_token = shape.layers * shape.attention.cache_values() * BYTES[shape.dtype]
    return batch * length_tokens * a_token


def config(shape: Shape) -> dict[str, object]:
    """The model's config.json."""
    attention = shape.attention
    fields: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "torch_dtype": shape.dtype,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "intermediate_size": shape.dense_size or shape.expert_size,
        "moe_intermediate_size": shape.expert_size,
        "num_experts_per_tok": shape.top_k,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if attention.kv_rank:
        fields |= {
            "kv_lora_rank": attention.kv_rank,
            "q_lora_rank": attention.q_rank or None,
            "qk_nope_head_dim": attention.head_size,
            "qk_rope_head_dim": attention.rope_size,
            "v_head_dim": attention.value_size,
            "n_routed_experts": shape.experts,
            "n_shared_experts": shape.shared_experts,
            "first_k_dense_replace": shape.dense_layers,
            "moe_layer_freq": 1,
        }
    else:
        fields |= {"head_dim": attention.head_size, "num_experts": shape.experts}
    if shape.fp8:
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return fields | dict(shape.more)


def write(shape: Shape, folder: Path) -> Path:
    """Write the model's folder, which has a config.json and no weights; returns it."""
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    # Rows that start side by side write it again while others read it.
    part = path / f"config.{os.getpid()}.part"
    part.write_text(json.dumps(config(shape), indent=2), encoding="utf-8")
    part.replace(path / "config.json")
    return path


_QWEN = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_SOFTMAX = {
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}  # fmt: skip
_SIGMOID = {
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip

_TABLE = (
    Shape(
        name="cpu_tiny", words="2 layers, hidden 128, 8 experts top-2, float32, for the CPU",
        architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", layers=2, hidden=128,
        vocabulary=512, attention=Attention(heads=4, kv_heads=2, head_size=32), experts=8, top_k=2,
        expert_size=64, dtype="float32", more=_QWEN,
    ),
    Shape(
        name="cpu_mla", words="2 layers of DeepSeek-V3's kind, hidden 128, 8 experts, for the CPU",
        architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", layers=2, hidden=128,
        vocabulary=512, experts=8, top_k=2, expert_size=64, shared_experts=1, dense_layers=1,
        dense_size=256, more=_SIGMOID | {"n_group": 2, "topk_group": 1},
        attention=Attention(
            heads=4, kv_heads=4, head_size=128, kv_rank=512, q_rank=64, rope_size=64,
            value_size=128,
        ),
    ),
    Shape(
        name="small", words="4 layers, hidden 1024, 16 experts top-4",
        architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", layers=4, hidden=1024,
        vocabulary=32000, attention=Attention(heads=16, kv_heads=4, head_size=64), experts=16,
        top_k=4, expert_size=512, more=_QWEN,
    ),
    Shape(
        name="qwen3_30b_24l", words="24 layers of Qwen3-30B-A3B's shape, 128 experts top-8",
        architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", layers=24, hidden=2048,
        vocabulary=151936, attention=Attention(heads=32, kv_heads=4, head_size=128), experts=128,
        top_k=8, expert_size=768, more=_QWEN,
    ),
    Shape(
        name="deepseek_v2_lite", words="DeepSeek-V2-Lite's shape: 27 layers, MLA, 64 experts top-6",
        architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2", layers=27, hidden=2048,
        vocabulary=102400, experts=64, top_k=6, expert_size=1408, shared_experts=2, dense_layers=1,
        dense_size=10944, more=_SOFTMAX,
        attention=Attention(
            heads=16, kv_heads=16, head_size=128, kv_rank=512, rope_size=64, value_size=128
        ),
    ),
    Shape(
        name="deepseek_v3_4l",
        words="4 MoE layers of DeepSeek-V3's shape: hidden 7168, 256 experts top-8, FP8 blocks",
        architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3", layers=4, hidden=7168,
        vocabulary=129280, experts=256, top_k=8, expert_size=2048, shared_experts=1, fp8=True,
        more=_SIGMOID,
        attention=Attention(
            heads=128, kv_heads=128, head_size=128, kv_rank=512, q_rank=1536, rope_size=64,
            value_size=128,
        ),
    ),
)  # fmt: skip

SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in _TABLE}
"""Every shape, by name."""
