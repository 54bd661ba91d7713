"""Choices as OpenAI's completions API shows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.openai.answers import Fields
from services.router.openai.token_words import Offsets, TokenWords, finite
from services.router.order import Ending
from services.router.sink import Part
from splitwave.core.generation import TokenLogprob
from splitwave.text import Tokenizer

COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What a completion shows beside its text."""

    prompts: Sequence[tuple[str, Sequence[int]]]
    """Text and token ids of each prompt; the text is empty unless it is echoed."""
    choices: int = 1
    """Completions of each prompt."""
    echo: bool = False
    scored_only: bool = False
    """Show nothing that was generated."""
    logprobs: bool = False
    """Show OpenAI's columns."""
    prompt_logprobs: bool = False
    """Show vLLM's prompt_logprobs."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    skip_special_tokens: bool = True


class CompletionForm:
    """text_completion, in chunks or whole."""

    whole_object = chunk_object = "text_completion"
    before_text = b',"text":'
    after_text = b',"logprobs":null,"finish_reason":null'

    def __init__(self, tokenizer: Tokenizer, options: CompletionOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._words = TokenWords(tokenizer, as_ids=options.tokens_as_ids)
        self._prompt_rows: dict[int, Sequence[TokenLogprob]] = {}
        self._offsets: dict[int, Offsets] = {}

    def prompt(self, choice: int, rows: Sequence[TokenLogprob]) -> None:
        """Keep the prompt's log probabilities."""
        self._prompt_rows[choice // self._options.choices] = rows

    def beside(self) -> Fields:
        """Nothing: what is told of a prompt stands in its choices, since there may be several."""
        return {}

    def opening(self, choice: int) -> Fields | None:
        """The prompt, if it is shown."""
        options = self._options
        if not (options.echo or options.token_ids or options.prompt_logprobs):
            return None
        shown = options.echo and options.logprobs
        logprobs = self._prompt_columns(choice) if shown else None
        return {
            **_choice(choice, self._prompt(choice)[0], logprobs, None),
            **self._of_prompt(choice),
        }

    def piece(self, choice: int, part: Part) -> Fields:
        """New text."""
        shown = self._shown(part)
        columns = self._columns(choice, shown.logprobs) if shown.logprobs else None
        return {**_choice(choice, shown.text, columns, None), **self._ids([shown])}

    def last(self, choice: int, ending: Ending) -> Fields:
        """The last text and the finish reason."""
        text = "" if self._options.scored_only else ending.text
        return _choice(choice, text, None, ending)

    def whole(self, choice: int, parts: Sequence[Part], ending: Ending) -> Fields:
        """Everything of one choice."""
        options = self._options
        shown = [self._shown(part) for part in parts]
        text = self._prompt(choice)[0] + "".join(part.text for part in shown)
        text += "" if options.scored_only else ending.text
        logprobs = None
        if options.logprobs:
            logprobs = _empty_columns()
            if options.echo:
                logprobs = self._prompt_columns(choice)
            for part in shown:
                _extend(logprobs, self._columns(choice, part.logprobs))
        return {
            **_choice(choice, text, logprobs, ending),
            **self._of_prompt(choice),
            **self._ids(shown),
        }

    def _shown(self, part: Part) -> Part:
        return Part("", (), part.offset, ()) if self._options.scored_only else part

    def _prompt(self, choice: int) -> tuple[str, Sequence[int]]:
        return self._options.prompts[choice // self._options.choices]

    def _of_prompt(self, choice: int) -> Fields:
        fields: Fields = {}
        _, token_ids = self._prompt(choice)
        if self._options.token_ids:
            fields["prompt_token_ids"] = token_ids
        if self._options.prompt_logprobs:
            rows = self._prompt_rows.get(choice // self._options.choices, ())
            fields["prompt_logprobs"] = self._words.prompt(rows)
        return fields

    def _ids(self, parts: Sequence[Part]) -> Fields:
        if not self._options.token_ids:
            return {}
        return {"token_ids": [token_id for part in parts for token_id in part.token_ids]}

    def _prompt_columns(self, choice: int) -> dict[str, list[object]]:
        """The prompt in OpenAI's columns; nothing is known of its first token's likelihood."""
        _, token_ids = self._prompt(choice)
        rows = self._prompt_rows.get(choice // self._options.choices, ())
        return {
            "text_offset": [*self._offsets_of(choice).of(token_ids)],
            "token_logprobs": [None, *(finite(row.logprob) for row in rows)],
            "tokens": [self._words.word(token_id) for token_id in token_ids],
            "top_logprobs": [None, *(self._words.top(row) for row in rows)],
        }

    def _columns(self, choice: int, rows: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """New tokens in OpenAI's columns."""
        token_ids = [row.token_id for row in rows]
        return {
            "text_offset": [*self._offsets_of(choice).of(token_ids)],
            "token_logprobs": [finite(row.logprob) for row in rows],
            "tokens": [self._words.word(token_id) for token_id in token_ids],
            "top_logprobs": [self._words.top(row) for row in rows],
        }

    def _offsets_of(self, choice: int) -> Offsets:
        made = self._offsets.get(choice)
        if made is None:
            skip = self._options.skip_special_tokens
            made = self._offsets[choice] = Offsets(self._tokenizer, skip_special_tokens=skip)
        return made


def _choice(
    index: int, text: str, logprobs: dict[str, list[object]] | None, ending: Ending | None
) -> Fields:
    choice: Fields = {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if ending is None else ending.finish_reason.value,
    }
    if ending is not None:
        choice["stop_reason"] = stop_reason(ending)
    return choice


def stop_reason(ending: Ending) -> str | int | None:
    """The stop string, or the token id, that ended a choice; the end of sequence is neither."""
    return ending.stop_string if ending.stop_string else ending.stop_token_id


def _empty_columns() -> dict[str, list[object]]:
    return {name: [] for name in COLUMNS}


def _extend(columns: dict[str, list[object]], more: dict[str, list[object]]) -> None:
    for name in COLUMNS:
        columns[name] += more[name]
