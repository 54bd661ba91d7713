"""Submit <-> proto, whole or in pieces, and what is wrong with one.

A submission above 1 MiB travels as pieces that all carry the one number of the
message: the link counts messages, not pieces, and a replay sends all pieces again.
"""

from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import Submit
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.generation import sampling_from_proto, sampling_to_proto
from splitwave.wire.handoff import handoff_from_proto, handoff_to_proto
from splitwave.wire.time import duration_from_proto, duration_to_proto

WHOLE_BYTES_MAX: Final = 1024 * 1024
"""The largest submission that travels in one message, and the largest piece."""
SUBMISSION_BYTES_MAX: Final = 8 * 1024 * 1024
"""The largest submission: about two million token ids."""


@dataclass(frozen=True, slots=True)
class BadSubmission:
    """A submission that cannot be taken: it ends its attempt, never the session."""

    attempt_id: str
    error: ServingError


def submit_to_proto(submit: Submit) -> pb.Submit:
    """The submission as it travels."""
    return pb.Submit(
        attempt_id=submit.attempt_id,
        request_id=submit.request_id,
        grant_id=submit.grant_id,
        handoff=handoff_to_proto(submit.handoff),
        token_ids=submit.token_ids,
        offset=submit.offset,
        sampling=sampling_to_proto(submit.sampling),
        remaining=duration_to_proto(submit.remaining_s),
        stall_max=duration_to_proto(submit.stall_max_s),
        traceparent=submit.traceparent,
        priority=submit.priority,
    )


def submit_from_proto(message: pb.Submit) -> Submit:
    """The submission as it arrived. Raises ServingError, naming the field and the fix."""
    for name in ("attempt_id", "request_id", "grant_id", "token_ids"):
        if not getattr(message, name):
            raise _invalid(f"submit.{name}: empty; set it")
    for part, present in (
        ("handoff", message.HasField("handoff")),
        ("sampling", message.HasField("sampling")),
        ("stall_max", message.HasField("stall_max")),
    ):
        if not present:
            raise _invalid(f"submit.{part}: absent; set it")
    if not message.HasField("remaining"):
        raise ServingError(
            Reason.DEADLINE_REQUIRED, "submit.remaining: absent; set the time left for the request"
        )
    return Submit(
        attempt_id=message.attempt_id,
        request_id=message.request_id,
        grant_id=message.grant_id,
        handoff=handoff_from_proto(message.handoff),
        token_ids=list(message.token_ids),
        offset=message.offset,
        sampling=sampling_from_proto(message.sampling),
        remaining_s=duration_from_proto(message.remaining),
        stall_max_s=duration_from_proto(message.stall_max),
        traceparent=message.traceparent,
        priority=message.priority,
    )


def submit_requests(number: int, submit: Submit) -> list[pb.SessionRequest]:
    """The one message of a submission, or its pieces."""
    message = submit_to_proto(submit)
    if surely_small(submit) or message.ByteSize() <= WHOLE_BYTES_MAX:
        return [pb.SessionRequest(number=number, submit=message)]
    data = message.SerializeToString()
    starts = range(0, len(data), WHOLE_BYTES_MAX)
    return [
        pb.SessionRequest(
            number=number,
            submit_chunk=pb.SubmitChunk(
                attempt_id=submit.attempt_id,
                index=index,
                last=start + WHOLE_BYTES_MAX >= len(data),
                data=data[start : start + WHOLE_BYTES_MAX],
            ),
        )
        for index, start in enumerate(starts)
    ]


def surely_small(submit: Submit) -> bool:
    """True if a glance will do; to add up the bytes of 8,000 tokens takes 0.1 ms."""
    tokens = 5 * (len(submit.token_ids) + len(submit.sampling.stop_token_ids))
    words = len(submit.attempt_id) + len(submit.request_id) + len(submit.traceparent)
    return tokens + 4 * words + len(submit.handoff.connector_params) < WHOLE_BYTES_MAX // 2


def read_submission(message: pb.Submit, attempt_id: str = "") -> Submit | BadSubmission:
    """The submission, or what is wrong with it; `attempt_id` is what its pieces said."""
    try:
        submit = submit_from_proto(message)
    except ServingError as error:
        return BadSubmission(attempt_id or message.attempt_id, error)
    if attempt_id and submit.attempt_id != attempt_id:
        mixed = _invalid(f"submit.attempt_id: its pieces say {attempt_id!r}; make them agree")
        return BadSubmission(attempt_id, mixed)
    return submit


class Pieces:
    """The pieces of one submission at a time, joined; a fault ends it at once.

    After a fault the other pieces of the same number are dropped unread, so memory
    stays below SUBMISSION_BYTES_MAX. Index 0 starts afresh: a replay after a break.
    """

    def __init__(self, *, bytes_max: int = SUBMISSION_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._number = 0
        self._next_index: int | None = None
        """None after a fault or the last piece."""
        self._data = bytearray()

    @property
    def bytes_kept(self) -> int:
        """Bytes of the pieces so far, at most `bytes_max`."""
        return len(self._data)

    def add(self, number: int, chunk: pb.SubmitChunk) -> Submit | BadSubmission | None:
        """Return the submission with its last piece, its fault at the first one, else None."""
        if number != self._number or chunk.index == 0:
            self._number, self._next_index = number, 0
            self._data.clear()
        if self._next_index is None:
            return None
        fault = self._fault(chunk)
        if fault is not None:
            return self._finish(BadSubmission(chunk.attempt_id, fault))
        self._data += chunk.data
        self._next_index += 1
        if not chunk.last:
            return None
        return self._finish(self._parse(chunk.attempt_id))

    def _fault(self, chunk: pb.SubmitChunk) -> ServingError | None:
        if chunk.index != self._next_index:
            return _invalid(
                f"submit_chunk.index: {chunk.index} came where {self._next_index} was due; "
                "send the pieces in order"
            )
        if len(self._data) + len(chunk.data) > self._bytes_max:
            return _invalid(
                f"submit_chunk.data: the submission is above {self._bytes_max} bytes; "
                "shorten the prompt"
            )
        return None

    def _parse(self, attempt_id: str) -> Submit | BadSubmission:
        try:
            message = pb.Submit.FromString(bytes(self._data))
        except DecodeError:
            error = _invalid("submit_chunk.data: the pieces do not make a Submit; send it again")
            return BadSubmission(attempt_id, error)
        return read_submission(message, attempt_id)

    def _finish(self, result: Submit | BadSubmission) -> Submit | BadSubmission:
        self._next_index = None
        self._data.clear()
        return result


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
