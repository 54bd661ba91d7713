"""Messages of a session that are ready together share a write.

A write and a read cost the same whatever is in them, a wake-up of each end included; one message
more in them costs a tenth of that.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import (
    Ack,
    Frame,
    Hello,
    RouterMessage,
    Submit,
    Welcome,
    WorkerMessage,
)
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.session import router_message_to_proto, worker_message_to_proto
from splitwave.wire.submission import surely_small

BATCH_MESSAGES_MAX: Final = 256
"""Messages in one write, so that neither end is busy with it for long."""
BATCH_TOKENS_MAX: Final = 64 * 1024
"""Prompt or new tokens in it before the last message: about 0.5 MB."""
LOGPROBS_MAX: Final = 256
"""Rows of log probabilities that share a write with other messages; each has up to 20 entries."""

M = TypeVar("M")


def router_messages_to_proto(
    messages: Sequence[tuple[int, RouterMessage | Hello | Ack]],
) -> Iterator[pb.SessionRequest]:
    """What to write for messages with their numbers, in order, in as few writes as may be.

    Give several to a worker that takes batches only.
    """
    for run in _runs(messages):
        if len(run) == 1:
            yield from router_message_to_proto(*run[0])
            continue
        request = pb.SessionRequest()
        for number, message in run:
            request.batch.messages.extend(router_message_to_proto(number, message))
        yield request


def worker_messages_to_proto(
    messages: Sequence[tuple[int, WorkerMessage | Welcome | Ack]],
) -> Iterator[pb.SessionResponse]:
    """The same for a worker's messages. Give several to a router that takes batches only."""
    for run in _runs(messages):
        if len(run) == 1:
            yield worker_message_to_proto(*run[0])
            continue
        response = pb.SessionResponse()
        response.batch.messages.extend(worker_message_to_proto(*each) for each in run)
        yield response


def responses_in(response: pb.SessionResponse) -> Sequence[pb.SessionResponse]:
    """The messages in what came from a worker, in order. Raises INTERNAL for a broken batch."""
    if response.WhichOneof("body") != "batch":
        return (response,)
    if response.number:
        message = f"number: {response.number} with batch: a worker broke the contract"
        raise ServingError(Reason.INTERNAL, message)
    return response.batch.messages


def _runs(messages: Sequence[tuple[int, M]]) -> Iterator[list[tuple[int, M]]]:
    """Messages that share a write; one that may be large has one of its own."""
    run: list[tuple[int, M]] = []
    tokens = 0
    for numbered in messages:
        small, more = _size(numbered[1])
        if run and not (small and tokens < BATCH_TOKENS_MAX and len(run) < BATCH_MESSAGES_MAX):
            yield run
            run, tokens = [], 0
        if small:
            run.append(numbered)
            tokens += more
        else:
            yield [numbered]
    if run:
        yield run


def _size(message: object) -> tuple[bool, int]:
    """Whether a message is surely small, and its tokens."""
    if isinstance(message, Submit):
        return surely_small(message), len(message.token_ids)
    if isinstance(message, Frame):
        return len(message.logprobs) <= LOGPROBS_MAX, len(message.token_ids)
    return True, 0
