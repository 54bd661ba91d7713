"""What a client orders, and what it is shown of it: the words between front door and protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.router.attempts import Trail
from services.router.sink import Part
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.text import TextOptions

CHOICES_MAX = 128
"""Completions of one prompt."""


def check_choices(choices: int) -> int:
    """Give the number back, or raise INVALID_REQUEST for one that cannot be served."""
    if not 1 <= choices <= CHOICES_MAX:
        raise ServingError(
            Reason.INVALID_REQUEST,
            f"n: {choices} is not in [1, {CHOICES_MAX}]; send several requests",
        )
    return choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Completions of one prompt, checked and ready to be served."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    text: TextOptions
    choices: int = 1
    """How many completions; each is decoded on its own, and they are admitted all or none."""
    first_choice: int = 0
    """Index of the first of them in the client's answer."""
    prompt_logprobs: int | None = None
    """None: off. k >= 0: log probabilities of the prompt's tokens and of the k most likely."""
    priority: int = 0
    timeout_s: float | None = None
    """Time the caller gives; None: the router's limit."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a completion ended well. Times are seconds, as the router saw them."""

    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    text: str
    """The last text, which had been held back."""
    prompt_tokens: int
    completion_tokens: int
    trail: Trail
    first_token_s: float
    total_s: float


class Viewer(Protocol):
    """Sees an answer as it comes. Called from the loop that serves all streams: never waits.

    For each choice: `prompt` at most once, then parts, then `end` unless the request fails.
    """

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Log probabilities of the prompt's tokens behind the first, if they were asked for."""

    def part(self, choice: int, part: Part) -> None:
        """New tokens of a choice."""

    def end(self, choice: int, ending: Ending) -> None:
        """A choice has ended well."""
