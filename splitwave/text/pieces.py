"""What each token adds to a text, so that streaming costs one look-up a token.

Decoding a whole completion again for every token is quadratic, and windows over
it (decode some tokens back, cut the common prefix) go wrong where a decoder
looks at its first token or judges a run of bytes as a whole. The decoders of
language models are simpler than that: a token adds either text, or bytes that
make text with their neighbours. `decoding_of` reads from tokenizer.json which
rule holds, and refuses decoders that know no such rule.
"""

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import tokenizers

from splitwave.text.model_files import ModelDirectoryError

Piece = str | bytes | None
"""Text, bytes that need their neighbours, or None: a token without any part in the text."""


class Decoding(enum.Enum):
    """How a tokenizer's decoder joins tokens."""

    BYTE_LEVEL = "every token is bytes; the text is their UTF-8, invalid parts replaced"
    BYTE_FALLBACK = "tokens are text; a run of byte tokens is UTF-8 as a whole or all replaced"
    TEXT = "tokens are text"

    @property
    def first_differs(self) -> bool:
        """True if the start of a text is decoded in another way, such as without its space."""
        return self is not Decoding.BYTE_LEVEL


class Pieces(dict[int, Piece]):
    """Token id to Piece, filled in as tokens are met; at most one entry a token of the vocabulary.

    Shared by all streams of one tokenizer and one choice of skipping special tokens.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, decoding: Decoding, hidden_ids: frozenset[int]
    ) -> None:
        super().__init__()
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._piece_of: Callable[[int, str], Piece] = {
            Decoding.BYTE_LEVEL: self._byte_level,
            Decoding.BYTE_FALLBACK: self._byte_fallback,
            Decoding.TEXT: self._text,
        }[decoding]

    def __missing__(self, token_id: int) -> Piece:
        assert token_id >= 0
        token = self._backend.id_to_token(token_id)
        if (
            token is None
        ):  # Padded rows of the embedding have no token; not kept, ids are unbounded.
            return None
        piece = None if token_id in self._hidden_ids else self._piece_of(token_id, token)
        self[token_id] = piece
        return piece

    def _byte_level(self, _token_id: int, token: str) -> Piece:
        octets = _byte_level_octets(token)
        try:
            return octets.decode() or None
        except UnicodeDecodeError:
            return octets

    def _byte_fallback(self, token_id: int, token: str) -> Piece:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else self._text(token_id, token)

    def _text(self, token_id: int, _token: str) -> str:
        """What the token adds behind another: behind itself, since any will do."""
        once, twice = (
            self._backend.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2)
        )
        assert twice.startswith(once)
        return twice[len(once) :]


def decoding_of(tokenizer_json: Mapping[str, object], source: str) -> Decoding:
    """The rule that the decoder of a tokenizer.json follows.

    Raises ModelDirectoryError, naming `source`, for one that cannot be streamed exactly.
    """
    steps = list(_steps(tokenizer_json.get("decoder")))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding.BYTE_LEVEL
    behind: set[object] = set()
    for step in steps:
        if not _is_local(step, behind):
            raise ModelDirectoryError(
                f"{source}: decoder step {step.get('type')!r} cannot be streamed token by token"
                f" behind {sorted(map(str, behind))}; use a model whose decoder is ByteLevel,"
                " Metaspace, WordPiece or a sequence of Replace, ByteFallback, Fuse and a Strip"
                " of the start"
            )
        behind.add(step.get("type"))
    return Decoding.BYTE_FALLBACK if "ByteFallback" in kinds else Decoding.TEXT


_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


def _steps(decoder: object) -> Iterator[Mapping[str, object]]:
    if not isinstance(decoder, dict):
        return
    nested = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(nested, list):
        yield decoder
        return
    for step in nested:
        yield from _steps(step)


def _is_local(step: Mapping[str, object], behind: set[object]) -> bool:
    """True if a step treats each token alone, the start of the text aside.

    Behind ByteFallback and Fuse a string is more than one token: replacing there
    could join neighbours, and stripping its end would need to know the end.
    """
    kind = step.get("type")
    joined = not behind.isdisjoint({"ByteFallback", "Fuse"})
    if kind == "Strip":
        return not joined or ("Fuse" in behind and step.get("stop") == 0)
    if kind == "Fuse":
        return True
    return kind in {"Replace", "ByteFallback", "Metaspace", "WordPiece"} and not joined


def _byte_level_octets(token: str) -> bytes:
    """Bytes of a token in the byte-level alphabet; one with a foreign character is plain text."""
    if _ALPHABET.issuperset(token):
        return token.translate(_OCTET_OF).encode("latin-1")
    return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET: Final = frozenset(_byte_level_alphabet())
_OCTET_OF: Final = str.maketrans({char: chr(byte) for char, byte in _byte_level_alphabet().items()})
