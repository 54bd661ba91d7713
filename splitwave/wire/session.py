"""Messages of a session <-> proto.

Numbers are the link's (`splitwave.core.session.Link`): the sender numbers a message
once, also if it travels in pieces, and Hello, Welcome and Ack have number 0.
"""

from collections.abc import Callable, Iterator

from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import (
    Accepted,
    Ack,
    AskGrant,
    Cancel,
    CancelAsk,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Hello,
    Refused,
    ReturnGrants,
    RouterMessage,
    Submit,
    TakeGrant,
    Welcome,
    WorkerMessage,
)
from splitwave.v1alpha1 import decode_service_pb2 as pb
from splitwave.wire.errors import failure_from_proto, failure_to_proto
from splitwave.wire.frame import frame_from_proto, frame_to_proto
from splitwave.wire.submission import BadSubmission as BadSubmission
from splitwave.wire.submission import Pieces, read_submission, submit_requests
from splitwave.wire.time import duration_from_proto, duration_to_proto

FromRouter = RouterMessage | Hello | Ack | BadSubmission
FromWorker = WorkerMessage | Welcome | Ack


def router_message_to_proto(
    number: int, message: RouterMessage | Hello | Ack
) -> list[pb.SessionRequest]:
    """What to send for one message: one proto message, or the pieces of a large Submit.

    Pieces share the number and must not be mixed with other numbered messages.
    """
    match message:
        case Hello():
            return [pb.SessionRequest(hello=_hello_to_proto(message))]
        case Ack():
            return [pb.SessionRequest(ack=pb.Ack(received_number=message.received_number))]
        case Submit():
            return submit_requests(number, message)
        case Cancel():
            ids = pb.CancelAttempts(attempt_ids=message.attempt_ids)
            return [pb.SessionRequest(number=number, cancel=ids)]
        case _:
            return [_room_to_proto(number, message)]


def _room_to_proto(
    number: int, message: AskGrant | CancelAsk | TakeGrant | ReturnGrants
) -> pb.SessionRequest:
    match message:
        case AskGrant():
            ask = pb.AskGrant(
                ask_id=message.ask_id,
                blocks=message.blocks,
                wait_max=duration_to_proto(message.wait_max_s),
            )
            return pb.SessionRequest(number=number, ask=ask)
        case CancelAsk():
            return pb.SessionRequest(number=number, cancel_ask=pb.CancelAsk(ask_id=message.ask_id))
        case TakeGrant():
            take = pb.TakeGrant(
                grant_id=message.grant_id,
                blocks=message.blocks,
                keep=duration_to_proto(message.keep_s),
            )
            return pb.SessionRequest(number=number, take=take)
        case ReturnGrants():
            ids = pb.ReturnGrants(grant_ids=message.grant_ids)
            return pb.SessionRequest(number=number, return_grants=ids)


class RouterMessages:
    """Reads what one connection of a router brings. Make a new one for each connection."""

    def __init__(self) -> None:
        self._pieces = Pieces()

    def read(self, request: pb.SessionRequest) -> Iterator[tuple[int, FromRouter]]:
        """The whole messages in what came, one by one, with their numbers. Raises as `feed` does.

        Take each before the next is read: those before a faulty one count.
        """
        batched = request.WhichOneof("body") == "batch"
        if batched and request.number:
            raise _invalid(f"number: {request.number} with batch; its messages have their own")
        for each in request.batch.messages if batched else (request,):
            message = self.feed(each)
            if message is not None:
                yield message

    def feed(self, request: pb.SessionRequest) -> tuple[int, FromRouter] | None:
        """Return one message with its number, or None if pieces of it are still to come.

        The caller gives the number to its link, which says whether the message is a
        repeat; 0 is for Hello and Ack. What is wrong with a submission comes as
        BadSubmission, for its attempt alone. Raises INVALID_REQUEST for a session
        that cannot go on: an unknown message, a missing number, a meaningless ask.
        """
        kind = request.WhichOneof("body")
        if kind is None:
            raise _invalid("body: absent, or a message of a newer version; send one of ours")
        if kind == "batch":
            raise _invalid("batch: within a batch; put its messages side by side")
        if (request.number == 0) is not (kind in ("hello", "ack")):
            raise _invalid(f"number: {request.number} with {kind}; count all but hello and ack")
        message = self._read(kind, request)
        return None if message is None else (request.number, message)

    def _read(self, kind: str, request: pb.SessionRequest) -> FromRouter | None:
        match kind:
            case "submit":
                return read_submission(request.submit)
            case "submit_chunk":
                return self._pieces.add(request.number, request.submit_chunk)
            case "hello":
                return _hello_from_proto(request.hello)
            case "ack":
                return Ack(request.ack.received_number)
            case "cancel":
                return Cancel(tuple(request.cancel.attempt_ids))
            case _:
                return _room_from_proto(kind, request)


