"""A random mixture of experts for a split on GPUs: real weights in files, tokens that are bytes.

As the tiny demo model, only as large as high-throughput kernels ask for, and calmer: layers add
less to what they get, and a router's last choice weighs little. With tiny's factors rounding alone
(bfloat16 beside float32 on one CPU engine) parts 9 of the check's 12 texts, with these 1; both
part all 11 that have a context once a quarter of it is permuted. Prefill and decode read
the same files, and so does the aggregated engine that they are compared with.

    python -m bench.split_gpu_model FOLDER
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splitwave.demo_model import safetensors, tiny
from splitwave.demo_model.gguf import Float32Array
from splitwave.demo_model.recipe import DemoModelOptions, Dtype, Variant

CONSTANT, RULED_OUT = 4.0, -100.0
TEXT = (ord("\n"), *range(ord(" "), ord("~") + 1))
DONE = "built.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is larger than tiny's, and calmer."""

    hidden: int = 1024
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    feed_forward: int = 512
    experts: int = 16
    top_k: int = 4
    seed: int = 11
    attention_part: float = 0.5
    expert_part: float = 0.3
    """What a layer's halves add, as deviations from a stream of deviation 1."""
    router_spread: float = 6.0
    """Deviation of a router's logits: the larger, the less its last choice weighs."""


def build(folder: Path, sizes: Sizes = Sizes()) -> Path:  # frozen
    """Write the model unless it is there already; returns the folder."""
    told = json.dumps(dataclasses.asdict(sizes))
    done = folder / DONE
    if done.exists() and done.read_text(encoding="utf-8") == told:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(sizes), indent=1))
    ends = {"bos_token_id": tiny.BOS_ID, "eos_token_id": tiny.END_ID, "pad_token_id": tiny.PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    tiny.write_tokenizer(folder)
    safetensors.write(folder / "model.safetensors", tensors(sizes), Dtype.BFLOAT16)
    done.write_text(told, encoding="utf-8")
    return folder


def config(sizes: Sizes) -> dict[str, object]:
    """The model's config.json."""
    options = DemoModelOptions(
        variant=Variant.TINY,
        experts=sizes.experts,
        experts_per_token=sizes.top_k,
        dtype=Dtype.BFLOAT16,
    )
    return tiny.config(options) | {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }


def tensors(sizes: Sizes) -> Iterator[tuple[str, Float32Array]]:
    """The model's tensors. Channel 0 is a constant that rules out every token but text."""
    draw = np.random.default_rng(sizes.seed)

    def normal(rows: int, columns: int, deviation: float) -> Float32Array:
        drawn: Float32Array = draw.standard_normal((rows, columns), np.float32)
        return drawn * np.float32(deviation)

    def residual(width: int, deviation: float) -> Float32Array:
        found = normal(sizes.hidden, width, deviation * width**-0.5)
        found[0] = 0.0
        return found

    embedding, head = normal(tiny.VOCAB, sizes.hidden, 1.0), normal(tiny.VOCAB, sizes.hidden, 0.5)
    embedding[:, 0], head[:, 0] = CONSTANT, RULED_OUT
    head[list(TEXT), 0] = 0.0
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", np.ones(sizes.hidden, np.float32)
    unit = sizes.hidden**-0.5
    for layer in range(sizes.layers):
        target = f"model.layers.{layer}"
        for norm in ("input", "post_attention"):
            yield f"{target}.{norm}_layernorm.weight", np.ones(sizes.hidden, np.float32)
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        yield f"{target}.self_attn.q_proj.weight", normal(queries, sizes.hidden, 1.5 * unit)
        yield f"{target}.self_attn.k_proj.weight", normal(keys, sizes.hidden, 1.5 * unit)
        yield f"{target}.self_attn.v_proj.weight", normal(keys, sizes.hidden, 2.0 * unit)
        yield f"{target}.self_attn.o_proj.weight", residual(queries, sizes.attention_part)
        moe = f"{target}.block_sparse_moe"
        yield f"{moe}.gate.weight", normal(sizes.experts, sizes.hidden, sizes.router_spread * unit)
        for expert in range(sizes.experts):
            name = f"{moe}.experts.{expert}"
            yield f"{name}.w2.weight", residual(sizes.feed_forward, sizes.expert_part)
            yield f"{name}.w1.weight", normal(sizes.feed_forward, sizes.hidden, 2.0 * unit)
            yield f"{name}.w3.weight", normal(sizes.feed_forward, sizes.hidden, 1.0 * unit)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
