"""Token ids to text, piece by piece: what has been shown is never taken back."""

import codecs
from collections.abc import Sequence
from typing import Final

from splitwave.text.pieces import Decoding, Pieces
from splitwave.text.tokenizer import Tokenizer

_CHAR_BYTES_MAX: Final = 4
_REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """One completion's text as its tokens arrive.

    All that `push` returned plus what `finish` returns is `Tokenizer.decode` of the
    completion. With a prompt it is the text behind the prompt's: a leading space
    stays, and a character that the prompt began is completed here.

    Bytes wait until they are final. In a byte-level tokenizer those are at most
    three, the start of a character. With byte fallback the whole run of byte
    tokens waits for the token behind it, because one invalid byte turns the run
    into replacement characters.
    """

    __slots__ = ("_head", "_pieces", "_run", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        unfinished = unfinished_bytes(self._pieces, prompt_token_ids)
        byte_level = tokenizer.decoding is Decoding.BYTE_LEVEL
        self._run: _Utf8Run | _FallbackRun = (_Utf8Run if byte_level else _FallbackRun)(unfinished)
        follows_text = any(self._pieces[token_id] is not None for token_id in prompt_token_ids)
        self._head: list[int] | None = (
            [] if tokenizer.decoding.first_differs and not follows_text else None
        )
        """The tokens so far while none has made text, where the first text is special."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that became final, often empty."""
        if self._head is not None:
            return self._push_head(token_ids)
        pieces, run, text = self._pieces, self._run, ""
        for token_id in token_ids:
            piece = pieces[token_id]
            if type(piece) is str:
                text += run.end() + piece if run.octets else piece
            elif type(piece) is bytes:
                text += run.extend(piece)
        return text

    def finish(self) -> str:
        """Return what is left; bytes that never made a character become U+FFFD."""
        if self._head is not None:
            return self._tokenizer.decode(self._head, skip_special_tokens=False)
        return self._run.end()

    def _push_head(self, token_ids: Sequence[int]) -> str:
        """Decode from the start until there is text: a space lost there stays in what follows."""
        head = self._head
        assert head is not None
        for index, token_id in enumerate(token_ids):
            piece = self._pieces[token_id]
            if piece is None:
                continue
            head.append(token_id)
            if isinstance(piece, str):
                text = self._tokenizer.decode(head, skip_special_tokens=False)
                if text:
                    self._head = None
                    return text + self.push(token_ids[index + 1 :])
        return ""


class _Utf8Run:
    """The first bytes of a character whose rest has not come; at most three."""

    __slots__ = ("octets",)

    def __init__(self, octets: bytes) -> None:
        self.octets = octets

    def extend(self, octets: bytes) -> str:
        octets = self.octets + octets
        text, used = codecs.utf_8_decode(octets, "replace", False)
        self.octets = octets[used:]
        return text

    def end(self) -> str:
        text, _ = codecs.utf_8_decode(self.octets, "replace", True)
        self.octets = b""
        return text


class _FallbackRun:
    """Byte tokens since the last token of text."""

    __slots__ = ("octets",)

    def __init__(self, octets: bytes) -> None:
        self.octets = octets

    def extend(self, octets: bytes) -> str:
        self.octets += octets
        return ""

    def end(self) -> str:
        octets, self.octets = self.octets, b""
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(octets)


def unfinished_bytes(pieces: Pieces, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character without finishing it."""
    tail = b""
    for token_id in reversed(token_ids):
        piece = pieces[token_id]
        if isinstance(piece, str) or len(tail) >= _CHAR_BYTES_MAX:
            break
        tail = (piece or b"") + tail
    _, used = codecs.utf_8_decode(tail, "replace", False)
    return tail[used:]
