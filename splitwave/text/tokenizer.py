"""Text to token ids, as the model's own fast tokenizer does it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tokenizers

from splitwave.core.errors import Reason, ServingError
from splitwave.text.chat import ChatTemplate
from splitwave.text.model_files import (
    CHAT_TEMPLATE,
    CONFIG,
    TOKENIZER,
    ModelDirectoryError,
    ModelFiles,
    token_content,
)
from splitwave.text.pieces import Decoding, Pieces, decoding_of

ENCODE_ON_LOOP_MAX_CHARS: Final = 2_000
"""Longer prompts are encoded in a thread: 2,000 characters are about 0.7 ms of the loop's time."""

DECODE_ON_LOOP_MAX_TOKENS: Final = 2_000
"""Longer texts are decoded in a thread: 2,000 tokens are about 0.7 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A model's tokenizer and what its directory says about text. Safe to share between threads."""

    backend: tokenizers.Tokenizer = field(repr=False)
    decoding: Decoding
    eos_token_ids: frozenset[int]
    """Ids that end a generation: the tokenizer's own and those of generation_config.json."""
    bos_token_id: int | None
    special_ids: frozenset[int]
    """Ids that `skip_special_tokens` leaves out of the text."""
    named_tokens: Mapping[str, str]
    """Role to text, such as bos_token; chat templates use them."""
    vocab_size: int
    """Rows of the model's embedding: every id below is valid input. May exceed the tokenizer's."""
    model_len_max: int | None
    """Tokens of prompt and completion the model was made for; None if config.json is silent."""
    chat_template: str | None = field(repr=False)
    chat: ChatTemplate | None = field(repr=False)
    """Turns conversations into prompts; None if the model has no chat template."""
    shown_pieces: Pieces = field(repr=False)
    """What tokens add to a text that leaves special tokens out."""
    all_pieces: Pieces = field(repr=False)
    """What tokens add to a text that shows special tokens."""

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read the tokenizer of a model directory, or raise ModelDirectoryError."""
        files = ModelFiles.read(model_dir)
        source = str(model_dir / TOKENIZER)
        decoding = decoding_of(files.tokenizer, source)
        backend = _backend(files, source)
        added = backend.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        named_tokens = files.named_tokens()
        own_eos_id = backend.token_to_id(named_tokens.get("eos_token", ""))
        own_eos_ids = frozenset() if own_eos_id is None else frozenset({own_eos_id})
        return cls(
            backend=backend,
            decoding=decoding,
            eos_token_ids=files.eos_token_ids() | own_eos_ids,
            bos_token_id=backend.token_to_id(named_tokens.get("bos_token", "")),
            special_ids=special_ids,
            named_tokens=named_tokens,
            vocab_size=_vocab_size(files, backend),
            model_len_max=files.model_int("max_position_embeddings"),
            chat_template=files.chat_template,
            chat=_chat(files, named_tokens),
            shown_pieces=Pieces(backend, decoding, special_ids),
            all_pieces=Pieces(backend, decoding, frozenset()),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text become their ids.

        `add_special_tokens` applies the template of tokenizer.json, such as a leading bos. Like
        transformers 5, this does not read add_bos_token of tokenizer_config.json beside it.
        Takes about 0.35 us a character and releases the interpreter lock meanwhile.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # JSON can smuggle in half of a surrogate pair, which no UTF-8 text holds.
            raise ServingError(
                Reason.INVALID_REQUEST,
                "prompt: holds a lone surrogate, so it is not valid Unicode; send UTF-8 text",
            ) from None

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode` that does not hold up the event loop for a long text."""
        if len(text) <= ENCODE_ON_LOOP_MAX_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole completion; `Detokenizer` gives the same text piece by piece."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """`decode` that does not hold up the event loop for a long text."""
        if len(token_ids) <= DECODE_ON_LOOP_MAX_TOKENS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(
            self.decode, token_ids, skip_special_tokens=skip_special_tokens
        )

    def pieces(self, *, skip_special_tokens: bool) -> Pieces:
        """What each token adds to a text."""
        return self.shown_pieces if skip_special_tokens else self.all_pieces


def _chat(files: ModelFiles, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    if files.chat_template is None:
        return None
    try:
        return ChatTemplate(files.chat_template, named_tokens)
    except ValueError as error:
        raise ModelDirectoryError(
            f"{files.directory / CHAT_TEMPLATE}, or chat_template of tokenizer_config.json: not a"
            f" template: {error}; copy it again from the model's source, or remove it"
        ) from error


def _backend(files: ModelFiles, source: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(source)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelDirectoryError(
            f"{source}: not a tokenizer: {error}; copy it again from the model's source"
        ) from error
    # Settings of training, not of serving: a prompt is never cut or filled up unasked.
    backend.no_truncation()
    backend.no_padding()
    _add_configured_tokens(backend, files)
    return backend


def _add_configured_tokens(backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
    """Add tokens that only tokenizer_config.json knows, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = files.tokenizer_config.get("added_tokens_decoder")
    entries = listed if isinstance(listed, dict) else {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = token_content(entry)
        if content is None or content in known:
            continue
        known.add(content)
        flags = {key: bool(flag) for key, flag in entry.items() if key in _TOKEN_FLAGS}
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
    for content in (*files.named_tokens().values(), *files.extra_special_tokens()):
        if content not in known:
            known.add(content)
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True)])


_TOKEN_FLAGS: Final = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})


def _vocab_size(files: ModelFiles, backend: tokenizers.Tokenizer) -> int:
    rows, tokens = files.model_int("vocab_size"), backend.get_vocab_size()
    if rows is None:
        return tokens
    if rows <= 0:
        raise ModelDirectoryError(
            f"{files.directory / CONFIG}: vocab_size is {rows}; it must be the number of rows of"
            " the embedding"
        )
    return rows
