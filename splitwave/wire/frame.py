"""Frame and Ended <-> proto: the only messages that come once a step."""

from collections.abc import Callable
from itertools import compress

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import Ended, Frame, Pulled
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.errors import failure_from_proto, failure_to_proto
from splitwave.wire.generation import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)
from splitwave.wire.time import duration_from_proto, duration_to_proto


def frame_to_proto(frame: Frame) -> pb.Frame:
    """New tokens of one lock-step as they travel."""
    return pb.Frame(
        step=frame.step,
        slots=frame.slots,
        offsets=frame.offsets,
        token_counts=frame.token_counts,
        token_ids=frame.token_ids,
        logprobs=logprobs_to_proto(frame.logprobs),
        ended=[_ended_to_proto(ended) for ended in frame.ended],
        pulled=[_pulled_to_proto(pulled) for pulled in frame.pulled],
    )


def frame_from_proto(message: pb.Frame, asked: Callable[[int], bool]) -> Frame:
    """New tokens as they arrived; `asked(slot)` is True if its attempt asked for logprobs.

    Raises INTERNAL, naming the column, if the columns do not agree.
    """
    frame = Frame(
        step=message.step,
        slots=list(message.slots),
        offsets=list(message.offsets),
        token_counts=list(message.token_counts),
        token_ids=list(message.token_ids),
        ended=[_ended_from_proto(ended) for ended in message.ended],
        pulled=[
            Pulled(x.slot, x.handoff_bytes, duration_from_proto(x.handoff)) for x in message.pulled
        ],
    )
    _check_columns(frame)
    frame.logprobs = _logprobs(message, frame, asked)
    return frame


def _check_columns(frame: Frame) -> None:
    rows = len(frame.slots)
    if len(frame.offsets) != rows:
        raise _broken(f"offsets: {len(frame.offsets)} for {rows} slots")
    if len(frame.token_counts) != rows:
        raise _broken(f"token_counts: {len(frame.token_counts)} for {rows} slots")
    if 0 in frame.token_counts:
        raise _broken("token_counts: a slot without a new token")
    tokens = sum(frame.token_counts)
    if tokens != len(frame.token_ids):
        raise _broken(f"token_ids: {len(frame.token_ids)}, but the counts say {tokens}")
    if len(set(frame.slots)) != rows:
        raise _broken("slots: one came twice")


def _logprobs(message: pb.Frame, frame: Frame, asked: Callable[[int], bool]) -> list[TokenLogprob]:
    wanting = [asked(slot) for slot in frame.slots]
    if not any(wanting) and not message.HasField("logprobs"):
        return []
    wanted = [wants for wants, n in zip(wanting, frame.token_counts, strict=True) for _ in range(n)]
    return logprobs_from_proto(message.logprobs, list(compress(frame.token_ids, wanted)))


def _pulled_to_proto(pulled: Pulled) -> pb.Pulled:
    return pb.Pulled(
        slot=pulled.slot,
        handoff_bytes=pulled.handoff_bytes,
        handoff=duration_to_proto(pulled.handoff_s),
    )


def _ended_to_proto(ended: Ended) -> pb.Ended:
    return pb.Ended(
        slot=ended.slot,
        attempt_id=ended.attempt_id,
        finish_reason=finish_reason_to_proto(ended.finish_reason),
        stop_token_id=ended.stop_token_id,
        failure=failure_to_proto(ended.error) if ended.error else None,
        handoff_bytes=ended.handoff_bytes,
        handoff=duration_to_proto(ended.handoff_s),
        wave_traceparents=ended.waves,
    )


def _ended_from_proto(message: pb.Ended) -> Ended:
    finish_reason = finish_reason_from_proto(message.finish_reason)
    if message.HasField("failure") is (finish_reason is not None):
        raise _broken("ended.failure: both or neither of failure and finish_reason")
    return Ended(
        slot=message.slot,
        attempt_id=message.attempt_id,
        finish_reason=finish_reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error=failure_from_proto(message.failure) if message.HasField("failure") else None,
        handoff_bytes=message.handoff_bytes,
        handoff_s=duration_from_proto(message.handoff),
        waves=tuple(message.wave_traceparents),
    )


def _broken(what: str) -> ServingError:
    return ServingError(Reason.INTERNAL, f"frame.{what}: a worker broke the contract")
