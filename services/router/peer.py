"""One decode worker as this router sees it: a session, kept alive over broken connections."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.router.backoff import Backoff
from services.router.first_end import first_end
from services.router.session import RoomEvents, Session
from services.router.tally import Tally
from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import Ack, Hello, NumberGap, RouterMessage, Welcome

WELCOME_WAIT_S = 5.0
"""How long a worker may take to answer Hello."""


_BREAKS = frozenset({Reason.WORKER_LOST, Reason.CANCELLED, Reason.DEADLINE_EXCEEDED})
"""How a broken connection may look; whether the session still lives, only a reattach tells."""


_log = logging.getLogger(__name__)


class Gone(ServingError):
    """Nobody listens at the worker's address: its process has ended, with all that it kept."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.WORKER_LOST, message)


class Received(NamedTuple):
    """One message that came, still to be read: a repeat never is."""

    number: int
    read: Callable[[Callable[[int], bool]], object]
    """Takes "did the attempt in this slot ask for log probabilities"; returns the message."""


class Connection(Protocol):
    """One call of DecodeService.Session. Every method raises ServingError when it breaks.

    Leaving the dialled context raises Gone instead if nobody listens any more.
    """

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None:
        """Send messages with their numbers, in order; several only if Welcome takes batches."""

    async def receive(self) -> Received | None:
        """The next message, or None once the worker has ended the session."""


Dial = Callable[[str], AbstractAsyncContextManager[Connection]]
"""Connects to a decode worker's address; leaving the context breaks the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How a router keeps its sessions."""

    router_id: str
    """Unique for ever: ids of sessions begin with it."""
    silence_max_s: float = 35.0
    """A worker that says nothing for so long while attempts run has hung: longer than any stall
    limit, since a worker that lives ends an attempt that stalls."""
    tally: Tally = field(default_factory=Tally)
    """Counts over all sessions of the router."""


class DecodePeer:
    """Keeps one session with one worker, reattaches it when it breaks, starts a new one after."""

    def __init__(
        self, address: str, dial: Dial, settings: PeerSettings, events: RoomEvents
    ) -> None:
        self.address = address
        self.leaving = False
        """True once the worker is no longer listed: what runs there is finished."""
        self._dial = dial
        self._router_id = settings.router_id
        self._silence_max_s = settings.silence_max_s
        self._events = events
        self._tally = settings.tally
        self._ids = itertools.count(1)
        self._turned_away = False
        """True if the worker, asked last, took no session since it drains."""
        self.session = self._new_session()

    @property
    def draining(self) -> bool:
        """True if it says that it takes no new work."""
        return self.session.load.draining if self.session.connected else self._turned_away

    @property
    def reachable(self) -> bool:
        """True if it can be talked to, whatever it says."""
        return self.session.connected or self._turned_away

    def _new_session(self) -> Session:
        session_id = f"{self._router_id}/{self.address}/{next(self._ids)}"
        return Session(session_id, self._events, self._tally)

    async def run(self) -> None:
        """Serve for ever, or until it is leaving and nothing runs."""
        backoff = Backoff()
        try:
            while not self.leaving:
                await self._live(self.session, backoff)
                self.session = self._new_session()
                await backoff.wait()
        finally:
            self.session.end(ServingError(Reason.WORKER_LOST, "the router has left the worker"))

    async def _live(self, session: Session, backoff: Backoff) -> None:
        """One session from its opening to its end, over any number of connections."""
        while session.over is None:
            error = await self._connect(session, backoff)
            session.detach()
            self._turned_away = error.reason is Reason.WORKER_DRAINING
            left_s = _reattach_left_s(session)
            if left_s <= 0.0 or error.reason not in _BREAKS or isinstance(error, Gone):
                decertified = error.reason is Reason.GROUP_DECERTIFIED
                why = error.reason if decertified else Reason.WORKER_LOST
                session.end(ServingError(why, f"decode session: {error.message}"))
                return
            await backoff.wait(left_s)

    async def _connect(self, session: Session, backoff: Backoff) -> ServingError:
        """Connect and talk until it breaks; return why it did."""
        first = session.welcome is None
        wait_s = WELCOME_WAIT_S if first else max(0.0, _reattach_left_s(session))
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(wait_s):
                    connection = await stack.enter_async_context(self._dial(self.address))
                    welcome = await self._welcome(session, connection)
                session.attach(welcome)
                backoff.reset()
                await self._talk(session, connection)
        except ServingError as error:
            if error.reason is Reason.INTERNAL:
                _log.warning("%s: %s", self.address, error.message)
                backoff.distrust()
            return error
        except TimeoutError:
            return ServingError(Reason.WORKER_LOST, "the worker did not answer Hello in time")
        except Exception as error:  # noqa: BLE001  # What one worker sends must not cost us it.
            again = backoff.distrusted  # With the same words, most likely.
            _log.warning(
                "%s: what it sent could not be taken: %r", self.address, error, exc_info=not again
            )
            backoff.distrust()
            return ServingError(Reason.INTERNAL, f"{type(error).__name__}: {error}")
        raise AssertionError("talking ends with an error")

    async def _welcome(self, session: Session, connection: Connection) -> Welcome:
        await connection.send([(0, session.hello(self._router_id))])
        received = await connection.receive()
        welcome = None if received is None else received.read(session.asked_logprobs)
        if not isinstance(welcome, Welcome):
            raise ServingError(Reason.INTERNAL, "the worker's first message was no Welcome")
        before = session.welcome
        if before is not None and not (welcome.reattached and welcome.epoch == before.epoch):
            raise ServingError(Reason.EPOCH_MISMATCH, "the worker no longer keeps the session")
        return welcome

    async def _talk(self, session: Session, connection: Connection) -> None:
        """Talk until one of the three ends, and raise how."""

        def ended() -> bool:
            session.detach()  # Before anybody asks how it ended, and whether the worker lives.
            return session.over is None

        await first_end(
            _read(session, connection),
            _write(session, connection),
            _notice_silence(session, self._silence_max_s),
            ended=ended,
        )


def _reattach_left_s(session: Session) -> float:
    """How long the worker still keeps the session; 0 if it never had it."""
    if session.welcome is None:
        return 0.0
    now_s = asyncio.get_running_loop().time()
    return session.broke_at_s + session.welcome.reattach_s - now_s


async def _write(session: Session, connection: Connection) -> None:
    """Send what the session puts into its outbox, all of it in one write if it can be."""
    while True:
        while session.outbox:
            await connection.send(session.take_outbox())
        if session.over is not None:
            raise session.over
        session.outbox_filled.clear()
        await session.outbox_filled.wait()


async def _notice_silence(session: Session, silence_max_s: float) -> None:
    """Break with a worker that hangs: its host still answers pings, and nothing else would tell.

    So with one that leaves a message half read, when its session is over meanwhile.
    """
    while True:
        await asyncio.sleep(silence_max_s / 4)
        if session.over is not None:
            raise session.over
        if session.silent_s(asyncio.get_running_loop().time()) > silence_max_s:
            raise ServingError(Reason.WORKER_LOST, "the worker says nothing while attempts run")


async def _read(session: Session, connection: Connection) -> None:
    """The frame loop: feed what arrives to the session, which writes to the sinks."""
    while (received := await connection.receive()) is not None:
        try:
            session.receive(received.number, received.read)
        except NumberGap as gap:
            raise ServingError(Reason.INTERNAL, str(gap)) from gap
    raise ServingError(Reason.WORKER_LOST, "the worker ended the session")
