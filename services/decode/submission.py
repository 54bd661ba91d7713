"""Whether a submission can be taken. Pure: no seat is spent and nothing is sent here."""

from splitwave.core.errors import Reason, ServingError
from splitwave.core.grant import Seat
from splitwave.core.sampling_limits import SamplingLimits, check_sampling
from splitwave.core.session import Submit
from splitwave.engine.port import GroupDescription


def check_submission(submit: Submit, seat: Seat | None, group: GroupDescription) -> Seat:
    """Return the seat of a submission that can be decoded here; raise ServingError otherwise."""
    if seat is None:
        raise ServingError(
            Reason.GRANT_UNKNOWN,
            f"grant {submit.grant_id} is not live in this session; take another",
        )
    if submit.remaining_s <= 0:
        raise ServingError(Reason.DEADLINE_EXCEEDED, "remaining: no time is left")
    if submit.stall_max_s <= 0:
        raise _invalid("stall_max: 0; set the longest gap between tokens")
    _check_handoff(submit, group)
    tokens = len(submit.token_ids)
    check_sampling(submit.sampling, SamplingLimits(tokens_max=group.model_len_max_tokens - tokens))
    _check_room(submit, seat, group)
    return seat


def _check_handoff(submit: Submit, group: GroupDescription) -> None:
    handoff, tokens = submit.handoff, len(submit.token_ids)
    if handoff.kv_layout != group.kv_layout:
        raise ServingError(
            Reason.KV_LAYOUT_MISMATCH,
            f"handoff.kv_layout: prefill's is {handoff.kv_layout}, this group's is "
            f"{group.kv_layout}",
        )
    if handoff.prompt_tokens not in (tokens, tokens - 1):
        raise _invalid(
            f"handoff.prompt_tokens: {handoff.prompt_tokens} for {tokens} token_ids; send the "
            "prompt that was prefilled, and its first token if it was kept"
        )
    if tokens < 2:
        raise _invalid(
            "token_ids: a prompt of one token cannot start here without prefill's first token, "
            "since the first step would be at position 0; keep that token"
        )


def _check_room(submit: Submit, seat: Seat, group: GroupDescription) -> None:
    """A grant may reserve less than max_tokens: then the attempt may end as PREEMPTED."""
    tokens = len(submit.token_ids) + min(submit.sampling.max_tokens, 1)
    blocks = -(-tokens // group.block_size_tokens)
    if blocks > seat.blocks:
        raise ServingError(
            Reason.KV_CAPACITY_EXHAUSTED,
            f"grant_id: {seat.blocks} KV blocks were granted, {blocks} are needed to begin; "
            "ask for more",
        )


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