def _room_from_proto(kind: str, request: pb.SessionRequest) -> RouterMessage:
    match kind:
        case "ask":
            ask = request.ask
            _positive("ask.blocks", ask.blocks)
            return AskGrant(ask.ask_id, ask.blocks, duration_from_proto(ask.wait_max))
        case "cancel_ask":
            return CancelAsk(request.cancel_ask.ask_id)
        case "take":
            take = request.take
            _positive("take.blocks", take.blocks)
            return TakeGrant(take.grant_id, take.blocks, duration_from_proto(take.keep))
        case _:
            return ReturnGrants(tuple(request.return_grants.grant_ids))


def _hello_to_proto(hello: Hello) -> pb.Hello:
    return pb.Hello(
        router_id=hello.router_id,
        session_id=hello.session_id,
        reattach=hello.reattach,
        epoch=hello.epoch,
        received_number=hello.received_number,
        attempt_ids=hello.attempt_ids,
        takes_batches=hello.takes_batches,
    )


def _hello_from_proto(message: pb.Hello) -> Hello:
    for name in ("router_id", "session_id"):
        if not getattr(message, name):
            raise _invalid(f"hello.{name}: empty; set it")
    return Hello(
        router_id=message.router_id,
        session_id=message.session_id,
        reattach=message.reattach,
        epoch=message.epoch,
        received_number=message.received_number,
        attempt_ids=tuple(message.attempt_ids),
        takes_batches=message.takes_batches,
    )


def worker_message_to_proto(
    number: int, message: WorkerMessage | Welcome | Ack
) -> pb.SessionResponse:
    """What to send for one message."""
    match message:
        case Frame():
            return pb.SessionResponse(number=number, frame=frame_to_proto(message))
        case Grants():
            return pb.SessionResponse(number=number, grants=_grants_to_proto(message))
        case Accepted():
            accepted = pb.Accepted(
                attempt_id=message.attempt_id, slot=message.slot, rank=message.rank
            )
            return pb.SessionResponse(number=number, accepted=accepted)
        case Refused():
            failure = failure_to_proto(message.error)
            refused = pb.Refused(attempt_id=message.attempt_id, failure=failure)
            return pb.SessionResponse(number=number, refused=refused)
        case Ack():
            return pb.SessionResponse(ack=pb.Ack(received_number=message.received_number))
        case Welcome():
            return pb.SessionResponse(welcome=_welcome_to_proto(message))


def worker_message_from_proto(
    response: pb.SessionResponse, asked: Callable[[int], bool]
) -> FromWorker:
    """The message that arrived; `asked(slot)` is True if its attempt asked for logprobs.

    Look at `response.number` first (0: Welcome or Ack) and drop repeats unread: by then
    their slots may name other attempts. Raises INTERNAL, naming the field, if a worker
    broke the contract.
    """
    kind = response.WhichOneof("body")
    if (response.number == 0) is not (kind in ("welcome", "ack")):
        raise _broken(f"number: {response.number} with {kind}")
    match kind:
        case "frame":
            return frame_from_proto(response.frame, asked)
        case "grants":
            return _grants_from_proto(response.grants)
        case "accepted":
            accepted = response.accepted
            return Accepted(accepted.attempt_id, accepted.slot, accepted.rank)
        case "refused":
            refused = response.refused
            return Refused(refused.attempt_id, failure_from_proto(refused.failure))
        case "welcome":
            return _welcome_from_proto(response.welcome)
        case "ack":
            return Ack(response.ack.received_number)
    raise _broken("body: absent, or unknown here")


