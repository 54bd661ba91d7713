"""A GGUF file small enough to write by hand: a Llama model of two layers."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from splitwave.demo_model.gguf import Float32Array

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "Ġ"]

Tensor = tuple[tuple[int, ...], int, bytes]
"""Shape with the slowest dimension first, GGML type, packed weights."""


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    """Write a GGUF file of version 3."""
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _typed(value)
    offset, data = 0, bytearray()
    for name, (shape, kind, octets) in tensors.items():
        out += _string(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
        data += octets + bytes(-len(octets) % 32)
        offset = len(data)
    path.write_bytes(bytes(out) + bytes(-len(out) % 32) + bytes(data))
    return path


def small_llama(path: Path) -> Path:
    """Two layers with random weights in the formats of the real file."""
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.vocab_size": len(TOKENS),
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    rng = np.random.default_rng(5)
    tensors = {
        "token_embd.weight": quantized(rng.normal(size=(len(TOKENS), HIDDEN)), Q8_0),
        "output_norm.weight": quantized(rng.uniform(0.5, 2.0, HIDDEN), F32),
    }
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_width, HIDDEN),
            "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        for name, shape in shapes.items():
            weights = rng.normal(size=shape) * shape[1] ** -0.5
            tensors[f"blk.{layer}.{name}.weight"] = quantized(weights, Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = quantized(rng.uniform(0.5, 2, HIDDEN), F32)
    return write_gguf(path, metadata, tensors)


def quantized(weights: NDArray[np.float64], kind: int) -> Tensor:
    """Pack weights into a format; only the values that come back out matter to tests."""
    flat = weights.astype(np.float32).reshape(-1)
    pack: dict[int, Callable[[Float32Array], bytes]] = {
        F32: lambda values: values.tobytes(),
        F16: lambda values: values.astype("<f2").tobytes(),
        Q4_1: lambda values: b"".join(map(_pack_q4_1, values.reshape(-1, 32))),
        Q8_0: lambda values: b"".join(map(_pack_q8_0, values.reshape(-1, 32))),
    }
    return weights.shape, kind, pack[kind](flat)


def _pack_q4_1(values: Float32Array) -> bytes:
    low, high = values.min(), values.max()
    scale = (high - low) / 15
    quants = np.clip(np.round((values - low) / scale), 0, 15).astype(np.uint8)
    return struct.pack("<ee", scale, low) + bytes(quants[:16] | quants[16:] << 4)


def _pack_q8_0(values: Float32Array) -> bytes:
    scale = np.abs(values).max() / 127
    return struct.pack("<e", scale) + bytes(np.round(values / scale).astype(np.int8))


def _string(text: str) -> bytes:
    octets = text.encode()
    return struct.pack("<Q", len(octets)) + octets


def _typed(value: object) -> bytes:
    if isinstance(value, list):
        items = [_typed(item) for item in value]
        return (
            struct.pack("<I", 9)
            + items[0][:4]
            + struct.pack("<Q", len(items))
            + b"".join(item[4:] for item in items)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    assert isinstance(value, int)
    return struct.pack("<II", 4, value)
