"""The simulated model: tokens that follow from all tokens before them.

The state of a sequence, which stands for its KV cache, is a checksum over its
token ids. The next token is a hash of that state, the position and what shapes
the sampling. So a split generation equals an aggregated one exactly if every
token was right and in its place: one that is wrong, missing or repeated changes
the text behind it.

Ids are those of the tiny demo model: 0 to 255 are bytes, of which only printable
ASCII and the newline are sampled; 259 ends a sequence and is sampled at
`eos_rate` only.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from splitwave.core.generation import FinishReason, Sampling, TokenLogprob

EOS_TOKEN_ID = 259
VOCAB_SIZE = 260
ALPHABET: tuple[int, ...] = (10, *range(32, 127))
"""Ids that are sampled, the end of sequence apart."""

LOGPROBS_MAX = len(ALPHABET) - 1
"""Most likely tokens that are told; whoever asks for more gets these."""

_ALPHABET_TWICE = ALPHABET * 2
_MASK_64 = (1 << 64) - 1
_EOS_SCALE = 1 << 24
_TOKEN_BYTES = tuple(token_id.to_bytes(4, "little") for token_id in range(VOCAB_SIZE))
_RANK_DISTANCE = 0.5
_RANKS_SAMPLED = 4


def extend(state: int, token_ids: Sequence[int]) -> int:
    """State after `token_ids` follow what `state` stands for.

    Raises OverflowError for an id outside 0 .. 2**32 - 1, TypeError for one that is no int.
    """
    return crc32(array("I", token_ids), state)


def spoiled(state: int) -> int:
    """What a state becomes when its blocks were written by someone else before they were read."""
    return state ^ 0xA5A5_5A5A


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation, as an aggregated engine would give it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    """Empty if they were not asked for."""
    finish: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """What every group that serves one simulated model agrees on."""

    seed: int = 0
    eos_rate: float = 0.0
    length_max_tokens: int = 4096
    recites: bytes = b""
    """What it says over and over, by position, whatever it is asked; empty: made-up text."""

    @property
    def empty_state(self) -> int:
        """State before any token."""
        return crc32(str(self.seed).encode())

    def complete(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """The right answer to a prompt: what a test compares split serving with."""
        state = extend(self.empty_state, token_ids)
        going = Continuation(self, state=state, length=len(token_ids), sampling=sampling)
        made: list[int] = []
        logprobs: list[TokenLogprob] = []
        while going.finish is None:
            made.append(going.advance())
            if sampling.logprobs is not None:
                logprobs.append(going.logprob())
        return Completion(made, logprobs, going.finish, going.stop_token_id)


def prompt_logprobs(token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Made-up log probabilities of a prompt's tokens but the first, fixed by those before each."""
    rows = []
    state = 0
    for before, token_id in itertools.pairwise(token_ids):
        state = crc32(_TOKEN_BYTES[before], state)
        first = -1.0 / 1024 * (1 + state % 512)
        rank = 1 + (state >> 10) % _RANKS_SAMPLED
        ordered = [x for x in ALPHABET[: count + 1] if x != token_id]
        ordered.insert(rank - 1, token_id)
        top = tuple((x, first - _RANK_DISTANCE * i) for i, x in enumerate(ordered[:count]))
        rows.append(TokenLogprob(token_id, first - _RANK_DISTANCE * (rank - 1), rank, top))
    return rows


