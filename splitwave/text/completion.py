"""The text of one completion: detokenizer and stop strings, joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splitwave.text.detokenizer import Detokenizer
from splitwave.text.stop import StopStrings
from splitwave.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a request asks of its text."""

    stop: Sequence[str] = ()
    """Stop strings; the limits are in `splitwave.text.stop`."""
    include_stop: bool = False
    """Show the stop string, or the text of the stop token, that ended the completion."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Tokens before which no stop string counts."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids at which the engine ends this request, end-of-sequence among them unless ignored."""


class TextDelta(NamedTuple):
    """What one push added. A tuple, since one is made per token."""

    text: str
    """Text to show, final; often empty."""
    stopped: bool
    """True once a stop string was found: cancel the decode, show nothing more."""
    stop_reason: str | None
    """The stop string that was found."""
    token_count_used: int
    """How many of the tokens pushed belong to the completion: all, or those through the one
    whose text completed the stop string."""


class TextStream:
    """Token ids in, text to show out, until a stop string is found.

    `prompt_token_ids` is context only (see Detokenizer): stop strings are looked for
    in the completion alone.
    """

    __slots__ = ("_detokenizer", "_hidden_ends", "_stop_reason", "_stops", "_unarmed")

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Raise INVALID_REQUEST, naming the field, for stop strings that cannot be used."""
        self._stops = (
            StopStrings(options.stop, include_in_output=options.include_stop)
            if options.stop
            else None
        )
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_token_ids=prompt_token_ids,
        )
        self._hidden_ends = frozenset() if options.include_stop else options.stop_token_ids
        self._unarmed = options.min_tokens
        """Tokens still to come whose text cannot complete a stop string."""
        self._stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the tokens of one delta. After a stop nothing is added and no token is used."""
        if self._stop_reason is not None:
            return TextDelta("", True, self._stop_reason, 0)
        shown = token_ids
        if token_ids and token_ids[-1] in self._hidden_ends:
            shown = token_ids[:-1]
        if self._stops is not None:
            return self._push_watched(shown, len(token_ids), self._stops)
        return TextDelta(self._detokenizer.push(shown), False, None, len(token_ids))

    def finish(self) -> TextDelta:
        """Return what was held back, for a completion that its engine ended. No token is used."""
        if self._stop_reason is not None:
            return TextDelta("", True, self._stop_reason, 0)
        text = self._detokenizer.finish()
        if self._stops is not None:
            text, self._stop_reason = self._stops.push(text)
            if self._stop_reason is None:
                text += self._stops.finish()
        return TextDelta(text, self._stop_reason is not None, self._stop_reason, 0)

    def _push_watched(
        self, shown: Sequence[int], token_count: int, stops: StopStrings
    ) -> TextDelta:
        """Token by token, to know in which one a stop string fell."""
        text = ""
        for index, token_id in enumerate(shown):
            piece = self._detokenizer.push((token_id,))
            unarmed_chars = 0
            if self._unarmed > 0:
                self._unarmed -= 1
                unarmed_chars = len(piece)
            if not piece:
                continue
            emitted, self._stop_reason = stops.push(piece, unarmed_chars=unarmed_chars)
            text += emitted
            if self._stop_reason is not None:
                return TextDelta(text, True, self._stop_reason, index + 1)
        return TextDelta(text, False, None, token_count)
