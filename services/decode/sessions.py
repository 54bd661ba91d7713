"""The sessions of one worker: opened, broken, reattached, ended."""

import asyncio
from collections.abc import Callable

from services.decode.config import DecodeConfig
from services.decode.decode import Decoding
from services.decode.room import Room
from services.decode.session import Connection, Incoming, Session, Write
from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import (
    AskGrant,
    Cancel,
    CancelAsk,
    Hello,
    NumberGap,
    ReturnGrants,
    Submit,
    TakeGrant,
    Welcome,
)
from splitwave.engine.port import GroupDescription
from splitwave.wire.session import BadSubmission, FromRouter

HELLO_WAIT_S = 5.0
"""How long a connection may stand without a word."""
LINGER_S = 2.0
"""What a router gets, in a drain, to acknowledge the last that it was sent."""


class Sessions:
    """Every session that is kept, connected or not."""

    def __init__(
        self,
        group: GroupDescription,
        worker_id: str,
        config: DecodeConfig,
        clock: Callable[[], float],
    ) -> None:
        self._group = group
        self._worker_id = worker_id
        self._config = config
        self._now_s = clock
        self.by_id: dict[str, Session] = {}
        self.opened = 0
        self.reattached = 0
        self._drained_at_s: float | None = None

    def serve_with(self, room: Room, decoding: Decoding) -> None:
        """Say where messages go. Called once."""
        self._room = room
        self._decoding = decoding

    async def serve(self, incoming: Incoming, write: Write) -> None:
        """Serve one connection of a session until one of its ends closes it.

        Returns if the router closed it. Raises ServingError for whatever else ended it.
        """
        try:
            async with asyncio.timeout(HELLO_WAIT_S):
                hello = await anext(incoming, None)
        except TimeoutError:
            raise _invalid(f"hello: none came within {HELLO_WAIT_S:g} s; send it at once") from None
        if hello is None:
            return
        session, connection = self._attach(hello[1])
        reading = asyncio.create_task(self._read(session, incoming), name="session: in")
        writing = asyncio.create_task(connection.write_all(write), name="session: out")
        ends: list[asyncio.Future[None]] = [connection.ended, reading, writing]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
        except asyncio.CancelledError:
            writing.cancel()
            raise
        finally:
            session.disconnect(connection, self._now_s())
            connection.close()
            reading.cancel()
            # gRPC sends no status while a write is under way: without this wait the router
            # would never hear of the end. A write ends when it is read, or with the stream.
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self, session: Session, incoming: Incoming) -> None:
        async for number, message in incoming:
            if session.receive(number, message):
                self._take(session, message)

    def _take(self, session: Session, message: FromRouter) -> None:
        """Act on one message. Nothing here waits."""
        match message:
            case Submit():
                self._decoding.submit(session, message)
            case BadSubmission():
                if not session.knows(message.attempt_id):
                    self._decoding.refuse(session, message.attempt_id, message.error)
            case Cancel():
                for attempt_id in message.attempt_ids:
                    self._decoding.cancel(session, attempt_id)
            case AskGrant() | CancelAsk() | TakeGrant() | ReturnGrants():
                self._room.take_message(session, message)

    def _attach(self, hello: FromRouter) -> tuple[Session, Connection]:
        if not isinstance(hello, Hello):
            raise _invalid("hello: absent; it is the first message of a connection")
        if hello.reattach:
            session = self._known(hello)
            self.reattached += 1
        else:
            session = self._open(hello)
        welcome = self._welcome(session, hello)
        return session, session.connect(welcome, batches=hello.takes_batches)

    def _open(self, hello: Hello) -> Session:
        if hello.session_id in self.by_id:
            raise _invalid("hello.session_id: taken; reattach, or choose another")
        if self._drained_at_s is not None:
            raise ServingError(Reason.WORKER_DRAINING, "this worker takes no new sessions")
        session = Session(hello, kept_max=self._config.kept_max, now_s=self._now_s())
        self.by_id[hello.session_id] = session
        self._room.open(session)
        self.opened += 1
        return session

    def _known(self, hello: Hello) -> Session:
        session = self.by_id.get(hello.session_id)
        if session is None or hello.epoch != self._group.epoch:
            raise ServingError(
                Reason.EPOCH_MISMATCH,
                "hello.reattach: the session is of an earlier epoch, or no longer kept; "
                "start a new one",
            )
        try:
            session.link.ack(hello.received_number)
        except NumberGap as gap:
            raise _invalid(f"hello.received_number: {gap}") from gap
        return session

    def _welcome(self, session: Session, hello: Hello) -> Welcome:
        group = self._group
        return Welcome(
            worker_id=self._worker_id,
            group_id=group.group_id,
            epoch=group.epoch,
            reattached=hello.reattach,
            received_number=session.link.received,
            known=tuple((x, session.knows(x)) for x in hello.attempt_ids),
            reattach_s=self._config.reattach_s,
            kv_layout=group.kv_layout,
            block_size_tokens=group.block_size_tokens,
            grant_blocks=self._room.grant_blocks,
            model_len_max_tokens=group.model_len_max_tokens,
            blocks_per_rank=group.blocks_per_rank,
            takes_batches=True,
            ranks=group.ranks,
            seats_per_rank=group.seats_per_rank,
        )

    def drain(self) -> None:
        """Open no more sessions; those that have nothing left end with the next sweep."""
        if self._drained_at_s is None:
            self._drained_at_s = self._now_s()

    def sweep(self) -> None:
        """End what is over: broken too long, unread, or drained. Acknowledge what has come."""
        now_s = self._now_s()
        for session in list(self.by_id.values()):
            error = self._why_over(session, now_s)
            if error is not None:
                self.end(session, error)
            else:
                session.acknowledge()

    def _why_over(self, session: Session, now_s: float) -> ServingError | None:
        broken_at_s = session.broken_at_s
        if session.overloaded:
            message = f"{self._config.kept_max} messages are unread; acknowledge them"
            return ServingError(Reason.OVERLOADED, message)
        if broken_at_s is not None and now_s - broken_at_s >= self._config.reattach_s:
            return ServingError(Reason.CANCELLED, "the session was not reattached in time")
        if self._drained_at_s is not None and not session.attempts:
            waited_s = now_s - self._drained_at_s
            if waited_s >= LINGER_S or (session.read() and session.frame is None):
                return ServingError(Reason.WORKER_DRAINING, "all work of the session has ended")
        return None

    def end(self, session: Session, error: ServingError) -> None:
        """End a session for good, with all that it owns."""
        del self.by_id[session.session_id]
        self._decoding.end_session(session)
        self._room.close(session)
        if session.connection is not None:
            session.connection.end(error)

    def end_all(self, error: ServingError) -> None:
        """The worker is going."""
        for session in list(self.by_id.values()):
            self.end(session, error)


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
