"""Answers as they come: events of a stream, or the whole at once, in either form.

All of an event but its text is the same each time, so it is encoded once a choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from services.router.order import Ending
from services.router.sink import Part
from splitwave.core.generation import TokenLogprob

DONE: Final = b"[DONE]"

_encode = msgspec.json.Encoder().encode

Fields = dict[str, object]


class Form(Protocol):
    """How one kind of answer shows a choice. Keeps what it needs of each, so one an answer."""

    whole_object: str
    chunk_object: str
    before_text: bytes
    """What stands before a chunk's text inside its choice, behind the index."""
    after_text: bytes
    """What stands behind it."""

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Take the prompt's log probabilities, before `opening`."""

    def beside(self) -> Fields:
        """What stands beside the choices, once an answer; asked for behind `prompt`."""

    def opening(self, choice: int) -> Fields | None:
        """The choice in the first chunk, before any of its tokens; None: there is none."""

    def piece(self, choice: int, part: Part) -> Fields:
        """The choice in a chunk with new tokens."""

    def last(self, choice: int, ending: Ending) -> Fields:
        """The choice in the chunk that ends it."""

    def whole(self, choice: int, parts: Sequence[Part], ending: Ending) -> Fields:
        """The choice in an answer that does not stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What names an answer."""

    answer_id: str
    created_s: int
    model: str

    def fields(self, kind: str) -> Fields:
        """As they stand in every chunk."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What a stream tells beside its text."""

    usage: bool = False
    usage_always: bool = False
    every_token: bool = False
    """Also tokens without text of their own have an event, since it shows their ids."""


class Usage:
    """Counts the tokens of an answer: prompts once, all of their choices."""

    def __init__(
        self, prompts_tokens: Sequence[int], choices: int, *, scored_only: bool = False
    ) -> None:
        """`choices`: completions of each prompt; `scored_only`: which are not shown."""
        self._prompts_tokens, self._choices = prompts_tokens, choices
        self._scored_only = scored_only

    def of_choice(self, choice: int, completion_tokens: int) -> Fields:
        """One choice so far."""
        shown = 0 if self._scored_only else completion_tokens
        return _usage(self._prompts_tokens[choice // self._choices], shown)

    def of_all(self, endings: Mapping[int, Ending]) -> Fields:
        """A whole answer."""
        firsts = range(0, len(self._prompts_tokens) * self._choices, self._choices)
        cached = sum(endings[choice].trail.cached_tokens for choice in firsts)
        made = sum(ending.completion_tokens for ending in endings.values())
        usage = _usage(sum(self._prompts_tokens), 0 if self._scored_only else made)
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _usage(prompt_tokens: int, completion_tokens: int) -> Fields:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Streamed:
    """A viewer that writes events."""

    def __init__(
        self, head: Head, form: Form, telling: Telling, usage: Usage, write: Callable[[bytes], None]
    ) -> None:
        self._form, self._telling, self._usage, self._write = form, telling, usage, write
        self._fields = head.fields(form.chunk_object)
        self._start = _encode(self._fields)[:-1] + b',"choices":[{"index":'
        self._end = form.after_text + (b'}],"usage":null}' if telling.usage else b"}]}")
        self._before_text: dict[int, bytes] = {}
        """By choice; a choice is there once its first event is out."""
        self._tokens: dict[int, int] = {}
        self._endings: dict[int, Ending] = {}

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Keep them for the choice's first event."""
        self._form.prompt(choice, rows)

    def part(self, choice: int, part: Part) -> None:
        """Write what came, if it shows anything."""
        before_text = self._before_text.get(choice) or self._open(choice)
        self._tokens[choice] += len(part.token_ids)
        telling = self._telling
        if part.logprobs or telling.every_token or telling.usage_always:
            self._event(choice, self._form.piece(choice, part))
        elif part.text:  # A token without text of its own needs no event.
            self._write(b"%b%b%b" % (before_text, _encode(part.text), self._end))

    def end(self, choice: int, ending: Ending) -> None:
        """Write the finish reason."""
        if choice not in self._before_text:
            self._open(choice)
        self._endings[choice] = ending
        self._tokens[choice] = ending.completion_tokens
        self._event(choice, self._form.last(choice, ending))

    def finish(self) -> None:
        """Write the counts, if they were asked for: every choice has ended."""
        if self._telling.usage:
            usage = self._usage.of_all(self._endings)
            self._write(_encode({**self._fields, "choices": [], "usage": usage}))

    def _open(self, choice: int) -> bytes:
        beside = {} if self._before_text else self._form.beside()
        before_text = b"%b%d%b" % (self._start, choice, self._form.before_text)
        self._before_text[choice] = before_text
        self._tokens[choice] = 0
        opening = self._form.opening(choice)
        if opening is not None:
            self._event(choice, opening, beside)
        return before_text

    def _event(self, choice: int, fields: Fields, beside: Fields | None = None) -> None:
        chunk: Fields = {**self._fields, "choices": [fields], **(beside or {})}
        if self._telling.usage_always:
            chunk["usage"] = self._usage.of_choice(choice, self._tokens[choice])
        elif self._telling.usage:
            chunk["usage"] = None
        self._write(_encode(chunk))


class Whole:
    """A viewer that keeps all until the end."""

    def __init__(self, head: Head, form: Form, usage: Usage) -> None:
        self._form, self._usage = form, usage
        self._fields = head.fields(form.whole_object)
        self._parts: dict[int, list[Part]] = {}
        self._endings: dict[int, Ending] = {}

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Keep them."""
        self._form.prompt(choice, rows)

    def part(self, choice: int, part: Part) -> None:
        """Keep it."""
        self._parts.setdefault(choice, []).append(part)

    def end(self, choice: int, ending: Ending) -> None:
        """Keep it."""
        self._endings[choice] = ending

    def body(self) -> bytes:
        """The answer: every choice has ended."""
        choices = [
            self._form.whole(choice, self._parts.get(choice, []), ending)
            for choice, ending in sorted(self._endings.items())
        ]
        usage = self._usage.of_all(self._endings)
        shown = {**self._fields, "choices": choices, **self._form.beside(), "usage": usage}
        return _encode(shown)
