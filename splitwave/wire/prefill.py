"""PrefillCall and PrefillResult <-> PrefillRequest and PrefillResponse."""

from collections.abc import Sequence

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.wire.generation import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from splitwave.wire.handoff import handoff_from_proto, handoff_to_proto
from splitwave.wire.time import duration_from_proto, duration_to_proto


def prefill_call_to_proto(call: PrefillCall) -> pb.PrefillRequest:
    """The call as it travels."""
    return pb.PrefillRequest(
        request_id=call.request_id,
        handoff_id=call.handoff_id,
        token_ids=call.token_ids,
        sampling=sampling_to_proto(call.sampling),
        keep_first_token=call.keep_first_token,
        kv_layout=call.kv_layout,
        priority=call.priority,
        prompt_logprobs=call.prompt_logprobs,
    )


def prefill_call_from_proto(message: pb.PrefillRequest, traceparent: str = "") -> PrefillCall:
    """The call as it arrived; its trace context came as metadata.

    Raises INVALID_REQUEST, naming the field and the fix.
    """
    for name, given in (
        ("request_id", message.request_id),
        ("handoff_id", message.handoff_id),
        ("token_ids", message.token_ids),
    ):
        if not given:
            raise ServingError(Reason.INVALID_REQUEST, f"{name}: empty; set it")
    return PrefillCall(
        request_id=message.request_id,
        handoff_id=message.handoff_id,
        token_ids=list(message.token_ids),
        sampling=sampling_from_proto(message.sampling),
        keep_first_token=message.keep_first_token,
        kv_layout=message.kv_layout,
        priority=message.priority,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        traceparent=traceparent,
    )


def prefill_result_to_proto(result: PrefillResult) -> pb.PrefillResponse:
    """The answer as it travels."""
    return pb.PrefillResponse(
        handoff=handoff_to_proto(result.handoff) if result.handoff else None,
        token_id=result.token_id,
        logprobs=logprobs_to_proto([result.logprob] if result.logprob else []),
        finish_reason=finish_reason_to_proto(result.finish_reason),
        stop_token_id=result.stop_token_id,
        cached_tokens=result.cached_tokens,
        queued=duration_to_proto(result.queued_s),
        computed=duration_to_proto(result.computed_s),
        prompt_logprobs=logprobs_to_proto(result.prompt_logprobs or ()),
        wave_traceparents=result.waves,
    )


def prefill_result_from_proto(
    message: pb.PrefillResponse, prompt: Sequence[int] = ()
) -> PrefillResult:
    """The answer as it arrived to a call with the tokens of `prompt`.

    Raises INTERNAL if it is neither held nor ended, or if its columns do not agree.
    """
    finish_reason = finish_reason_from_proto(message.finish_reason)
    if message.HasField("handoff") is (finish_reason is not None):
        raise ServingError(
            Reason.INTERNAL, "handoff: a peer sent both or neither of handoff and finish_reason"
        )
    return PrefillResult(
        handoff=handoff_from_proto(message.handoff) if message.HasField("handoff") else None,
        token_id=message.token_id if message.HasField("token_id") else None,
        logprob=_logprob(message),
        finish_reason=finish_reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        cached_tokens=message.cached_tokens,
        queued_s=duration_from_proto(message.queued),
        computed_s=duration_from_proto(message.computed),
        prompt_logprobs=(
            logprobs_from_proto(message.prompt_logprobs, prompt[1:])
            if message.HasField("prompt_logprobs")
            else None
        ),
        waves=tuple(message.wave_traceparents),
    )


def _logprob(message: pb.PrefillResponse) -> TokenLogprob | None:
    if not message.HasField("logprobs"):
        return None
    token_ids = [message.token_id] if message.HasField("token_id") else []
    rows = logprobs_from_proto(message.logprobs, token_ids)
    return rows[0] if rows else None


def release_request(handoff_id: str) -> pb.ReleaseHandoffRequest:
    """Name a handoff that nobody will pull."""
    return pb.ReleaseHandoffRequest(handoff_id=handoff_id)


def confirm_request(handoff: Handoff) -> pb.ConfirmHandoffRequest:
    """Name a handoff whose data has arrived."""
    return pb.ConfirmHandoffRequest(handoff_id=handoff.handoff_id, epoch=handoff.epoch)


def confirm_response(lease_remaining_s: float) -> pb.ConfirmHandoffResponse:
    """Say that the data is good, and how much of the lease was left."""
    return pb.ConfirmHandoffResponse(lease_remaining=duration_to_proto(lease_remaining_s))


def lease_remaining_s(message: pb.ConfirmHandoffResponse) -> float:
    """How far the fence was from failing."""
    return duration_from_proto(message.lease_remaining)
