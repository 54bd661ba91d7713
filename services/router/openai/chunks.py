"""Answers of OpenAI's completions API as JSON."""

from collections.abc import Sequence

import msgspec

from services.router.front_door import Ending
from services.router.sink import Part
from splitwave.core.generation import TokenLogprob
from splitwave.text import Tokenizer

_encode = msgspec.json.Encoder().encode

DONE = b"[DONE]"


class Chunks:
    """Makes the JSON of one completion: chunks of its stream, or the whole of it.

    All of a chunk but its text is the same each time, so it is encoded once.
    """

    def __init__(
        self, completion_id: str, created_s: int, model: str, tokenizer: Tokenizer
    ) -> None:
        self._head: dict[str, object] = {
            "id": completion_id,
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        head = _encode(self._head)[:-1]
        self._before_text = head + b',"choices":[{"index":0,"text":'
        self._after_text = b',"logprobs":null,"finish_reason":null}]}'
        self._tokenizer = tokenizer
        self._text_chars = 0

    def part(self, part: Part) -> bytes:
        """A chunk with new text."""
        if not part.logprobs:
            return b"%b%b%b" % (self._before_text, _encode(part.text), self._after_text)
        return self._chunk(part.text, self.logprobs(part), None)

    def last(self, ending: Ending) -> bytes:
        """The chunk with the finish reason."""
        return self._chunk(ending.text, None, ending)

    def usage(self, ending: Ending) -> bytes:
        """The event behind the last chunk that counts tokens."""
        return _encode({**self._head, "choices": [], "usage": _usage(ending)})

    def whole(self, parts: Sequence[Part], ending: Ending) -> bytes:
        """The answer to a request that does not stream."""
        text = "".join(part.text for part in parts) + ending.text
        columns = [self.logprobs(part) for part in parts if part.logprobs]
        logprobs = _joined(columns) if columns else None
        choices = [_choice(text, logprobs, ending)]
        return _encode({**self._head, "choices": choices, "usage": _usage(ending)})

    def logprobs(self, part: Part) -> dict[str, list[object]]:
        """OpenAI's columns for the tokens of a part."""
        columns: dict[str, list[object]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for row in part.logprobs:
            token = self._token(row.token_id)
            columns["tokens"].append(token)
            columns["token_logprobs"].append(row.logprob)
            columns["top_logprobs"].append(self._top(row))
            columns["text_offset"].append(self._text_chars)
            self._text_chars += len(token)
        return columns

    def _chunk(
        self, text: str, logprobs: dict[str, list[object]] | None, ending: Ending | None
    ) -> bytes:
        return _encode({**self._head, "choices": [_choice(text, logprobs, ending)]})

    def _top(self, row: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the sampled one, by their text."""
        top = {self._token(token_id): logprob for token_id, logprob in row.top}
        top.setdefault(self._token(row.token_id), row.logprob)
        return top

    def _token(self, token_id: int) -> str:
        """A token alone: text, or its bytes where they are no whole characters."""
        piece = self._tokenizer.pieces(skip_special_tokens=False)[token_id]
        if isinstance(piece, bytes):
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        return piece or ""


def _choice(
    text: str, logprobs: dict[str, list[object]] | None, ending: Ending | None
) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if ending is None else ending.finish_reason.value,
    }
    if ending is not None:
        stopped_by = ending.stop_string if ending.stop_string else ending.stop_token_id
        choice["stop_reason"] = stopped_by
    return choice


def _joined(columns: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    return {name: [x for part in columns for x in part[name]] for name in columns[0]}


def _usage(ending: Ending) -> dict[str, object]:
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.completion_tokens,
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": ending.trail.cached_tokens},
    }
