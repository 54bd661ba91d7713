"""Room in decode groups, as a router spends it: floats of sessions, asks, and who waits.

The workers decide on which rank and whether there is room; a router only spends
what it was given, and asks where it has none.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.router.absence import absence
from services.router.grant_float import TTL_MARGIN
from services.router.line import Line
from services.router.standings import ANY
from splitwave.core.errors import Reason, ServingError
from splitwave.core.placement import floor_tier, roomier, two_choices
from splitwave.core.session import (
    AskGrant,
    CancelAsk,
    Granted,
    GroupLoad,
    ReturnGrants,
    Submit,
    TakeGrant,
)
from splitwave.core.worker import Role

if TYPE_CHECKING:
    from services.router.decode_attempt import Attempt
    from services.router.generate import RoomNeed, Sink
    from services.router.held import Held
    from services.router.session import Session

ANSWER_GRACE_S = 1.0
"""How long past its patience an ask's refusal may take to arrive."""
LINGER_S = 0.02
"""How long what nobody waits for may lie until it shares another message's write."""
POOL_WAIT_S = 0.8
"""How long a request waits for any worker to be there, unless a setting says so: it is answered
within two seconds, and noticing that a rank is stopped takes one of them."""
POOL_WAIT_LOST_S = 0.5
"""How long at most it does once an attempt was lost, or its client has had tokens. That client is
told within two seconds of a group's death, the noticing included, that it cannot go on now; a group
that is started again takes longer than anybody watches a stream stand still."""
LOOK_AGAIN_S = 1.0
"""How often a request that waits looks whether the worker that it asked is still there."""


