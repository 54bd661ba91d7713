"""Which sampling values can be served. Every front door and every pool asks here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling

LOGPROBS_MAX = 20
STOP_TOKEN_IDS_MAX = 128
LOGIT_BIAS_MAX = 1024
PROMPT_LOGPROBS_MAX = 65_536
"""Log probabilities of one prompt, all positions together: about 0.5 MB on the wire."""
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
TOP_K_MAX = MAX_TOKENS_MAX = 2**32 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Bounds that depend on the model and the prompt; None is no bound."""

    tokens_max: int | None = None
    """What the prompt leaves of the context."""
    certified_max: int | None = None
    """Longest completion that a pool may serve. More is no bad request, but one for others."""
    vocab_size: int | None = None

    @property
    def tokens_unasked(self) -> int | None:
        """What a client gets that names no max_tokens: all that is left and may be served."""
        bounds = [bound for bound in (self.tokens_max, self.certified_max) if bound is not None]
        return min(bounds, default=None)


def check_sampling(sampling: Sampling, limits: SamplingLimits | None = None) -> None:
    """Raise INVALID_REQUEST for the first field that is out of its range, naming it and the fix."""
    for message in _faults(sampling, limits or SamplingLimits()):
        raise ServingError(Reason.INVALID_REQUEST, message)


def check_prompt_logprobs(count: int | None, prompt_tokens: int) -> None:
    """Raise INVALID_REQUEST if `count` for each token of a prompt is out of range; None: none."""
    if count is None:
        return
    if not 0 <= count <= LOGPROBS_MAX:
        message = f"prompt_logprobs: {count} is not in [0, {LOGPROBS_MAX}]; ask for fewer"
        raise ServingError(Reason.INVALID_REQUEST, message)
    if (count + 1) * prompt_tokens > PROMPT_LOGPROBS_MAX:
        raise ServingError(
            Reason.INVALID_REQUEST,
            f"prompt_logprobs: {count + 1} for each of {prompt_tokens} tokens are more than"
            f" {PROMPT_LOGPROBS_MAX}; ask for fewer, or shorten the prompt",
        )


def _faults(sampling: Sampling, limits: SamplingLimits) -> Iterator[str]:
    yield from _count_faults(sampling, limits)
    yield from _shape_faults(sampling)
    yield from _penalty_faults(sampling)
    yield from _token_faults(sampling, limits)


def _count_faults(sampling: Sampling, limits: SamplingLimits) -> Iterator[str]:
    if sampling.max_tokens < 1:
        yield f"max_tokens: {sampling.max_tokens} is below 1; ask for at least one token"
    elif sampling.max_tokens > MAX_TOKENS_MAX:
        yield f"max_tokens: {sampling.max_tokens} does not fit in 32 bits; lower it"
    if limits.tokens_max is not None and sampling.max_tokens > limits.tokens_max:
        yield (
            f"max_tokens: {sampling.max_tokens} is more than the {limits.tokens_max} tokens that "
            "the prompt leaves of the model's context; lower it, leave it out or shorten the prompt"
        )
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield (
            f"min_tokens: {sampling.min_tokens} is not in [0, max_tokens = {sampling.max_tokens}]; "
            "lower it"
        )
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= LOGPROBS_MAX:
        yield f"logprobs: {sampling.logprobs} is not in [0, {LOGPROBS_MAX}]; ask for fewer"


def _shape_faults(sampling: Sampling) -> Iterator[str]:
    # NaN fails every comparison, so each range refuses it too.
    if not 0.0 <= sampling.temperature < math.inf:
        yield f"temperature: {sampling.temperature} is not 0 or more; use 0 for greedy"
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"top_p: {sampling.top_p} is not in (0, 1]; use 1 to switch it off"
    if not 0 <= sampling.top_k <= TOP_K_MAX:
        yield f"top_k: {sampling.top_k} is not in [0, {TOP_K_MAX}]; use 0 to switch it off"
    if not 0.0 <= sampling.min_p <= 1.0:
        yield f"min_p: {sampling.min_p} is not in [0, 1]; use 0 to switch it off"
    if sampling.seed is not None and not SEED_MIN <= sampling.seed <= SEED_MAX:
        yield f"seed: {sampling.seed} does not fit in 64 bits with sign; use a smaller one"


def _penalty_faults(sampling: Sampling) -> Iterator[str]:
    for name in ("presence_penalty", "frequency_penalty"):
        value: float = getattr(sampling, name)
        if not -2.0 <= value <= 2.0:
            yield f"{name}: {value} is not in [-2, 2]; use 0 to switch it off"
    if not 0.0 < sampling.repetition_penalty < math.inf:
        yield (
            f"repetition_penalty: {sampling.repetition_penalty} is not above 0; "
            "use 1 to switch it off"
        )


def _token_faults(sampling: Sampling, limits: SamplingLimits) -> Iterator[str]:
    if len(sampling.logit_bias) > LOGIT_BIAS_MAX:
        yield f"logit_bias: {len(sampling.logit_bias)} tokens; name {LOGIT_BIAS_MAX} at most"
    if len(sampling.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        yield (
            f"stop_token_ids: there are {len(sampling.stop_token_ids)}; "
            f"use {STOP_TOKEN_IDS_MAX} at most"
        )
    for token_id, bias in sampling.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            yield f"logit_bias: {bias} of token {token_id} is not in [-100, 100]; bring it in"
    vocab_size = limits.vocab_size
    for name in ("logit_bias", "stop_token_ids"):
        for token_id in getattr(sampling, name):
            if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                below = "" if vocab_size is None else f" and below {vocab_size}"
                yield f"{name}: token id {token_id} is not at least 0{below}; correct or remove it"
