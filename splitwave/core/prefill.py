"""One call to a prefill worker and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.handoff import Handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """Asks for one prompt's KV and first token."""

    request_id: str
    handoff_id: str
    """Chosen by the caller, unique per attempt."""
    token_ids: Sequence[int]
    """The prompt, and on a resume the tokens that the client has."""
    sampling: Sampling
    """Of the first token. max_tokens and the stops decide whether the generation ends there."""
    keep_first_token: bool
    """If False, sampling is ignored, the KV is held in any case and decode makes every token."""
    kv_layout: str
    """Of the decode group that will pull; empty if none follows."""
    priority: int = 0
    prompt_logprobs: int | None = None
    """k: log probabilities of the prompt's tokens and of the k most likely; None: none."""
    traceparent: str = ""
    """W3C trace context of the caller's span; travels beside the message. Empty: not traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """The first token, and the handoff unless the generation ended with it."""

    handoff: Handoff | None = None
    """None if the first token ended the generation: then nothing is held."""
    token_id: int | None = None
    """None if it was not to be kept."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    """Set if the first token ended the generation."""
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """If they were asked for: a row for each token of the prompt but the first."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    queued_s: float = 0.0
    """In the worker's queue, before the first step that took it."""
    computed_s: float = 0.0
    """From then to the answer."""
    waves: Sequence[str] = ()
    """Traceparents of the wave segments of its first and last step; none if it is not traced."""
