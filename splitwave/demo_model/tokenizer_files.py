"""The tokenizer files of the demo models."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRoles:
    """Which token has which role, and the template that uses them."""

    bos: str
    eos: str
    pad: str
    unk: str | None
    chat_template: str


def byte_level_bpe(
    tokens: Sequence[str], merges: Sequence[tuple[str, str]], special: Iterable[str]
) -> Tokenizer:
    """BPE over bytes. Ids are places in `tokens`; special tokens not among them follow."""
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    return tokenizer


def split_like_smollm2(tokenizer: Tokenizer) -> None:
    """Single digits, then GPT-2's words: what GGUF calls the pre-tokenizer "smollm"."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def split_nowhere(tokenizer: Tokenizer) -> None:
    """Bytes only: without merges there are no words to keep apart."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def save(directory: Path, tokenizer: Tokenizer, roles: TokenRoles, *, length_max: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        # Not GPT2Tokenizer: transformers would put that class's pre-tokenizer in place of ours.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length_max,
        "bos_token": roles.bos,
        "eos_token": roles.eos,
        "pad_token": roles.pad,
        "unk_token": roles.unk,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (directory / "chat_template.jinja").write_text(roles.chat_template)
