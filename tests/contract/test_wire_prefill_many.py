"""Prefill calls that share a stream, on the wire."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.v1alpha1 import prefill_service_pb2 as pb
from splitwave.wire.prefill_many import (
    ORDER_TOKENS_MAX,
    ORDERS_MAX,
    WRITE_TOKENS_MAX,
    BadOrder,
    Order,
    answer_to_proto,
    answers_from_proto,
    answers_to_proto,
    may_share,
    orders_from_proto,
    orders_to_proto,
    outgoing,
)
from tests.contract import messages
from tests.contract.golden_messages import CALL, FAILURE, HELD
from tests.contract.test_wire_messages import wire


@wire
@given(messages.prefill_calls, st.integers(1, 2**64 - 1), st.integers(0, 10**9), messages.text)
def test_an_order_goes_round(call: PrefillCall, number: int, us: int, traceparent: str) -> None:
    order = Order(number, replace(call, traceparent=traceparent), us / 1e6)
    (request,) = orders_to_proto([outgoing(number, order.call, 7.0 + us / 1e6)], [3, 4], 7.0)

    came = pb.PrefillManyRequest.FromString(request.SerializeToString())

    (read,) = orders_from_proto(came)
    assert isinstance(read, Order)
    assert read.remaining_s == pytest.approx(order.remaining_s, abs=1e-6)
    assert replace(read, remaining_s=order.remaining_s) == order
    assert list(came.cancelled_numbers) == [3, 4]


@wire
@given(st.integers(1, 2**64 - 1), messages.prefill_results())
def test_an_answer_goes_round(number: int, result: PrefillResult) -> None:
    result = replace(result, prompt_logprobs=None)  # Calls that ask for them do not share.
    (response,) = answers_to_proto([answer_to_proto(number, result), answer_to_proto(7, FAILURE)])

    came = pb.PrefillManyResponse.FromString(response.SerializeToString())

    assert answers_from_proto(came) == [(number, result), (7, FAILURE)]


def test_what_is_large_does_not_share() -> None:
    long = [5] * (ORDER_TOKENS_MAX + 1)

    assert may_share(CALL)
    assert not may_share(replace(CALL, token_ids=long))
    assert not may_share(replace(CALL, prompt_logprobs=0))


def test_writes_are_bounded_in_calls_and_in_tokens() -> None:
    few = [outgoing(number, CALL, 1.0) for number in range(1, 2 * ORDERS_MAX + 2)]
    large = replace(CALL, token_ids=[5] * ORDER_TOKENS_MAX)
    many = [outgoing(number, large, 1.0) for number in range(1, 6)]
    answers = [answer_to_proto(number, HELD) for number in range(1, 2 * ORDERS_MAX + 2)]

    by_calls, by_tokens = list(orders_to_proto(few, [], 0.0)), list(orders_to_proto(many, [], 0.0))

    assert [len(request.orders) for request in by_calls] == [ORDERS_MAX, ORDERS_MAX, 1]
    per_write = WRITE_TOKENS_MAX // ORDER_TOKENS_MAX
    assert [len(request.orders) for request in by_tokens] == [per_write, per_write, 1]
    assert [len(x.answers) for x in answers_to_proto(answers)] == [ORDERS_MAX, ORDERS_MAX, 1]


def test_an_order_that_cannot_be_taken_is_its_own_failure() -> None:
    (request,) = orders_to_proto([outgoing(1, CALL, 1.0), outgoing(2, CALL, 1.0)], [], 0.0)
    request.orders[0].request.ClearField("token_ids")
    request.orders[1].ClearField("remaining")

    first, second = orders_from_proto(request)

    assert isinstance(first, BadOrder)
    assert (first.number, first.error.reason) == (1, Reason.INVALID_REQUEST)
    assert isinstance(second, BadOrder)
    assert (second.number, second.error.reason) == (2, Reason.DEADLINE_REQUIRED)


def test_an_order_without_a_number_ends_the_stream() -> None:
    (request,) = orders_to_proto([outgoing(1, CALL, 1.0)], [], 0.0)
    request.orders[0].number = 0

    with pytest.raises(ServingError, match=r"orders\.number: 0"):
        orders_from_proto(request)


def test_an_answer_that_breaks_the_contract_fails_its_call_alone() -> None:
    (response,) = answers_to_proto([answer_to_proto(number, HELD) for number in (1, 2, 3)])
    response.answers[0].ClearField("response")
    response.answers[1].response.ClearField("handoff")

    (_, neither), (_, unheld), third = answers_from_proto(response)

    assert isinstance(neither, ServingError)
    assert isinstance(unheld, ServingError)
    assert neither.reason is unheld.reason is Reason.INTERNAL
    assert third == (3, HELD)
