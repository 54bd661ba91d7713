"""What completions and chats have in common: the fields of sampling, stopping and streaming.

Meanings: OpenAI's API reference, "Create completion" and "Create chat completion"; those
that it lacks as vLLM's server has them. None is the same as absent.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from services.router.order import check_choices
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.sampling_limits import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    SamplingLimits,
    check_sampling,
)
from splitwave.text import TextOptions


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both kinds of requests have."""

    model: str = ""
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
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None
    priority: int | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def streams(self) -> bool:
        """True if the answer is a stream of events."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with an event that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """True if each event of a stream counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def choices(self) -> int:
        """Completions of each prompt. Raises INVALID_REQUEST for none, or too many."""
        return check_choices(given_or(self.n, 1))

    def checked_priority(self) -> int:
        """The priority. Raises INVALID_REQUEST for one that no message can hold."""
        priority = given_or(self.priority, 0)
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise invalid(
                f"priority: {priority} is not in [{PRIORITY_MIN}, {PRIORITY_MAX}]; use another"
            )
        return priority

    def check_stream(self) -> None:
        """Raise for stream options without a stream, or those that are not served."""
        options = self.stream_options
        if options is None:
            return
        if not self.streams:
            raise invalid("stream_options: only with stream = true; set it, or leave this out")
        if options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise unsupported(f"{name}: events are not padded; leave it out")

    def sampling_with(
        self,
        limits: SamplingLimits,
        eos_token_ids: Sequence[int],
        *,
        max_tokens: int,
        logprobs: int | None,
    ) -> Sampling:
        """Checked sampling, with OpenAI's defaults where nothing is said."""
        sampling = Sampling(
            max_tokens=max_tokens,
            min_tokens=given_or(self.min_tokens, 0),
            temperature=given_or(self.temperature, 1.0),
            top_p=given_or(self.top_p, 1.0),
            top_k=0 if self.top_k == -1 else given_or(self.top_k, 0),  # vLLM's clients say off so.
            min_p=given_or(self.min_p, 0.0),
            seed=self.seed,
            presence_penalty=given_or(self.presence_penalty, 0.0),
            frequency_penalty=given_or(self.frequency_penalty, 0.0),
            repetition_penalty=given_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias or {},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=tuple(eos_token_ids),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )
        check_sampling(sampling, limits)
        return sampling

    def text_options(self, sampling: Sampling, ending_ids: frozenset[int]) -> TextOptions:
        """What is asked of the text."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return TextOptions(
            stop=tuple(stop),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=given_or(self.skip_special_tokens, True),
            min_tokens=sampling.min_tokens,
            stop_token_ids=ending_ids,
        )


T = TypeVar("T")


def given_or(given: T | None, default: T) -> T:
    """What was given, or the default."""
    return default if given is None else given


def invalid(message: str) -> ServingError:
    """A request that can never succeed; the message begins with the field."""
    return ServingError(Reason.INVALID_REQUEST, message)


def unsupported(message: str) -> ServingError:
    """A request for what is not served; the message begins with the field."""
    return ServingError(Reason.UNSUPPORTED_FEATURE, message)
