"""Where one completion's tokens become text: called from the frame loop, never waits."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from splitwave.core.generation import Completion, TokenLogprob
from splitwave.text import TextStream


class Part(NamedTuple):
    """What one write added to a completion. A tuple, since one is made per token."""

    text: str
    """Final, and often empty: a character or a possible stop string may be incomplete."""
    token_ids: Sequence[int]
    offset: int
    logprobs: Sequence[TokenLogprob]
    """One row a token, or none."""


class TextSink:
    """Tokens in, parts out, until a stop string is found.

    `show` is called at once, from the loop that serves all streams of a session: it
    must not wait and should not raise.
    """

    def __init__(
        self,
        stream: TextStream,
        show: Callable[[Part], None],
        show_prompt: Callable[[Sequence[TokenLogprob]], None] = lambda rows: None,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._completion = Completion()
        self._stream = stream
        self._show = show
        self._show_prompt = show_prompt
        self._prompt_logprobs = prompt_logprobs
        self.shown_tokens = 0
        """Tokens that belong to the completion: those through the stop string's last."""
        self.stop_string: str | None = None
        self.first_at_s: float | None = None
        """When the first token came, on the loop's clock."""
        self.last_at_s = 0.0

    @property
    def token_ids(self) -> Sequence[int]:
        """What the client has been given."""
        return self._completion.token_ids

    def write(
        self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> bool:
        """Take tokens that begin at `offset`; True once a stop string was found."""
        self._completion.extend(offset, token_ids)
        if self.first_at_s is None:
            self.first_at_s = asyncio.get_running_loop().time()
        text, stopped, self.stop_string, used = self._stream.push(token_ids)
        if used < len(token_ids):
            token_ids, logprobs = token_ids[:used], logprobs[:used]
        self.shown_tokens += used
        self._show(Part(text, token_ids, offset, logprobs))
        return stopped

    def wants_prompt(self) -> int | None:
        """How many log probabilities of each prompt token are still wanted; None: none at all."""
        return self._prompt_logprobs

    def prompt(self, rows: Sequence[TokenLogprob]) -> None:
        """Take log probabilities of the prompt's tokens, the first token's not among them."""
        self._prompt_logprobs = None
        self._show_prompt(rows)

    def finish(self) -> str:
        """Text that was held back, for a completion that has ended; may hold a stop string."""
        text, _, stop_string, _ = self._stream.finish()
        self.stop_string = self.stop_string or stop_string
        return text
