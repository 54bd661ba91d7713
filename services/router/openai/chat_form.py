"""Choices as OpenAI's chat API shows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.openai.answers import Fields
from services.router.openai.completion_form import stop_reason
from services.router.openai.token_words import TokenWords, finite
from services.router.order import Ending
from services.router.sink import Part
from splitwave.core.generation import TokenLogprob
from splitwave.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormOptions:
    """What a chat's answer shows beside its text."""

    role: str = "assistant"
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: bool = False
    """Show vLLM's prompt_logprobs."""


class ChatForm:
    """chat.completion, or its chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    before_text = b',"delta":{"content":'
    after_text = b'},"logprobs":null,"finish_reason":null'

    def __init__(self, tokenizer: Tokenizer, options: ChatFormOptions) -> None:
        self._options = options
        self._words = TokenWords(tokenizer, as_ids=options.tokens_as_ids)
        self._prompt_rows: Sequence[TokenLogprob] = ()

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Keep the prompt's log probabilities: of every choice they are the same."""
        self._prompt_rows = rows

    def beside(self) -> Fields:
        """The conversation's tokens, where vLLM has them: a chat has one prompt."""
        fields: Fields = {}
        if self._options.token_ids:
            fields["prompt_token_ids"] = self._options.prompt_token_ids
        if self._options.prompt_logprobs:
            fields["prompt_logprobs"] = self._words.prompt(self._prompt_rows)
        return fields

    def opening(self, choice: int) -> Fields | None:
        """Who speaks."""
        delta: Fields = {"role": self._options.role, "content": ""}
        return _choice(choice, None, None, delta=delta)

    def piece(self, choice: int, part: Part) -> Fields:
        """New text."""
        logprobs = self._logprobs([part]) if self._options.logprobs else None
        delta: Fields = {"content": part.text}
        return {**_choice(choice, logprobs, None, delta=delta), **self._ids([part])}

    def last(self, choice: int, ending: Ending) -> Fields:
        """The last text and the finish reason."""
        delta: Fields = {"content": ending.text} if ending.text else {}
        return _choice(choice, None, ending, delta=delta)

    def whole(self, choice: int, parts: Sequence[Part], ending: Ending) -> Fields:
        """Everything of one choice."""
        message: Fields = {
            "role": self._options.role,
            "content": "".join(part.text for part in parts) + ending.text,
            "refusal": None,
        }
        logprobs = self._logprobs(parts) if self._options.logprobs else None
        return {
            **_choice(choice, logprobs, ending, message=message),
            **self._ids(parts),
        }

    def _ids(self, parts: Sequence[Part]) -> Fields:
        if not self._options.token_ids:
            return {}
        return {"token_ids": [token_id for part in parts for token_id in part.token_ids]}

    def _logprobs(self, parts: Sequence[Part]) -> Fields:
        rows = [row for part in parts for row in part.logprobs]
        return {"content": [self._row(row) for row in rows], "refusal": None}

    def _row(self, row: TokenLogprob) -> Fields:
        top = [self._entry(token_id, logprob) for token_id, logprob in row.top]
        return {**self._entry(row.token_id, row.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Fields:
        return {
            "token": self._words.word(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._words.octets(token_id)),
        }


def _choice(index: int, logprobs: Fields | None, ending: Ending | None, **said: Fields) -> Fields:
    """`said` is the message, or its delta."""
    choice: Fields = {
        "index": index,
        **said,
        "logprobs": logprobs,
        "finish_reason": None if ending is None else ending.finish_reason.value,
    }
    if ending is not None:
        choice["stop_reason"] = stop_reason(ending)
    return choice