def _welcome_to_proto(welcome: Welcome) -> pb.Welcome:
    return pb.Welcome(
        worker_id=welcome.worker_id,
        group_id=welcome.group_id,
        epoch=welcome.epoch,
        reattached=welcome.reattached,
        received_number=welcome.received_number,
        attempts=[pb.AttemptState(attempt_id=name, known=known) for name, known in welcome.known],
        reattach=duration_to_proto(welcome.reattach_s),
        kv_layout=welcome.kv_layout,
        block_size_tokens=welcome.block_size_tokens,
        grant_blocks=welcome.grant_blocks,
        model_len_max_tokens=welcome.model_len_max_tokens,
        blocks_per_rank=welcome.blocks_per_rank,
        takes_batches=welcome.takes_batches,
        ranks=welcome.ranks,
        seats_per_rank=welcome.seats_per_rank,
    )


def _welcome_from_proto(message: pb.Welcome) -> Welcome:
    for name in ("block_size_tokens", "grant_blocks", "model_len_max_tokens", "blocks_per_rank"):
        if getattr(message, name) == 0:
            raise _broken(f"welcome.{name}: 0")
    return Welcome(
        worker_id=message.worker_id,
        group_id=message.group_id,
        epoch=message.epoch,
        reattached=message.reattached,
        received_number=message.received_number,
        known=tuple((attempt.attempt_id, attempt.known) for attempt in message.attempts),
        reattach_s=duration_from_proto(message.reattach),
        kv_layout=message.kv_layout,
        block_size_tokens=message.block_size_tokens,
        grant_blocks=message.grant_blocks,
        model_len_max_tokens=message.model_len_max_tokens,
        blocks_per_rank=message.blocks_per_rank,
        takes_batches=message.takes_batches,
        ranks=message.ranks,
        seats_per_rank=message.seats_per_rank,
    )


def _grants_to_proto(grants: Grants) -> pb.Grants:
    return pb.Grants(
        grants=[
            pb.Grant(
                grant_id=grant.grant_id,
                rank=grant.rank,
                blocks=grant.blocks,
                ttl=duration_to_proto(grant.ttl_s),
                ask_id=grant.ask_id,
            )
            for grant in grants.grants
        ],
        refused=[
            pb.RefusedAsk(ask_id=ask_id, failure=failure_to_proto(error))
            for ask_id, error in grants.refused
        ],
        load=pb.GroupLoad(
            seats_free=grants.load.seats_free,
            blocks_free=grants.load.blocks_free,
            asks_waiting=grants.load.asks_waiting,
            draining=grants.load.draining,
        ),
    )


def _grants_from_proto(message: pb.Grants) -> Grants:
    load = message.load
    return Grants(
        grants=tuple(_granted_from_proto(grant) for grant in message.grants),
        refused=tuple((x.ask_id, failure_from_proto(x.failure)) for x in message.refused),
        load=GroupLoad(load.seats_free, load.blocks_free, load.asks_waiting, load.draining),
    )


def _granted_from_proto(message: pb.Grant) -> Granted:
    if not message.grant_id:
        raise _broken("grants.grant_id: empty")
    if message.blocks == 0:
        raise _broken("grants.blocks: 0")
    ttl_s = duration_from_proto(message.ttl)
    return Granted(message.grant_id, message.rank, message.blocks, ttl_s, message.ask_id)


def _positive(name: str, value: int) -> None:
    if value == 0:
        raise _invalid(f"{name}: 0; ask for at least one")


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)


def _broken(message: str) -> ServingError:
    return ServingError(Reason.INTERNAL, f"{message}: a worker broke the contract")