class Continuation:
    """One generation of one engine request, from a state on.

    `made` counts its tokens from 0 again in every engine request, as a real
    engine's seeded generators and penalties do.
    """

    __slots__ = (
        "_bits",
        "_end_ids",
        "_eos_below",
        "_logprobs",
        "_made_max",
        "_min_tokens",
        "_per_token",
        "_rank_count",
        "_recites",
        "_salt",
        "finish",
        "length",
        "made",
        "state",
        "stop_token_id",
        "token_id",
    )

    def __init__(self, model: SimModel, *, state: int, length: int, sampling: Sampling) -> None:
        self.state = state
        self.length = length
        """Tokens that `state` stands for, which is the position of the next one."""
        self.made = 0
        self.token_id = -1
        self.finish: FinishReason | None = None
        self.stop_token_id: int | None = None
        ends = sampling.stop_token_ids
        self._end_ids = frozenset(ends if sampling.ignore_eos else ends + sampling.eos_token_ids)
        self._min_tokens = sampling.min_tokens
        self._made_max = min(sampling.max_tokens, model.length_max_tokens - length)
        self._eos_below = int(model.eos_rate * _EOS_SCALE)
        self._logprobs = sampling.logprobs
        self._recites = model.recites
        self._rank_count = _RANKS_SAMPLED if sampling.temperature else 1
        self._salt = _salt(sampling)
        self._per_token = 0x2545_F491_4F6C_DD1D if _keeps_state(sampling) else 0
        self._bits = 0

    def advance(self) -> int:
        """Sample and append one token; sets `finish` and `stop_token_id` when it is the last."""
        token = self._sample(0)
        made = self.made
        ends = token in self._end_ids
        if ends and made < self._min_tokens:
            token, ends = self._sample_inside(), False
        self.token_id = token
        self.state = crc32(_TOKEN_BYTES[token], self.state)
        self.length += 1
        self.made = made + 1
        if ends:
            self.finish = FinishReason.STOP
            self.stop_token_id = token
        elif made + 1 >= self._made_max:
            self.finish = FinishReason.LENGTH
        return token

    def _sample(self, attempt: int) -> int:
        bits = (
            self.state * 0x9E37_79B9_7F4A_7C15
            + self.length * 0xC2B2_AE3D_27D4_EB4F
            + self.made * self._per_token
            + self._salt
            + attempt
        ) & _MASK_64
        bits = (bits ^ (bits >> 31)) * 0xBF58_476D_1CE4_E5B9 & _MASK_64
        self._bits = bits ^ (bits >> 29)
        if self._bits & (_EOS_SCALE - 1) < self._eos_below:
            return EOS_TOKEN_ID
        if self._recites:
            return self._recites[self.length % len(self._recites)]
        return ALPHABET[(self._bits >> 40) % len(ALPHABET)]

    def _sample_inside(self) -> int:
        """Sample again until the token does not end the generation, as masked logits would."""
        for attempt in range(1, 100):
            token = self._sample(attempt)
            if token not in self._end_ids:
                return token
        return next((x for x in ALPHABET if x not in self._end_ids), ALPHABET[0])

    def logprob(self) -> TokenLogprob:
        """Made-up log probabilities of the last token, as fixed as the token itself."""
        count = min(self._logprobs or 0, LOGPROBS_MAX)
        rank = 1 + (self._bits >> 30) % self._rank_count
        first = -1.0 / 1024 * (1 + (self._bits >> 50) % 512)
        sampled = first - _RANK_DISTANCE * (rank - 1)
        start = (self._bits >> 36) % len(ALPHABET)
        ordered = [x for x in _ALPHABET_TWICE[start : start + count + 1] if x != self.token_id]
        ordered.insert(rank - 1, self.token_id)
        top = tuple((x, first - _RANK_DISTANCE * i) for i, x in enumerate(ordered[:count]))
        return TokenLogprob(self.token_id, sampled, rank, top)


def _keeps_state(sampling: Sampling) -> bool:
    """True if a token depends on how many this engine request made before it."""
    seeded = sampling.seed is not None and sampling.temperature != 0.0
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    return seeded or penalties != (0.0, 0.0) or sampling.repetition_penalty != 1.0


def _salt(sampling: Sampling) -> int:
    """Hash of all that shapes the distribution, so that a field lost on the way changes the text.

    Rounded to what survives a 32-bit float.
    """
    numbers = [sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty]
    parts: list[object] = [(x, f"{y:.4g}") for x, y in sorted(sampling.logit_bias.items())]
    if sampling.temperature != 0.0:
        numbers += [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p]
        parts.append(sampling.seed)
    parts += [f"{x:.4g}" for x in numbers]
    return crc32(repr(parts).encode()) * 0xD6E8_FEB8_6659_FD93
