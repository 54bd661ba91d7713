"""A model directory with random weights, for machines that no weights can be brought to.

    python -m bench.split.weights qwen3_30b_24l TOKENIZER_DIR OUT_DIR

The shape is one of bench.decode_modes.models with its experts in Mixtral's form, which every
engine here serves; the tokenizer, and so the vocabulary, is that of an existing model directory.
Weights are drawn as bench.decode_modes.weights draws them: by name, so that two machines get the
same, and so large that tokens depend on all of them.
"""

import argparse
import json
import math
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # torch is untyped here

from bench.decode_modes.models import SHAPES, Shape

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = 4 * 2**30
GATE_GAIN = 2.0
"""Spread of the router's logits: a near tie at the last place then has little weight."""


def config(shape: Shape, tokens: dict[str, Any]) -> dict[str, Any]:
    """The model's config.json; `tokens` is the tokenizer's model's."""
    attention = shape.attention
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": tokens["vocab_size"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "sliding_window": None,
        "output_router_logits": False,
        "torch_dtype": shape.dtype,
        **{name: tokens.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def tensors(shape: Shape, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every weight's name and size, as Mixtral's checkpoints have them."""
    attention, hidden = shape.attention, shape.hidden
    queries, keys = attention.heads * attention.head_size, attention.kv_heads * attention.head_size
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (hidden,)
        yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield f"{at}self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}block_sparse_moe.gate.weight", (shape.experts, hidden)
        for expert in range(shape.experts):
            one = f"{at}block_sparse_moe.experts.{expert}."
            yield f"{one}w1.weight", (shape.expert_size, hidden)
            yield f"{one}w2.weight", (hidden, shape.expert_size)
            yield f"{one}w3.weight", (shape.expert_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def spread(name: str, size: tuple[int, ...]) -> float:
    """Standard deviation of a weight: a row of it keeps the size of what it multiplies."""
    if "embed_tokens" in name:
        return 1.0
    return (GATE_GAIN if name.endswith("gate.weight") else 1.0) / math.sqrt(size[-1])


def write(shape: Shape, tokenizer: Path, out: Path, device: str, shard_bytes: int) -> None:
    """Write the directory; raises ValueError for a shape that Mixtral's form cannot have."""
    import torch
    from safetensors.torch import save_file

    attention = shape.attention
    if attention.kv_rank or shape.shared_experts or shape.dense_layers or shape.fp8:
        raise ValueError(f"{shape.name}: only plain attention and experts alone can be written")
    out.mkdir(parents=True, exist_ok=True)
    told = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    for file in TOKENIZER_FILES:
        if (tokenizer / file).exists():
            shutil.copyfile(tokenizer / file, out / file)
    dtype = getattr(torch, shape.dtype)
    shard: dict[str, Any] = {}
    places: dict[str, str] = {}
    bytes_, number = 0, 0
    for name, size in tensors(shape, told["vocab_size"]):
        shard[name] = _drawn(name, size, dtype, device)
        bytes_ += shard[name].nbytes
        places[name] = f"model-{number:05d}.safetensors"
        if bytes_ >= shard_bytes:
            save_file(shard, out / places[name], metadata={"format": "pt"})
            shard, bytes_, number = {}, 0, number + 1
    if shard:
        save_file(shard, out / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    files = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": places},
        "config.json": config(shape, told),
        "generation_config.json": {"eos_token_id": told.get("eos_token_id")},
    }
    for file, content in files.items():
        (out / file).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _drawn(name: str, size: tuple[int, ...], dtype: Any, device: str) -> Any:  # torch's
    import torch

    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.empty(size, dtype=dtype, device=device)
    return drawn.normal_(0.0, spread(name, size), generator=generator).cpu()


def main() -> int:
    """Write one model."""
    parser = argparse.ArgumentParser(prog="bench.split.weights", description=__doc__)
    parser.add_argument("shape", choices=[name for name, s in SHAPES.items() if not s.fp8])
    parser.add_argument("tokenizer", type=Path, help="a model directory")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", help="what draws: cpu, or cuda, which is fast")
    asked = parser.parse_args()
    write(SHAPES[asked.shape], asked.tokenizer, asked.out, asked.device, SHARD_BYTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
