"""Messages that share a write: the same, in the same order, and nothing large among them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import TokenLogprob
from splitwave.core.session import (
    Accepted,
    Ack,
    AskGrant,
    Cancel,
    Frame,
    Grants,
    Hello,
    RouterMessage,
    Submit,
    TakeGrant,
    Welcome,
    WorkerMessage,
)
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.batch import (
    BATCH_MESSAGES_MAX,
    BATCH_TOKENS_MAX,
    LOGPROBS_MAX,
    responses_in,
    router_messages_to_proto,
    worker_messages_to_proto,
)
from splitwave.wire.session import RouterMessages, worker_message_from_proto
from splitwave.wire.submission import WHOLE_BYTES_MAX
from tests.contract.golden_messages import ROUTER, WORKER
from tests.contract.messages import even

TAKE, ASK = cast(TakeGrant, ROUTER["take"]), cast(AskGrant, ROUTER["ask"])
SUBMIT, CANCEL = cast(Submit, ROUTER["submit"]), cast(Cancel, ROUTER["cancel"])
NUMBERED: list[RouterMessage] = [TAKE, SUBMIT, CANCEL, ASK]
ACCEPTED, GRANTS = cast(Accepted, WORKER["accepted"]), cast(Grants, WORKER["grants"])
FRAME = cast(Frame, WORKER["frame"])

Sent = tuple[int, WorkerMessage | Welcome | Ack]


def numbered(messages: Sequence[RouterMessage]) -> list[tuple[int, RouterMessage | Hello | Ack]]:
    return list(enumerate(messages, start=1))


def read(requests: Sequence[pb.SessionRequest]) -> list[object]:
    """What a worker reads of what was written."""
    reader = RouterMessages()
    came = [pb.SessionRequest.FromString(request.SerializeToString()) for request in requests]
    return [message for request in came for message in reader.read(request)]


def heard(responses: Sequence[pb.SessionResponse]) -> list[object]:
    """What a router hears of what was written."""
    came = [pb.SessionResponse.FromString(response.SerializeToString()) for response in responses]
    return [
        (each.number, worker_message_from_proto(each, even))
        for response in came
        for each in responses_in(response)
    ]


def test_messages_of_a_router_share_a_write_and_keep_order_and_numbers() -> None:
    messages = [*numbered(NUMBERED), (0, Ack(9))]

    (request,) = router_messages_to_proto(messages)

    assert (request.number, read([request])) == (0, messages)


def test_messages_of_a_worker_share_a_write_and_keep_order_and_numbers() -> None:
    messages: list[Sent] = [(4, ACCEPTED), (5, GRANTS), (6, FRAME), (0, Ack(9))]

    (response,) = worker_messages_to_proto(messages)

    assert (response.number, heard([response])) == (0, messages)


def test_one_message_is_no_batch() -> None:
    """What a peer of an earlier version reads."""
    (request,) = router_messages_to_proto([(1, SUBMIT)])
    (response,) = worker_messages_to_proto([(1, FRAME)])

    assert (request.WhichOneof("body"), response.WhichOneof("body")) == ("submit", "frame")


def test_a_large_submission_goes_alone_in_its_pieces_and_in_its_place() -> None:
    large = replace(SUBMIT, token_ids=[70_000] * (WHOLE_BYTES_MAX // 2))
    messages = numbered([TAKE, ASK, large, CANCEL])

    requests = list(router_messages_to_proto(messages))

    kinds = [request.WhichOneof("body") for request in requests]
    assert kinds == ["batch", "submit_chunk", "submit_chunk", "cancel"]
    assert read(requests) == messages


def test_a_frame_with_many_log_probabilities_goes_alone_and_in_its_place() -> None:
    row = TokenLogprob(8, -0.5, 1, ((8, -0.5),))
    count = LOGPROBS_MAX + 1
    large = Frame(
        step=1,
        slots=[4],
        offsets=[0],
        token_counts=[count],
        token_ids=[8] * count,
        logprobs=[row] * count,
    )
    messages: list[Sent] = [(1, ACCEPTED), (2, GRANTS), (3, large), (4, GRANTS)]

    responses = list(worker_messages_to_proto(messages))

    kinds = [response.WhichOneof("body") for response in responses]
    assert kinds == ["batch", "frame", "grants"]
    assert heard(responses) == messages


def test_a_write_is_bounded_in_messages_and_in_tokens() -> None:
    takes = numbered([TAKE] * (2 * BATCH_MESSAGES_MAX + 1))
    half = replace(SUBMIT, token_ids=[5] * (BATCH_TOKENS_MAX // 2))
    halves = numbered([half] * 5)

    by_messages = list(router_messages_to_proto(takes))
    by_tokens = list(router_messages_to_proto(halves))

    assert len(by_messages) == 3
    assert [len(request.batch.messages) for request in by_tokens] == [2, 2, 0]
    assert read(by_messages) + read(by_tokens) == takes + halves


def test_what_stands_before_a_faulty_message_counts() -> None:
    (request,) = router_messages_to_proto(numbered(NUMBERED))
    request.batch.messages[2].ClearField("cancel")
    reading = RouterMessages().read(request)

    assert [next(reading), next(reading)] == numbered(NUMBERED)[:2]
    with pytest.raises(ServingError, match="body: absent"):
        next(reading)


def test_a_batch_has_no_number_and_holds_no_batch() -> None:
    (request,) = router_messages_to_proto(numbered(NUMBERED))
    nested, counted = pb.SessionRequest(), pb.SessionRequest(number=3, batch=request.batch)
    nested.batch.messages.append(request)

    for broken, why in ((nested, "batch: within a batch"), (counted, "number: 3 with batch")):
        with pytest.raises(ServingError, match=why) as caught:
            list(RouterMessages().read(broken))
        assert caught.value.reason is Reason.INVALID_REQUEST


def test_a_workers_batch_has_no_number_and_holds_no_batch() -> None:
    (response,) = worker_messages_to_proto([(1, FRAME), (2, FRAME)])
    nested, counted = pb.SessionResponse(), pb.SessionResponse(number=3, batch=response.batch)
    nested.batch.messages.append(response)

    for broken, why in ((nested, "number: 0 with batch"), (counted, "number: 3 with batch")):
        with pytest.raises(ServingError, match=why) as caught:
            heard([broken])
        assert caught.value.reason is Reason.INTERNAL
