"""Prefill calls that share a stream <-> proto."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.wire.errors import failure_from_proto, failure_to_proto
from splitwave.wire.prefill import (
    prefill_call_from_proto,
    prefill_call_to_proto,
    prefill_result_from_proto,
    prefill_result_to_proto,
)
from splitwave.wire.time import duration_from_proto, duration_to_proto

ORDER_TOKENS_MAX: Final = 64 * 1024
"""Prompt and stop tokens of a call that shares a stream: a longer one would hold the others up."""
WRITE_TOKENS_MAX: Final = 128 * 1024
"""Those in one write, before the last call."""
ORDERS_MAX: Final = 256
"""Calls in one write."""


@dataclass(frozen=True, slots=True)
class Order:
    """One call on a stream; its answer carries the number."""

    number: int
    call: PrefillCall
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An order before it is sent. Made where its call is begun: what cannot be encoded fails
    that call, and not whatever shares the write."""

    number: int
    request: pb.PrefillRequest
    traceparent: str
    until_s: float
    """When the call's time is over, on the sender's clock."""


@dataclass(frozen=True, slots=True)
class BadOrder:
    """A call that cannot be taken: it ends that call, never the stream."""

    number: int
    error: ServingError


Answer = tuple[int, PrefillResult | ServingError]
"""The number of an order, and how it ended."""
EncodedAnswer = pb.PrefillAnswer
"""An answer before it is sent. Made where its call ends: what cannot be encoded fails that call,
and not whatever shares the write."""


def may_share(call: PrefillCall) -> bool:
    """True if neither the call nor its answer can be large: one message's limit is the stream's."""
    tokens = len(call.token_ids) + len(call.sampling.stop_token_ids)
    return call.prompt_logprobs is None and tokens <= ORDER_TOKENS_MAX


def outgoing(number: int, call: PrefillCall, until_s: float) -> Outgoing:
    """Encode a call. Raises ValueError for what no message can hold."""
    return Outgoing(number, prefill_call_to_proto(call), call.traceparent, until_s)


def orders_to_proto(
    orders: Sequence[Outgoing], cancelled: Sequence[int], now_s: float
) -> Iterator[pb.PrefillManyRequest]:
    """What to write for calls that begin and calls that nobody waits for, in few writes."""
    request = pb.PrefillManyRequest(cancelled_numbers=cancelled)
    tokens = 0
    for order in orders:
        if tokens >= WRITE_TOKENS_MAX or len(request.orders) >= ORDERS_MAX:
            yield request
            request, tokens = pb.PrefillManyRequest(), 0
        request.orders.add(
            number=order.number,
            request=order.request,
            remaining=duration_to_proto(max(0.0, order.until_s - now_s)),
            traceparent=order.traceparent,
        )
        tokens += len(order.request.token_ids)
    yield request


def orders_from_proto(message: pb.PrefillManyRequest) -> list[Order | BadOrder]:
    """The calls that arrived. Raises INVALID_REQUEST for one that cannot even be answered."""
    return [_order_from_proto(order) for order in message.orders]


def _order_from_proto(order: pb.PrefillOrder) -> Order | BadOrder:
    if not order.number:
        raise ServingError(Reason.INVALID_REQUEST, "orders.number: 0; count the calls from 1")
    try:
        if not order.HasField("remaining"):
            message = "orders.remaining: absent; set the time left for the call"
            raise ServingError(Reason.DEADLINE_REQUIRED, message)
        call = prefill_call_from_proto(order.request, order.traceparent)
    except ServingError as error:
        return BadOrder(order.number, error)
    return Order(order.number, call, duration_from_proto(order.remaining))


def answer_to_proto(number: int, outcome: PrefillResult | ServingError) -> EncodedAnswer:
    """Encode how a call ended. Raises ValueError for what no message can hold."""
    if isinstance(outcome, ServingError):
        return pb.PrefillAnswer(number=number, failure=failure_to_proto(outcome))
    return pb.PrefillAnswer(number=number, response=prefill_result_to_proto(outcome))


def answers_to_proto(answers: Sequence[EncodedAnswer]) -> Iterator[pb.PrefillManyResponse]:
    """What to write for calls that have ended."""
    for start in range(0, len(answers), ORDERS_MAX):
        yield pb.PrefillManyResponse(answers=answers[start : start + ORDERS_MAX])


def answers_from_proto(message: pb.PrefillManyResponse) -> list[Answer]:
    """The answers that arrived; one that broke the contract ends its call alone, as INTERNAL."""
    return [(answer.number, _outcome(answer)) for answer in message.answers]


def _outcome(answer: pb.PrefillAnswer) -> PrefillResult | ServingError:
    if answer.HasField("failure") is answer.HasField("response"):
        message = "answers: a peer sent both or neither of response and failure"
        return ServingError(Reason.INTERNAL, message)
    if answer.HasField("failure"):
        return failure_from_proto(answer.failure)
    try:
        return prefill_result_from_proto(answer.response)
    except ServingError as error:
        return error
