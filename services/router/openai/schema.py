"""Requests of OpenAI's completions API, as JSON brings them, and their checks.

Field meanings: OpenAI's API reference, "Create completion"; top_k, min_p,
repetition_penalty, stop_token_ids, ignore_eos, min_tokens, include_stop_str_in_output,
skip_special_tokens and priority as vLLM's server has them.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import SamplingLimits, check_sampling
from splitwave.text import TextOptions

MAX_TOKENS_DEFAULT = 16


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions. None is the same as absent."""

    model: str = ""
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    user: str | None = None
    priority: int | None = None

    @property
    def streams(self) -> bool:
        """True if the answer is a stream of events."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with an event that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def one_prompt(self) -> str | Sequence[int]:
        """The prompt: text, token ids, or a list of one of these."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if len(prompt) == 1 and not isinstance(prompt[0], int):
            return prompt[0]
        ids = [token_id for token_id in prompt if isinstance(token_id, int)]
        if len(ids) != len(prompt):
            raise _unsupported("prompt: several prompts in one request; send one request for each")
        return ids

    def sampling(self, eos_token_ids: Sequence[int], limits: SamplingLimits) -> Sampling:
        """Checked sampling, with OpenAI's defaults where nothing is said."""
        default = min(MAX_TOKENS_DEFAULT, limits.tokens_max or MAX_TOKENS_DEFAULT)
        sampling = Sampling(
            max_tokens=_or(self.max_tokens, default),
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=0 if self.top_k == -1 else _or(self.top_k, 0),  # vLLM's clients say off so.
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias or {},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=tuple(eos_token_ids),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprobs,
        )
        check_sampling(sampling, limits)
        return sampling

    def text_options(self, sampling: Sampling, ending_ids: frozenset[int]) -> TextOptions:
        """What is asked of the text."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return TextOptions(
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=_or(self.skip_special_tokens, True),
            min_tokens=sampling.min_tokens,
            stop_token_ids=ending_ids,
        )


T = TypeVar("T")

_DECODER = msgspec.json.Decoder(CompletionBody)


def read_completion(body: bytes) -> CompletionBody:
    """The body of a request. Raises INVALID_REQUEST or UNSUPPORTED_FEATURE, naming the field."""
    try:
        read = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(_fault(str(error))) from None
    except msgspec.DecodeError as error:
        raise _invalid(f"the body is not JSON: {error}; send one JSON object") from None
    _refuse_unsupported(read)
    return read


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.n not in (None, 1):
        raise _unsupported("n: only 1 completion a request is served; send several requests")
    if body.best_of not in (None, 1):
        raise _unsupported("best_of: only 1 is served; leave it out")
    if body.echo:
        raise _unsupported("echo: the prompt is not sent back; leave it out")
    if body.suffix:
        raise _unsupported("suffix: nothing is inserted before a suffix; leave it out")
    if body.stream_options is not None and not body.streams:
        raise _invalid("stream_options: only with stream = true; set it, or leave this out")


def _fault(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`", with the field first."""
    unknown = re.search(r"unknown field `(.*?)`", message)
    if unknown:
        return f"{unknown[1]}: unknown here; leave it out"
    missing = re.search(r"missing required field `(.*?)`", message)
    if missing:
        return f"{missing[1]}: absent; set it"
    placed = re.fullmatch(r"(.*?) - at `(?:key in )?\$\.?(.*?)`", message)
    if placed and placed[2]:
        return f"{placed[2]}: {placed[1]}; correct it"
    return f"the body: {message}; send one JSON object"


def _or(given: T | None, default: T) -> T:
    return default if given is None else given


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)


def _unsupported(message: str) -> ServingError:
    return ServingError(Reason.UNSUPPORTED_FEATURE, message)
