"""The one error translation: ServingError <-> google.rpc.Status, Failure, HTTP.

Nothing else knows gRPC codes or HTTP statuses of failures.
"""

import math
import re
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from splitwave.core.errors import Reason, ServingError
from splitwave.v1alpha1 import error_pb2
from splitwave.wire.time import duration_from_proto, duration_to_proto

DOMAIN: Final = "splitwave.v1alpha1"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_PREFIX: Final = "ERROR_REASON_"

_Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Told:
    """What a client is told of one reason."""

    code: grpc.StatusCode
    http_status: int
    do: str
    """What the client should do; for docs/errors.md."""


_LATER = "try again later, as Retry-After and RetryInfo say"
_ELSEWHERE = "try again: every attempt that the router had for it failed so"
_FIX = "correct the request as the message says"

TOLD: Final[dict[Reason, Told]] = {
    Reason.INVALID_REQUEST: Told(_Code.INVALID_ARGUMENT, 400, _FIX),
    # OpenAI's clients would repeat a 501.
    Reason.UNSUPPORTED_FEATURE: Told(_Code.UNIMPLEMENTED, 400, "leave out what the message names"),
    Reason.MODEL_NOT_FOUND: Told(_Code.NOT_FOUND, 404, "use a model that /v1/models lists"),
    Reason.DEADLINE_REQUIRED: Told(_Code.INVALID_ARGUMENT, 400, "set a deadline"),
    Reason.OVERLOADED: Told(_Code.RESOURCE_EXHAUSTED, 429, _LATER),
    Reason.KV_CAPACITY_EXHAUSTED: Told(_Code.RESOURCE_EXHAUSTED, 429, _LATER),
    Reason.GRANT_UNKNOWN: Told(_Code.FAILED_PRECONDITION, 503, _ELSEWHERE),
    Reason.POOL_UNAVAILABLE: Told(_Code.UNAVAILABLE, 503, _LATER),
    Reason.WORKER_DRAINING: Told(_Code.UNAVAILABLE, 503, "try again at another router"),
    Reason.WORKER_LOST: Told(_Code.UNAVAILABLE, 503, _ELSEWHERE),
    Reason.EPOCH_MISMATCH: Told(_Code.FAILED_PRECONDITION, 503, _ELSEWHERE),
    Reason.HANDOFF_EXPIRED: Told(_Code.FAILED_PRECONDITION, 503, _ELSEWHERE),
    Reason.HANDOFF_FAILED: Told(_Code.FAILED_PRECONDITION, 503, _ELSEWHERE),
    Reason.KV_LAYOUT_MISMATCH: Told(_Code.FAILED_PRECONDITION, 503, "tell the operator"),
    Reason.PREEMPTED: Told(_Code.UNAVAILABLE, 503, _ELSEWHERE),
    Reason.DEADLINE_EXCEEDED: Told(_Code.DEADLINE_EXCEEDED, 504, "give it more time, or ask less"),
    Reason.STALLED: Told(_Code.DEADLINE_EXCEEDED, 504, "try again"),
    Reason.CANCELLED: Told(_Code.CANCELLED, 499, "nothing: it left"),
    Reason.REQUEST_QUARANTINED: Told(_Code.ABORTED, 500, "do not repeat: it took workers out"),
    Reason.RESUME_BUDGET_EXHAUSTED: Told(_Code.UNAVAILABLE, 503, _LATER),
    Reason.INTERNAL: Told(_Code.INTERNAL, 500, "report it: our bug"),
    Reason.OUTSIDE_ENVELOPE: Told(_Code.INVALID_ARGUMENT, 400, "ask for less, as the message says"),
    Reason.GROUP_DECERTIFIED: Told(_Code.UNAVAILABLE, 503, _ELSEWHERE),
}
"""The truth about each reason, before the first byte and after it. docs/errors.md shows it."""

CODE: Final[dict[Reason, grpc.StatusCode]] = {reason: told.code for reason, told in TOLD.items()}
"""The gRPC code of each reason."""
HTTP_STATUS: Final[dict[Reason, int]] = {reason: told.http_status for reason, told in TOLD.items()}
"""The HTTP status of each reason."""

