"""What is generated: sampling, tokens, their end, and the offsets a client sees."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter


class FinishReason(enum.StrEnum):
    """Why a generation ended well."""

    STOP = "stop"
    """A stop token, the end-of-sequence token or a stop string was produced."""
    LENGTH = "length"
    """max_tokens or the model's context length was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Bounds and shapes one generation. Every field is explicit; no engine default is relied on.

    Units: counts are tokens. Stop *strings* are not here: they are the router's work.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, the model's end-of-sequence ids not among them."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids, filled in by the router; ignored under ignore_eos."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off. k >= 0: the sampled token's log probability and those of the k most likely."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities (natural) at one position; `top` is most likely first, at most k pairs."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One generation as the pools see it: token ids in, token ids out."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0
    """Smaller goes first, as in vLLM."""


FEATURES = (
    "frequency_penalty", "logit_bias", "logprobs", "min_p", "min_tokens", "presence_penalty",
    "repetition_penalty", "seed", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip
"""Fields of `Sampling` that change how tokens are sampled or ended, sorted."""

_features_of = attrgetter(*FEATURES)
_PLAIN = _features_of(Sampling(max_tokens=1, temperature=0.0))


def features(sampling: Sampling) -> tuple[str, ...]:
    """Names of the features that a generation asks for beyond plain greedy sampling, sorted."""
    asked = _features_of(sampling)
    if asked == _PLAIN:
        return ()
    rows = zip(FEATURES, asked, _PLAIN, strict=True)
    return tuple(name for name, given, plain in rows if given != plain)


def first_token_is_kept(sampling: Sampling) -> bool:
    """True if prefill's sampled token may be shown and decode may go on behind it.

    An allow-list: whatever keeps state over a generation (seeded generators,
    penalties, minimum length) would start afresh in the decode engine, so with
    those decode produces every token, the first included.
    """
    return (
        sampling.min_tokens == 0
        and (sampling.seed is None or sampling.temperature == 0.0)
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and sampling.repetition_penalty == 1.0
    )


def attempt_id(request_id: str, choice: int, attempt: int) -> str:
    """Id of one attempt at one choice, which also names its handoff and its engine requests."""
    return f"{request_id}/{choice}/{attempt}"


class Completion:
    """The tokens that a client has been given, across attempts.

    Invariant: offsets are 0, 1, 2, ... without gap or repeat (I4 of the architecture).
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    @property
    def offset(self) -> int:
        """Offset of the next token."""
        return len(self.token_ids)

    def extend(self, offset: int, token_ids: Sequence[int]) -> None:
        """Append tokens that begin at `offset`. Raises OffsetBroken for a gap or a repeat."""
        if offset != len(self.token_ids):
            raise OffsetBroken(f"offset {offset} came where {len(self.token_ids)} was due")
        self.token_ids.extend(token_ids)


class OffsetBroken(Exception):
    """A token would have been repeated or left out: a peer broke the contract."""
