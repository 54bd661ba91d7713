"""One session: its numbered messages, what it owns, and the connection that it has now or lacks."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import (
    Accepted,
    Ack,
    Ended,
    Frame,
    Grants,
    GroupLoad,
    Hello,
    Link,
    NumberGap,
    Refused,
    Unread,
    Welcome,
    WorkerMessage,
)
from splitwave.wire.batch import BATCH_MESSAGES_MAX
from splitwave.wire.session import FromRouter

if TYPE_CHECKING:
    from services.decode.attempt import Attempt

Incoming = AsyncIterator[tuple[int, FromRouter]]
"""Messages with their numbers, as the connection brings them."""
Numbered = tuple[int, WorkerMessage | Welcome | Ack]
Write = Callable[[Sequence[Numbered]], Awaitable[None]]
"""Sends messages with their numbers, waiting for the peer's flow control; several only to a
router that takes batches."""

LINGER_S = 0.005
"""How long what no router waits for may lie until it shares the next write: room that was not
asked for, and the word that an attempt was accepted, whose tokens follow."""
ACK_EVERY = 16
"""Messages after which an acknowledgement does not wait for the next sweep."""
REMEMBERED_MAX = 4096
"""Answers of ended attempts that are kept for repeats."""


class Connection:
    """One stream of a session. It carries what the session's link keeps, in order."""

    def __init__(
        self, welcome: Welcome, unacked: list[tuple[int, WorkerMessage]], *, batches: bool
    ) -> None:
        """`batches`: the router reads several messages at once."""
        self._welcome = welcome
        self._pending: deque[Numbered] = deque(unacked)
        self._batches = batches
        self._wake = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._ack: int | None = None
        self._closed = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the worker wants no more of it; its exception is the RPC's status."""

    def push(self, number: int, message: WorkerMessage) -> None:
        """Send a message after those before it."""
        self._pending.append((number, message))
        if _is_awaited(message):
            self._wake.set()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._lingered)

    def _stop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _lingered(self) -> None:
        self._linger = None
        self._wake.set()

    def acknowledge(self, number: int) -> None:
        """Tell the router what has arrived."""
        self._ack = number
        self._wake.set()

    def end(self, error: ServingError) -> None:
        """Close the stream with a status."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # Seen: the stream may be gone already.

    def close(self) -> None:
        """Write no more than what is under way."""
        self._closed = True
        self._pending.clear()
        self._ack = None
        self._stop_linger()
        self._wake.set()

    async def write_all(self, write: Write) -> None:
        """Write until it is closed."""
        await write([(0, self._welcome)])
        while True:
            while messages := self._take():
                await write(messages)
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> list[Numbered]:
        """What to write now: several messages, if the router reads several at once.

        Not all there are: `close` stops what was not taken.
        """
        if self._pending and not self._batches:
            return [self._pending.popleft()]
        self._stop_linger()
        count = min(len(self._pending), BATCH_MESSAGES_MAX)
        messages = [self._pending.popleft() for _ in range(count)]
        if self._ack is not None:
            messages.append((0, Ack(self._ack)))
            self._ack = None
        return messages


class Session:
    """State that outlives a connection.

    Invariant: a slot names at most one live attempt.
    """

    def __init__(self, hello: Hello, *, kept_max: int, now_s: float) -> None:
        self.session_id = hello.session_id
        self.router_id = hello.router_id
        self.link: Link[WorkerMessage] = Link(kept_max=kept_max)
        self.attempts: dict[str, Attempt] = {}
        """Live ones, by attempt id."""
        self.frame: Frame | None = None
        """Tokens of the lock-step that is still coming in."""
        self.frames_sent = 0
        self.load_sent: GroupLoad | None = None
        self.connection: Connection | None = None
        self.broken_at_s: float | None = now_s
        """Since when there is no connection."""
        self.overloaded = False
        """True once the router left too much unread; nothing more is sent."""
        self._answers: OrderedDict[str, Accepted | Refused] = OrderedDict()
        self._ends: OrderedDict[str, Ended] = OrderedDict()
        self._slots_free: list[int] = []
        self._slots = 0
        self._acked = 0

    def send(self, message: WorkerMessage) -> None:
        """Number a message, keep it until it is acknowledged, and send it if there is a way."""
        if self.overloaded:
            return
        try:
            number = self.link.send(message)
        except Unread:
            self.overloaded = True  # The next sweep ends the session.
            return
        if self.connection is not None:
            self.connection.push(number, message)

    def receive(self, number: int, message: FromRouter) -> bool:
        """True if a message is new and not about the link itself. Raises INVALID_REQUEST."""
        try:
            if isinstance(message, Ack):
                self.link.ack(message.received_number)
                return False
            if isinstance(message, Hello):
                raise _invalid("hello: a second one; it is the first message of a connection")
            new = self.link.receive(number)
        except NumberGap as gap:
            raise _invalid(f"number: {gap}") from gap
        if self.link.received - self._acked >= ACK_EVERY:
            self.acknowledge()
        return new

    def acknowledge(self) -> None:
        """Tell the router what has arrived, if it does not know."""
        if self.connection is not None and self._acked != self.link.received:
            self._acked = self.link.received
            self.connection.acknowledge(self._acked)

    def connect(self, welcome: Welcome, *, batches: bool) -> Connection:
        """Go on over a new connection; an older one ends. `batches`: as its Hello says."""
        if self.connection is not None:
            self.connection.end(
                ServingError(Reason.CANCELLED, "another connection has taken this session over")
            )
        self.connection = Connection(welcome, self.link.replay(), batches=batches)
        self.broken_at_s = None
        self._acked = welcome.received_number
        return self.connection

    def disconnect(self, connection: Connection, now_s: float) -> None:
        """A connection has ended. The session is kept for a while, unless it has another."""
        if self.connection is connection:
            self.connection = None
            self.broken_at_s = now_s

    def knows(self, attempt_id: str) -> bool:
        """True if a submission of that attempt has been answered here."""
        return attempt_id in self._answers

    def answer(self, answer: Accepted | Refused) -> None:
        """Answer a submission, for ever."""
        self._answers[answer.attempt_id] = answer
        if len(self._answers) - len(self.attempts) > REMEMBERED_MAX:
            oldest = next(x for x in self._answers if x not in self.attempts)
            del self._answers[oldest]
            self._ends.pop(oldest, None)
        self.send(answer)

    def repeat(self, attempt_id: str) -> None:
        """Answer a repeated submission as it was answered before."""
        if attempt_id in self._ends:
            self.send(Frame(step=self.frames_sent, ended=[self._ends[attempt_id]]))
        else:
            self.send(self._answers[attempt_id])

    def remember_end(self, ended: Ended) -> None:
        """Keep the end of an attempt for repeats of its submission."""
        self._ends[ended.attempt_id] = ended

    def take_slot(self) -> int:
        """The smallest number that names no live attempt, roughly."""
        if self._slots_free:
            return self._slots_free.pop()
        self._slots += 1
        return self._slots - 1

    def free_slot(self, slot: int) -> None:
        """A slot's attempt has ended."""
        self._slots_free.append(slot)

    def read(self) -> bool:
        """True if the router has acknowledged all that was sent."""
        return self.link.acked == self.link.sent


def _is_awaited(message: WorkerMessage) -> bool:
    """True if the router or its client waits for a message."""
    if isinstance(message, Grants):
        return bool(message.refused) or any(granted.ask_id for granted in message.grants)
    return not isinstance(message, Accepted)


def _invalid(message: str) -> ServingError:
    return ServingError(Reason.INVALID_REQUEST, message)