_INFERRED: Final[dict[grpc.StatusCode, Reason]] = {
    _Code.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    _Code.CANCELLED: Reason.CANCELLED,
    _Code.UNIMPLEMENTED: Reason.INTERNAL,  # The peer has no such method: versions do not match.
    _Code.RESOURCE_EXHAUSTED: Reason.INTERNAL,  # gRPC itself: a message above the size limit.
}
"""What a code means that came without a reason; every other one means WORKER_LOST."""


class Aborts(Protocol):
    """The part of a gRPC server's context that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn:
        """End the call by raising."""


def to_status(error: ServingError) -> Status:
    """The status that a call fails with: one ErrorInfo, and RetryInfo where waiting helps."""
    status = Status(code=CODE[error.reason].value[0], message=error.message)
    status.details.add().Pack(ErrorInfo(reason=error.reason.name, domain=DOMAIN))
    if error.retry_after_s is not None:
        retry = RetryInfo(retry_delay=duration_to_proto(error.retry_after_s))
        status.details.add().Pack(retry)
    return status


async def abort(context: Aborts, error: ServingError) -> NoReturn:
    """End a call with an error. gRPC raises inside, so nothing after it runs."""
    details = to_status(error).SerializeToString()
    await context.abort(CODE[error.reason], error.message, ((_DETAILS_KEY, details),))


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServingError:
    """Recover the sender's reason, or infer one for a peer that sent none."""
    reason = _INFERRED.get(error.code(), Reason.WORKER_LOST)
    retry_after_s: float | None = None
    for detail in _status(error).details:
        info, retry = ErrorInfo(), RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason = Reason.__members__.get(info.reason, Reason.INTERNAL)
        elif detail.Unpack(retry):
            retry_after_s = duration_from_proto(retry.retry_delay)
    return ServingError(reason, error.details() or "", retry_after_s=retry_after_s)


def _status(error: grpc.aio.AioRpcError) -> Status:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                break
    return Status()


def failure_to_proto(error: ServingError) -> error_pb2.Failure:
    """One request's error inside a session."""
    failure = error_pb2.Failure(
        reason=error_pb2.ErrorReason.Value(_PREFIX + error.reason.name), message=error.message
    )
    if error.retry_after_s is not None:
        failure.retry_after.CopyFrom(duration_to_proto(error.retry_after_s))
    return failure


def failure_from_proto(failure: error_pb2.Failure) -> ServingError:
    """The error that a peer sent. A reason that is not in our catalogue becomes INTERNAL."""
    reason = Reason.INTERNAL
    if failure.reason in error_pb2.ErrorReason.values():
        name = error_pb2.ErrorReason.Name(failure.reason).removeprefix(_PREFIX)
        reason = Reason.__members__.get(name, Reason.INTERNAL)
    waits = failure.HasField("retry_after")
    retry_after_s = duration_from_proto(failure.retry_after) if waits else None
    return ServingError(reason, failure.message, retry_after_s=retry_after_s)


def openai_error_body(error: ServingError) -> dict[str, dict[str, str | None]]:
    """The JSON body of a failed HTTP call, and the data of an SSE error event.

    `code` is the reason in lower case. `param` is the field that a message about a
    bad request begins with, as in "top_p: 2 is not in (0, 1]".
    """
    status = HTTP_STATUS[error.reason]
    named = re.match(r"([A-Za-z_][\w.\[\]-]*): ", error.message) if status in (400, 404) else None
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.reason),
            "param": named[1] if named else None,
            "code": error.reason.value,
        }
    }


def openai_type(reason: Reason) -> str:
    """OpenAI's kind of error."""
    status = HTTP_STATUS[reason]
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def retry_after_header(error: ServingError) -> dict[str, str]:
    """HTTP headers that say when to try again, or never; empty if neither is known.

    Retry-After: RFC 9110, 10.2.3, whole seconds. The other two are read by OpenAI's clients.
    """
    if error.reason is Reason.REQUEST_QUARANTINED:
        return {"x-should-retry": "false"}
    if error.retry_after_s is None:
        return {}
    wait_s = error.retry_after_s
    return {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1e3))}