class TakenRoom:
    """A grant that is kept for one request; its `with` block gives back what was not spent."""

    def __init__(self, session: "Session", granted: Granted) -> None:
        assert session.welcome is not None
        self._session = session
        self._spent = False
        self.grant_id = granted.grant_id
        self.worker_id = session.welcome.worker_id
        self.kv_layout = session.welcome.kv_layout

    def __enter__(self) -> "TakenRoom":
        """Begin to own the room."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back unless a submission spent it."""
        self.give_back()

    def give_back(self) -> None:
        """Return the grant, once."""
        if not self._spent:
            self._spent = True
            self._session.post(ReturnGrants((self.grant_id,)), LINGER_S)

    async def submit(self, submit: Submit, held: "Held", sink: "Sink") -> "Attempt":
        """Spend the grant; return once the worker has accepted, or raise why it has not."""
        assert not self._spent
        try:
            attempt = self._session.submit(submit, held, sink)
        except ServingError:
            self.give_back()  # It was not sent: the worker would keep the room for it.
            raise
        self._spent = True
        await attempt.accepted()
        return attempt


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that waits for room, with an ask at one worker at a time."""

    need: "RoomNeed"
    done: asyncio.Future[TakenRoom | ServingError]
    alone_since_s: float
    """Since when no worker is asked, while none is."""
    ask_id: str = ""
    asked: "Session | None" = None
    refused_by: dict[str, ServingError] = field(default_factory=dict)
    """By session id."""

    def asks_nobody(self) -> None:
        """Its ask has been answered, or is lost."""
        self.ask_id, self.asked, self.alone_since_s = "", None, _now_s()

    def patience_ends_s(self) -> float:
        """Long for room, short for any worker to be there."""
        until_s = self.need.waits_until.at_s
        if self.asked is not None:
            return until_s + ANSWER_GRACE_S
        return min(until_s, self.alone_since_s + self.need.pool_wait_s)


class Rooms:
    """Who gets the room that workers grant: requests by priority, then in the order of arrival.

    A request takes from a float if one fits, else it asks one worker, the roomier of
    two chosen by chance. A grant that then comes serves the first in line that it fits, whoever
    of them asked for it.
    """

    def __init__(
        self,
        sessions: Callable[[], Iterable["Session"]],
        chance: Callable[[], float],
        pool_wait_s: float = POOL_WAIT_S,
        absent: Callable[[], ServingError] = lambda: absence(Role.DECODE, (), ANY),
    ) -> None:
        """`sessions` lists all there are; `chance` returns numbers in [0, 1).

        `absent` makes the error of a request for which no worker is there.
        """
        self._sessions, self._absent = sessions, absent
        self.chance = chance
        self.pool_wait_s = pool_wait_s
        self._ids = itertools.count(1)
        self._waiters: Line[_Waiter] = Line()
        self._asks: dict[str, _Waiter] = {}
        self._asks_at: Counter[Session | None] = Counter()
        """Own asks that have not been answered: a worker's word of its load is older."""

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    async def take(self, need: "RoomNeed") -> TakenRoom:
        """Take room. Raises OVERLOADED or INVALID_REQUEST as a worker said, or POOL_UNAVAILABLE."""
        room = self._from_float(need)  # Whoever waits and fits was served before.
        if room is not None:
            return room
        need = replace(need, pool_wait_s=min(need.pool_wait_s, self.pool_wait_s))
        waiter = _Waiter(need, asyncio.get_running_loop().create_future(), _now_s())
        self._waiters.join(waiter, need.priority)
        self._ask(waiter)
        try:
            room_or_error = await self._answer(waiter)
        except BaseException:
            _give_back_unseen(waiter)
            raise
        finally:
            self._waiters.leave(waiter)
            self._withdraw(waiter)
        if isinstance(room_or_error, ServingError):
            raise room_or_error
        return room_or_error

    async def _answer(self, waiter: _Waiter) -> TakenRoom | ServingError:
        """Wait while there is patience."""
        while not waiter.done.done():
            left_s = waiter.patience_ends_s() - _now_s()
            if left_s <= 0.0:
                return self._out_of_patience(waiter)
            await asyncio.wait((waiter.done,), timeout=min(left_s, LOOK_AGAIN_S))
        return waiter.done.result()

    # What sessions report.

    def granted(self, session: "Session", granted: Granted) -> None:
        """Give a grant to the request that asked for it, or put it into the session's float."""
        waiter = self._ask_ended(granted.ask_id)
        if granted.ask_id and (waiter is None or waiter.done.done()):
            # Its ask was withdrawn, and the worker takes it back with that.
            return
        if waiter is None:
            session.float.add(granted, _now_s())
            return
        waiter.asks_nobody()
        first = self._first(waiter, session, granted)
        if first is not waiter:
            self._pass_ask_on(first, waiter)
        first.done.set_result(self._taken(session, granted, first.need))

    def _first(self, asker: _Waiter, session: "Session", granted: Granted) -> _Waiter:
        """Who gets a grant: the first in line that it fits, at the latest who asked for it."""
        for waiter in self._waiters:
            if waiter is asker:
                break
            fits = _fits(session, waiter.need) and _blocks(session, waiter.need) <= granted.blocks
            if fits and not waiter.done.done():
                return waiter
        return asker

    def _pass_ask_on(self, served: _Waiter, waiter: _Waiter) -> None:
        """Have who is served leave its ask to the one whose grant it got, if that one can use it.

        So it keeps a place in that worker's queue; otherwise it asks anew.
        """
        session, ask_id = served.asked, served.ask_id
        if session is None or not _can_use_ask(waiter, served.need, session):
            self._withdraw(served)
            self._ask(waiter)
            return
        served.asks_nobody()
        waiter.ask_id, waiter.asked = ask_id, session
        self._asks[ask_id] = waiter

    def refused(self, session: "Session", ask_id: str, error: ServingError) -> None:
        """An ask gets no grant there: ask the next worker, or give up with that error."""
        waiter = self._ask_ended(ask_id)
        if waiter is None or waiter.done.done():
            return
        waiter.asks_nobody()
        waiter.refused_by[session.session_id] = error
        if error.reason is Reason.INVALID_REQUEST or waiter.need.waits_until.passed(_now_s()):
            waiter.done.set_result(error)
        else:
            self._ask(waiter)

    def changed(self) -> None:
        """Floats or loads changed: serve who waits, in order."""
        for waiter in list(self._waiters):
            if not self._has_float():
                break
            room = None if waiter.done.done() else self._from_float(waiter.need)
            if room is not None:
                self._withdraw(waiter)
                waiter.done.set_result(room)

    def session_changed(self) -> None:
        """A session came, broke or ended: ask anew where an ask is lost, or was never made."""
        for waiter in list(self._waiters):
            if waiter.asked is not None and not waiter.asked.connected:
                self._withdraw(waiter)
            if waiter.asked is None and not waiter.done.done():
                self._ask(waiter)
            if waiter.asked is None and not waiter.done.done():
                at_s = waiter.patience_ends_s()
                asyncio.get_running_loop().call_at(at_s, self._give_up, waiter)
        self.changed()

    def _give_up(self, waiter: _Waiter) -> None:
        """No worker has come for it, unless one has."""
        left_s = waiter.patience_ends_s() - _now_s()
        if not waiter.done.done() and left_s < 0.01:  # Timers come a little early.
            waiter.done.set_result(self._out_of_patience(waiter))

    def _has_float(self) -> bool:
        return any(session.usable and session.float for session in self._sessions())

    # How a request gets room.

    def _fitting(self, need: "RoomNeed") -> list["Session"]:
        return [session for session in self._sessions() if _fits(session, need)]

    def _from_float(self, need: "RoomNeed") -> TakenRoom | None:
        now_s = _now_s()
        for session in sorted(self._fitting(need), key=lambda x: (_tier(x), -x.load.seats_free)):
            granted = session.float.take(_blocks(session, need), now_s)
            if granted is not None:
                return self._taken(session, granted, need)
        return None

    def _taken(self, session: "Session", granted: Granted, need: "RoomNeed") -> TakenRoom:
        """Keep a grant for a request: the worker holds it until the request's own time is up."""
        keep_s = need.keep_until.remaining_s(_now_s())
        blocks = min(_blocks(session, need), granted.blocks)
        linger_s = min(LINGER_S, granted.ttl_s * TTL_MARGIN / 2)
        session.post(TakeGrant(granted.grant_id, blocks, keep_s), linger_s)
        return TakenRoom(session, granted)

    def _ask(self, waiter: _Waiter) -> None:
        """Ask the roomier of two workers; without any, wait for one to come."""
        fitting = self._fitting(waiter.need)
        unasked = [x for x in fitting if x.session_id not in waiter.refused_by]
        if not unasked:
            if waiter.refused_by and fitting:
                waiter.done.set_result(_soonest(waiter.refused_by.values()))
            return
        soonest = min(map(_tier, unasked))
        unasked = [session for session in unasked if _tier(session) == soonest]
        a, b = two_choices(len(unasked), self.chance(), self.chance())
        first_is_roomier = roomier(self._load(unasked[a]), self._load(unasked[b]))
        session = unasked[a] if first_is_roomier else unasked[b]
        waiter.ask_id, waiter.asked = f"a{next(self._ids)}", session
        self._asks[waiter.ask_id] = waiter
        self._asks_at[session] += 1
        wait_s = waiter.need.waits_until.remaining_s(_now_s())
        session.post(AskGrant(waiter.ask_id, _blocks(session, waiter.need), wait_s))

    def _load(self, session: "Session") -> GroupLoad:
        asks = max(session.load.asks_waiting, self._asks_at[session])
        return replace(session.load, asks_waiting=asks)

    def _ask_ended(self, ask_id: str) -> _Waiter | None:
        waiter = self._asks.pop(ask_id, None)
        if waiter is not None:
            self._asks_at[waiter.asked] -= 1
            if not self._asks_at[waiter.asked]:
                del self._asks_at[waiter.asked]
        return waiter

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take an ask back; a grant already on its way for it goes back by that."""
        if waiter.asked is not None:
            self._ask_ended(waiter.ask_id)
            waiter.asked.post(CancelAsk(waiter.ask_id))
            waiter.asks_nobody()

    def _out_of_patience(self, waiter: _Waiter) -> ServingError:
        if waiter.refused_by:
            return _soonest(waiter.refused_by.values())
        if waiter.asked is not None:
            return ServingError(
                Reason.OVERLOADED, "no decode room came free in time", retry_after_s=1.0
            )
        return self._absent()


def _give_back_unseen(waiter: _Waiter) -> None:
    """Room that came in the moment in which its request went away."""
    if waiter.done.done():
        room = waiter.done.result()
        if isinstance(room, TakenRoom):
            room.give_back()


def _fits(session: "Session", need: "RoomNeed") -> bool:
    """True if new work of that kind may go there, however full it is."""
    return (
        session.usable
        and session.welcome is not None
        and session.welcome.worker_id not in need.avoid
        and need.kv_layout in ("", session.welcome.kv_layout)
        and (need.shape is None or need.shape.outside(session.envelope) is None)
    )


def _can_use_ask(waiter: _Waiter, asked: "RoomNeed", session: "Session") -> bool:
    """True if an ask for `asked` at a session does as well for a waiter."""
    return (
        _fits(session, waiter.need)
        and session.session_id not in waiter.refused_by
        and _blocks(session, waiter.need) <= _blocks(session, asked)
        and waiter.need.waits_until.at_s <= asked.waits_until.at_s
    )


def _blocks(session: "Session", need: "RoomNeed") -> int:
    assert session.welcome is not None
    blocks = -(-need.tokens // session.welcome.block_size_tokens)
    return min(blocks, session.welcome.blocks_per_rank)


def _tier(session: "Session") -> int:
    """How soon a group gets one more request, by the floor of its mode."""
    envelope = session.envelope
    if envelope is None or not envelope.step_min_tokens:
        return 1
    used = envelope.ranks * envelope.seats_max - session.load.seats_free
    return floor_tier(used, envelope.ranks * envelope.step_min_tokens)


def _soonest(errors: Iterable[ServingError]) -> ServingError:
    return min(errors, key=lambda error: error.retry_after_s or float("inf"))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
