"""Grants: the desk's decisions, told to the sessions they are for."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.decode.session import Session
from splitwave.core.errors import Reason, ServingError
from splitwave.core.grant import Ask, AskRefused, Grant, GrantDesk, GrantTable, Seat
from splitwave.core.grant_reports import GrantReports, RankLoad
from splitwave.core.session import (
    AskGrant,
    CancelAsk,
    Granted,
    Grants,
    GroupLoad,
    ReturnGrants,
    TakeGrant,
)

log = logging.getLogger(__name__)

TTL_TOLD = 0.75
"""Share of a grant's life that its router is told, so that none is spent after its end."""


@dataclass(slots=True)
class _News:
    """What one session is to be told."""

    granted: list[Granted] = field(default_factory=list)
    refused: list[tuple[str, ServingError]] = field(default_factory=list)


class Room:
    """The account of seats and blocks, settled once after all changes of a turn of the loop."""

    def __init__(
        self, desk: GrantDesk, sessions: Mapping[str, Session], clock: Callable[[], float]
    ) -> None:
        self._desk = desk
        self.reports = GrantReports(desk.table)
        """What the ranks say of it."""
        self._sessions = sessions
        self._now_s = clock
        self._due = False
        self.draining = False
        self.held = False
        """True while no room is given because the group's standing is in doubt."""

    @property
    def closed(self) -> bool:
        """True while no room is given."""
        return self.draining or self.held

    @property
    def table(self) -> GrantTable:
        """The account."""
        return self._desk.table

    @property
    def grant_blocks(self) -> int:
        """Blocks of a grant that is pushed unasked."""
        return min(self._desk.settings.grant_blocks, self.table.blocks_per_rank)

    def load(self) -> GroupLoad:
        """What routers choose between workers by."""
        table = self.table
        return GroupLoad(table.seats_free, table.blocks_free, self._desk.asks_waiting, self.closed)

    def open(self, session: Session) -> None:
        """A session begins."""
        self._desk.open(session.session_id)
        self.changed()

    def close(self, session: Session) -> None:
        """A session has gone for good: its asks and grants go with it."""
        self._desk.close(session.session_id)
        self.changed()

    def take_message(
        self, session: Session, message: AskGrant | CancelAsk | TakeGrant | ReturnGrants
    ) -> None:
        """Act on what a router says of room."""
        match message:
            case AskGrant():
                self._ask(session, message)
            case CancelAsk():
                self._desk.cancel_ask(session.session_id, message.ask_id)
            case TakeGrant():  # One that is gone is refused with its submission.
                keep_s = self._now_s() + message.keep_s
                self.table.take(session.session_id, message.grant_id, message.blocks, keep_s)
            case ReturnGrants():
                for grant_id in message.grant_ids:
                    self.table.give_back(session.session_id, grant_id)
        self.changed()

    def _ask(self, session: Session, ask: AskGrant) -> None:
        if self.closed:
            self._tell(session, _News(refused=[(ask.ask_id, _draining())]))
            return
        now_s = self._now_s()
        waiting = Ask(session.session_id, ask.ask_id, ask.blocks, now_s + ask.wait_max_s)
        refused = self._desk.ask(waiting, now_s)
        if refused is not None:
            self._tell(session, _News(refused=[(ask.ask_id, _error(refused))]))

    def spend(self, session: Session, grant_id: str, engine_id: str) -> Seat | None:
        """Seat an attempt; None if its grant is not live."""
        self.changed()
        seat = self.table.spend(session.session_id, grant_id, engine_id)
        if seat is not None:
            self.reports.seated(seat, self._now_s())
        return seat

    def free(self, engine_id: str, *, aborted: bool = False) -> None:
        """An attempt's seat and blocks come back. Repeats change nothing.

        `aborted`: the engine is only told to end it, and may count it for a while.
        """
        now_s, seat = self._now_s(), self.table.seat(engine_id)
        if seat is not None and self._desk.freed(engine_id, now_s):
            self.reports.freed(seat, now_s, aborted=aborted)
            self.changed()

    def heard(self, loads: Iterable[RankLoad]) -> None:
        """Correct the account by what the ranks say that they hold."""
        changes = [self.reports.on_load(load) for load in loads]
        if any(changes):
            self.changed()
            reports = self.reports
            log.debug(
                "the ranks hold more or less beyond the account than before",
                extra={"beyond": list(self.table.unaccounted), "corrections": reports.corrections},
            )

    def drain(self) -> None:
        """Give no more room, and say so."""
        self.draining = True
        self._refuse_asks()

    def hold(self) -> None:
        """Give no more room until `go_on`, and say so."""
        self.held = True
        self._refuse_asks()

    def go_on(self) -> None:
        """Give room again, unless it drains."""
        self.held = False
        self.changed()
        self.tell_load()

    def _refuse_asks(self) -> None:
        for refused in self._desk.refuse_all(Reason.WORKER_DRAINING, str(_draining())):
            self._tell(
                self._sessions[refused.session_id],
                _News(refused=[(refused.ask_id, _error(refused))]),
            )
        self.tell_load()

    def changed(self) -> None:
        """Something changed: settle at the end of this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        """Give what can be given. Also called by the sweep, since time changes things too."""
        self._due = False
        now_s = self._now_s()
        if self.closed:
            self.table.sweep(now_s)
            return
        news: dict[str, _News] = {}
        for item in self._desk.settle(now_s):
            told = news.setdefault(item.session_id, _News())
            if isinstance(item, AskRefused):
                told.refused.append((item.ask_id, _error(item)))
            else:
                told.granted.append(_granted(item, now_s))
        for session_id, told in news.items():
            self._tell(self._sessions[session_id], told)

    def tell_load(self) -> None:
        """Tell the load to each session that was last told another one."""
        load = self.load()
        for session in self._sessions.values():
            if session.connection is not None and session.load_sent != load:
                self._tell(session, _News())

    def _tell(self, session: Session, news: _News) -> None:
        session.load_sent = self.load()
        session.send(Grants(tuple(news.granted), tuple(news.refused), session.load_sent))

    def check(self) -> None:
        """Assert the invariants of the account."""
        self._desk.check()


def _granted(grant: Grant, now_s: float) -> Granted:
    ttl_s = TTL_TOLD * (grant.expires_at_s - now_s)
    return Granted(grant.grant_id, grant.rank, grant.blocks, ttl_s, grant.ask_id)


def _error(refused: AskRefused) -> ServingError:
    return ServingError(refused.reason, refused.message, retry_after_s=refused.retry_after_s)


def _draining() -> ServingError:
    return ServingError(Reason.WORKER_DRAINING, "this worker takes no new work")
