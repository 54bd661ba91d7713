"""A large or broken submission concerns its attempt alone."""

import dataclasses
from collections.abc import Sequence

import pytest

from splitwave.core.errors import Reason
from splitwave.core.generation import Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.session import Ack, Cancel, Link, RouterMessage, Submit
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire import submission
from splitwave.wire.session import BadSubmission, RouterMessages, router_message_to_proto

HANDOFF = Handoff(
    handoff_id="r/0/1",
    prefill_worker_id="p0",
    prefill_address="127.0.0.1:1",
    group_id="g",
    epoch=1,
    rank=0,
    prompt_tokens=3,
    block_count=1,
    kv_layout="k",
    lease_remaining_s=30.0,
    connector="sim",
    connector_params=b"",
)
SMALL = Submit(
    attempt_id="r/0/1",
    request_id="r",
    grant_id="g1",
    handoff=HANDOFF,
    token_ids=[1, 2, 3],
    offset=0,
    sampling=Sampling(max_tokens=4),
    remaining_s=60.0,
    stall_max_s=5.0,
)
LARGE = dataclasses.replace(SMALL, token_ids=[100_000] * 1_000_000)  # 3 bytes each: 3 pieces.


def feed(to: RouterMessages, requests: Sequence[pb.SessionRequest]) -> list[object]:
    """Give messages to a worker as they are on the wire; return what it made of each."""
    return [
        to.feed(pb.SessionRequest.FromString(request.SerializeToString())) for request in requests
    ]


def pieces(submit: Submit = LARGE, number: int = 1) -> list[pb.SessionRequest]:
    return router_message_to_proto(number, submit)


def bad(result: object) -> BadSubmission:
    assert isinstance(result, tuple)
    assert isinstance(result[1], BadSubmission)
    return result[1]


def test_a_large_submission_arrives_whole_in_pieces_under_one_number() -> None:
    sent = pieces()

    assert len(sent) == 3
    assert all(m.ByteSize() < submission.WHOLE_BYTES_MAX + 100 for m in sent)
    assert feed(RouterMessages(), sent) == [None, None, (1, LARGE)]


def test_the_pieces_count_as_one_message_of_the_link() -> None:
    """So acknowledging and replaying need to know nothing of pieces."""
    router: Link[RouterMessage] = Link(kept_max=8)
    worker: Link[object] = Link(kept_max=8)
    sent: tuple[RouterMessage, ...] = (SMALL, LARGE, Cancel(("x",)))
    for message in sent:
        router.send(message)
    received = RouterMessages()

    for number, message in router.replay():
        for got in feed(received, router_message_to_proto(number, message)):
            if isinstance(got, tuple):
                assert worker.receive(got[0])

    assert worker.received == 3


def test_a_break_between_pieces_is_mended_by_the_replay() -> None:
    received = RouterMessages()
    feed(received, pieces()[:2])

    assert feed(received, pieces()) == [None, None, (1, LARGE)]
    assert feed(RouterMessages(), pieces()) == [None, None, (1, LARGE)]


def test_an_ack_may_come_between_pieces() -> None:
    first, *rest = pieces()
    ack = router_message_to_proto(0, Ack(4))

    got = feed(RouterMessages(), [first, *ack, *rest])

    assert got == [None, (0, Ack(4)), None, (1, LARGE)]


def test_a_submission_over_the_limit_ends_alone() -> None:
    huge = dataclasses.replace(SMALL, token_ids=[100_000] * 3_000_000)
    received = RouterMessages()

    got = feed(received, [*pieces(huge), *router_message_to_proto(2, SMALL)])

    told = [result for result in got if result is not None]
    assert len(told) == 2
    assert bad(told[0]).attempt_id == "r/0/1"
    assert bad(told[0]).error.reason is Reason.INVALID_REQUEST
    assert "shorten the prompt" in bad(told[0]).error.message
    assert told[1] == (2, SMALL)


def test_no_more_than_the_limit_is_ever_kept() -> None:
    held = submission.Pieces(bytes_max=100)
    chunk = pb.SubmitChunk(attempt_id="a", data=b"x" * 60)

    assert held.add(1, chunk) is None
    assert isinstance(
        held.add(1, pb.SubmitChunk(attempt_id="a", index=1, data=b"x" * 60)), (BadSubmission)
    )
    assert held.bytes_kept == 0
    assert held.add(1, pb.SubmitChunk(attempt_id="a", index=2, data=b"x" * 60)) is None
    assert held.bytes_kept == 0


def test_a_piece_out_of_order_ends_its_attempt_at_once_and_alone() -> None:
    first, second, third = pieces()
    received = RouterMessages()

    got = feed(received, [first, third, second, *router_message_to_proto(2, SMALL)])

    assert bad(got[1]).error.message.startswith("submit_chunk.index: 2 came where 1 was due")
    assert got[2:] == [None, (2, SMALL)]


def test_pieces_that_make_no_submission_end_their_attempt() -> None:
    chunk = pb.SubmitChunk(attempt_id="a", last=True, data=b"\xff\xff\xff")

    (got,) = feed(RouterMessages(), [pb.SessionRequest(number=1, submit_chunk=chunk)])

    assert bad(got).attempt_id == "a"
    assert bad(got).error.message.startswith("submit_chunk.data:")


def test_pieces_must_agree_on_the_attempt() -> None:
    sent = pieces()
    for piece in sent:
        piece.submit_chunk.attempt_id = "other"

    got = feed(RouterMessages(), sent)

    assert bad(got[-1]).attempt_id == "other"
    assert "submit.attempt_id" in bad(got[-1]).error.message


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("attempt_id", Reason.INVALID_REQUEST),
        ("request_id", Reason.INVALID_REQUEST),
        ("grant_id", Reason.INVALID_REQUEST),
        ("handoff", Reason.INVALID_REQUEST),
        ("token_ids", Reason.INVALID_REQUEST),
        ("sampling", Reason.INVALID_REQUEST),
        ("remaining", Reason.DEADLINE_REQUIRED),
        ("stall_max", Reason.INVALID_REQUEST),
    ],
)
def test_a_missing_field_ends_the_attempt_by_name(field: str, reason: Reason) -> None:
    (request,) = router_message_to_proto(1, SMALL)
    request.submit.ClearField(field)  # type: ignore[arg-type]  # the stub wants a literal

    (got,) = feed(RouterMessages(), [request])

    assert bad(got).error.reason is reason
    assert f"submit.{field}" in bad(got).error.message


def test_a_sampling_out_of_range_ends_the_attempt_by_name() -> None:
    (request,) = router_message_to_proto(1, SMALL)
    request.submit.sampling.top_p = 2.0

    (got,) = feed(RouterMessages(), [request])

    assert bad(got).attempt_id == "r/0/1"
    assert "top_p: 2.0 is not in (0, 1]" in bad(got).error.message


def test_times_that_no_clock_can_hold_end_no_session() -> None:
    """google.protobuf.Duration has limits that its sender may break."""
    reader = RouterMessages()
    (request,) = router_message_to_proto(1, SMALL)
    for seconds, nanos in ((2**62, 0), (-(2**62), 0), (1, 2**31 - 1), (1, -1)):
        request.submit.remaining.seconds = seconds
        request.submit.remaining.nanos = nanos
        result = reader.feed(request)
        assert result is not None
        assert isinstance(result[1], Submit)
        assert result[1].remaining_s == pytest.approx(seconds + nanos / 1e9)
