"""A tokenizer for the simulated model, as the files of a model directory.

The simulator needs no model, but a router needs a tokenizer. This one has the ids
of the tiny demo model: a byte is its own id, and four special tokens follow.
"""

import json
from pathlib import Path

from splitwave.engine.sim.tokens import EOS_TOKEN_ID, VOCAB_SIZE

SPECIAL_TOKENS = {
    "<|pad|>": 256,
    "<|endoftext|>": 257,
    "<|im_start|>": 258,
    "<|im_end|>": EOS_TOKEN_ID,
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_vocabulary(model_dir: Path, *, model_len_max_tokens: int = 4096) -> None:
    """Write tokenizer.json and the configuration files that stand beside it, without weights."""
    model_dir.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model_len_max_tokens,
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
        "config.json": {
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": model_len_max_tokens,
            "bos_token_id": 257,
            "eos_token_id": EOS_TOKEN_ID,
        },
        "generation_config.json": {"bos_token_id": 257, "eos_token_id": EOS_TOKEN_ID},
    }
    for name, content in files.items():
        (model_dir / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _tokenizer() -> dict[str, object]:
    added = [
        {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for content, token_id in SPECIAL_TOKENS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    vocab = {_shown(byte): byte for byte in range(256)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _shown(byte: int) -> str:
    """The character by which byte-level vocabularies write a byte: printable, and never a space.

    Bytes that are such characters in Latin-1 stand for themselves, the rest follow from U+0100 on.
    """
    if _stands_for_itself(byte):
        return chr(byte)
    return chr(0x100 + sum(not _stands_for_itself(x) for x in range(byte)))


def _stands_for_itself(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
