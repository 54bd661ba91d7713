"""Sampling, finish reasons and log probabilities <-> proto."""

from collections.abc import Sequence
from typing import Final

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling, TokenLogprob
from splitwave.core.sampling_limits import SamplingLimits, check_sampling
from splitwave.v1alpha1 import generation_pb2 as pb

_TO_PROTO: Final = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
_FROM_PROTO: Final = {value: reason for reason, value in _TO_PROTO.items()}
_EXPLICIT: Final = ("max_tokens", "temperature", "top_p", "repetition_penalty")
"""Fields whose absence is not their zero: between our services they are always set."""


def sampling_to_proto(sampling: Sampling) -> pb.SamplingParams:
    """Write every field, also those that have their default. Floats lose what float32 lacks."""
    return pb.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        eos_token_ids=sampling.eos_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def sampling_from_proto(message: pb.SamplingParams) -> Sampling:
    """Read what a router wrote, for a pool: nothing is filled in.

    Raises INVALID_REQUEST for a field that is absent or out of range.
    """
    for name in _EXPLICIT:
        if not message.HasField(name):
            raise ServingError(
                Reason.INVALID_REQUEST, f"sampling.{name}: absent; pools take no defaults, set it"
            )
    sampling = _read(message, message.max_tokens, tuple(message.eos_token_ids))
    check_sampling(sampling)
    return sampling


def sampling_from_client(
    message: pb.SamplingParams, limits: SamplingLimits, eos_token_ids: Sequence[int]
) -> Sampling:
    """Read what a client wrote, fill the defaults in and hold it against the ranges.

    Raises INVALID_REQUEST, naming the field and the fix.
    """
    if message.eos_token_ids:
        raise ServingError(
            Reason.INVALID_REQUEST,
            "eos_token_ids: these are the model's; use stop_token_ids for others, or ignore_eos",
        )
    unasked = limits.tokens_unasked or 1
    max_tokens = message.max_tokens if message.HasField("max_tokens") else unasked
    sampling = _read(message, max_tokens, tuple(eos_token_ids))
    check_sampling(sampling, limits)
    return sampling


def _read(message: pb.SamplingParams, max_tokens: int, eos_token_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=eos_token_ids,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """None is UNSPECIFIED: it has not ended, or it failed."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _TO_PROTO[reason]


def finish_reason_from_proto(value: pb.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED is None. Raises INTERNAL for a value that we do not know."""
    if value == pb.FINISH_REASON_UNSPECIFIED:
        return None
    reason = _FROM_PROTO.get(value)
    if reason is None:
        raise ServingError(Reason.INTERNAL, f"finish_reason: a peer sent {value}, unknown here")
    return reason


def logprobs_to_proto(rows: Sequence[TokenLogprob]) -> pb.TokenLogprobs | None:
    """Rows in columns; None if there are none. The sampled token ids travel elsewhere."""
    if not rows:
        return None
    return pb.TokenLogprobs(
        logprobs=[row.logprob for row in rows],
        ranks=[row.rank for row in rows],
        top_counts=[len(row.top) for row in rows],
        top_token_ids=[token_id for row in rows for token_id, _ in row.top],
        top_logprobs=[logprob for row in rows for _, logprob in row.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Columns in rows, one for each of the sampled `token_ids`.

    Raises INTERNAL, naming the column, if the columns do not agree.
    """
    for name, column in (
        ("logprobs", message.logprobs),
        ("ranks", message.ranks),
        ("top_counts", message.top_counts),
    ):
        if len(column) != len(token_ids):
            raise _broken(f"{name}: {len(column)} rows for {len(token_ids)} tokens")
    tops = list(zip(message.top_token_ids, message.top_logprobs, strict=False))
    if not sum(message.top_counts) == len(message.top_token_ids) == len(message.top_logprobs):
        raise _broken("top_counts: their sum, top_token_ids and top_logprobs differ in length")
    rows: list[TokenLogprob] = []
    start = 0
    columns = zip(token_ids, message.logprobs, message.ranks, message.top_counts, strict=True)
    for token_id, logprob, rank, top_count in columns:
        top = tuple(tops[start : start + top_count])
        rows.append(TokenLogprob(token_id, logprob, rank, top))
        start += top_count
    return rows


def _broken(what: str) -> ServingError:
    return ServingError(Reason.INTERNAL, f"logprobs.{what}: a peer broke the contract")
