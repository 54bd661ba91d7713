"""Tokens as answers spell them: alone, outside their text."""

import codecs
from collections.abc import Sequence

from splitwave.core.generation import TokenLogprob
from splitwave.text import Tokenizer

LOGPROB_MIN = -9999.0
"""JSON has no infinity; vLLM's server gives this too."""


class TokenWords:
    """How the tokens of one answer are spelled."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """`as_ids`: as token_id:7, which tells apart tokens of equal text."""
        self._pieces = tokenizer.pieces(skip_special_tokens=False)
        self._shown = tokenizer.pieces(skip_special_tokens=True)
        self._as_ids = as_ids

    def word(self, token_id: int) -> str:
        """A token: its text, or its bytes where they are no whole characters."""
        if self._as_ids:
            return f"token_id:{token_id}"
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        return piece or ""

    def octets(self, token_id: int) -> bytes:
        """The token's bytes."""
        piece = self._pieces[token_id]
        return piece if isinstance(piece, bytes) else (piece or "").encode()

    def top(self, row: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the sampled one."""
        top = {self.word(token_id): finite(logprob) for token_id, logprob in row.top}
        top.setdefault(self.word(row.token_id), finite(row.logprob))
        return top

    def prompt(self, rows: Sequence[TokenLogprob]) -> list[dict[str, object] | None]:
        """vLLM's prompt_logprobs: by token id, with rank and text; nothing of the first token."""
        return [None, *(self._ranked(row) for row in rows)]

    def _ranked(self, row: TokenLogprob) -> dict[str, object]:
        ranked = {token_id: (logprob, i) for i, (token_id, logprob) in enumerate(row.top, 1)}
        ranked[row.token_id] = (row.logprob, row.rank)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self.word(token_id),
            }
            for token_id, (logprob, rank) in ranked.items()
        }


class Offsets:
    """Where tokens begin in a text, in characters, as they come."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The place of each: that of its first whole character, behind one that it breaks off."""
        places = []
        for token_id in token_ids:
            piece = self._pieces[token_id] or b""
            octets = piece.encode() if isinstance(piece, str) else piece
            begun = bool(self._decoder.getstate()[0])
            text = self._decoder.decode(octets)
            places.append(self._chars + (begun and text.startswith("\ufffd")))
            self._chars += len(text)
        return places


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LOGPROB_MIN)
