"""A random mixture of experts, two layers small, whose tokens are bytes.

Channel 0 of the residual stream is a constant that no layer writes to; through
it the output matrix rules out every token but newline and printable ASCII, the
end-of-sequence token included: a completion is text, and as long as was asked.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final  # Any: JSON

import numpy as np

from splitwave.demo_model import safetensors, tokenizer_files
from splitwave.demo_model.gguf import Float32Array
from splitwave.demo_model.recipe import DemoModelOptions
from splitwave.demo_model.tokenizer_files import TokenRoles

HIDDEN: Final = 128
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
FEED_FORWARD: Final = 128
POSITIONS_MAX: Final = 8192
ROPE_THETA: Final = 10_000.0

PAD, BOS, START, END = SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, START_ID, END_ID = range(256, 260)
VOCAB: Final = 260

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nByte model.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CONSTANT: Final = 4.0
_RULED_OUT: Final = -100.0

Named = tuple[str, Float32Array]


def write(directory: Path, options: DemoModelOptions, say: Callable[[str], None]) -> None:
    """Write every file of the model but its stamp."""
    (directory / "config.json").write_text(json.dumps(config(options), indent=1))
    ends = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=1))
    (directory / "README.md").write_text("Random weights. Built by `splitwave demo-model`.\n")
    write_tokenizer(directory)
    say("wrote the tokenizer")
    safetensors.write(directory / "model.safetensors", tensors(options), options.dtype)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose first 256 ids are the bytes."""
    tokenizer = tokenizer_files.byte_level_bpe(_byte_tokens(), [], SPECIAL)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer_files.split_nowhere(tokenizer)
    roles = TokenRoles(bos=BOS, eos=END, pad=PAD, unk=None, chat_template=CHAT_TEMPLATE)
    tokenizer_files.save(directory, tokenizer, roles, length_max=POSITIONS_MAX)


def config(options: DemoModelOptions) -> dict[str, Any]:  # Any: JSON
    """The model's config.json."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS_MAX,
        "rms_norm_eps": 1e-5,
        # Both spellings: transformers 5 reads the second, older readers the first.
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "num_local_experts": options.expert_count,
        "num_experts_per_tok": options.experts_per_token,
        "sliding_window": None,
        "output_router_logits": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "dtype": options.dtype,
        "torch_dtype": options.dtype,
    }


def weight_count(options: DemoModelOptions) -> int:
    """Weights that `tensors` gives, for the room they need on disk."""
    return sum(weights.size for _, weights in tensors(options))


def tensors(options: DemoModelOptions) -> Iterator[Named]:
    """The model's tensors under their names in transformers. The order of draws is the recipe."""
    draw = _Draw(options.seed)
    embedding = draw.normal((VOCAB, HIDDEN), 1.0)
    embedding[:, 0] = _CONSTANT
    head = draw.normal((VOCAB, HIDDEN), 0.5)
    head[:, 0] = _RULED_OUT
    head[[ord("\n"), *range(ord(" "), ord("~") + 1)], 0] = 0.0
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        yield from _layer(f"model.layers.{layer}", draw, options)


def _layer(target: str, draw: "_Draw", options: DemoModelOptions) -> Iterator[Named]:
    for norm in ("input", "post_attention"):
        yield f"{target}.{norm}_layernorm.weight", np.ones(HIDDEN, np.float32)
    attention, unit = f"{target}.self_attn", HIDDEN**-0.5
    yield f"{attention}.q_proj.weight", draw.normal((HEADS * HEAD_DIM, HIDDEN), 1.5 * unit)
    yield f"{attention}.k_proj.weight", draw.normal((KV_HEADS * HEAD_DIM, HIDDEN), 1.5 * unit)
    yield f"{attention}.v_proj.weight", draw.normal((KV_HEADS * HEAD_DIM, HIDDEN), 2.0 * unit)
    yield f"{attention}.o_proj.weight", draw.residual(HEADS * HEAD_DIM, 2.0)
    moe = f"{target}.block_sparse_moe"
    yield f"{moe}.gate.weight", draw.normal((options.expert_count, HIDDEN), 2.0 * unit)
    for expert in range(options.expert_count):
        experts = f"{moe}.experts.{expert}"
        yield f"{experts}.w2.weight", draw.residual(FEED_FORWARD, 3.0)
        yield f"{experts}.w1.weight", draw.normal((FEED_FORWARD, HIDDEN), 2.0 * unit)
        yield f"{experts}.w3.weight", draw.normal((FEED_FORWARD, HIDDEN), 1.0 * unit)


class _Draw:
    """Normal numbers from the legacy generator, whose stream numpy has frozen."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)

    def normal(self, shape: tuple[int, int], deviation: float) -> Float32Array:
        return self._state.standard_normal(shape).astype(np.float32) * np.float32(deviation)

    def residual(self, width: int, deviation: float) -> Float32Array:
        """A matrix that adds to the residual stream, (hidden, width), and leaves channel 0 be."""
        weights = self.normal((HIDDEN, width), deviation * width**-0.5)
        weights[0] = 0.0
        return weights


def _byte_tokens() -> list[str]:
    """Bytes in order, each as its character of the byte-level alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    names = {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }
    return [names[byte] for byte in range(0x100)]
