"""Room in a decode group: who may land where.

The worker owns every seat and KV block of its ranks. `GrantTable` is the account
of them; `GrantDesk` decides who gets the next grant. Routers never choose ranks
and cannot overshoot, however many they are.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from splitwave.core.due import Due
from splitwave.core.errors import Reason
from splitwave.core.grant_table import Grant as Grant
from splitwave.core.grant_table import GrantTable as GrantTable
from splitwave.core.grant_table import Seat as Seat


@dataclass(frozen=True, slots=True)
class Ask:
    """A router's wish for room of a given size, in the order of arrival."""

    session_id: str
    ask_id: str
    blocks: int
    waits_until_s: float


@dataclass(frozen=True, slots=True)
class AskRefused:
    """An ask that gets no grant."""

    session_id: str
    ask_id: str
    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """How grants are handed out."""

    ttl_s: float = 2.0
    """How long an unspent grant lives, unless it is taken."""
    float_max: int = 4
    """Grants that are pushed to a session before it asks, at most."""
    float_share: float = 0.25
    """Share of the free seats that may lie in all sessions' floats together."""
    grant_blocks: int = 16
    """Blocks of a pushed grant."""
    asks_max: int = 1024
    """Asks that may wait."""


class GrantDesk:
    """Decides who gets the next grant: asks in order first, then small floats for all sessions.

    `settle` is called after any change and returns what to tell whom.

    Invariants, asserted by `check`, beside those of the table:
      D1  after `settle`, asks wait only while the oldest does not fit
      D2  every ask and every grant belongs to an open session
      D3  every ask has a time at which its patience ends
    """

    def __init__(self, table: GrantTable, settings: DeskSettings) -> None:
        self.table = table
        self.settings = settings
        self._sessions: dict[str, None] = {}  # An ordered set.
        self._asks: OrderedDict[tuple[str, str], Ask] = OrderedDict()
        self._patience: Due[tuple[str, str]] = Due()
        self._ended_at_s: deque[float] = deque(maxlen=64)  # For the truthful retry time.

    @property
    def asks_waiting(self) -> int:
        """Asks in the queue."""
        return len(self._asks)

    def open(self, session_id: str) -> None:
        """A session begins."""
        self._sessions[session_id] = None

    def close(self, session_id: str) -> None:
        """A session has gone for good: its asks and unspent grants go with it."""
        self._sessions.pop(session_id, None)
        for key in [key for key in self._asks if key[0] == session_id]:
            self._forget(key)
        self.table.end_session(session_id)

    def ask(self, ask: Ask, now_s: float) -> AskRefused | None:
        """Queue an ask, or refuse it at once with the reason. A repeat keeps its place."""
        assert ask.session_id in self._sessions
        key = (ask.session_id, ask.ask_id)
        if key in self._asks:
            return None
        room = self.table.blocks_per_rank
        if not 0 < ask.blocks <= room:
            message = f"blocks: {ask.blocks} KV blocks asked for, but one rank has {room}"
            return AskRefused(ask.session_id, ask.ask_id, Reason.INVALID_REQUEST, message)
        if len(self._asks) >= self.settings.asks_max:
            return self._overloaded(ask, "the queue for decode room is full", now_s)
        self._asks[key] = ask
        self._patience.set(key, ask.waits_until_s)
        return None

    def cancel_ask(self, session_id: str, ask_id: str) -> None:
        """Withdraw an ask; a grant already made for it goes back."""
        self._forget((session_id, ask_id))
        for grant in self.table.grants_for_ask(session_id, ask_id):
            self.table.give_back(session_id, grant.grant_id)

    def refuse_all(self, reason: Reason, message: str) -> list[AskRefused]:
        """Empty the queue of asks: no more room will be given."""
        asks = list(self._asks.values())
        for ask in asks:
            self._forget((ask.session_id, ask.ask_id))
        return [AskRefused(ask.session_id, ask.ask_id, reason, message) for ask in asks]

    def freed(self, attempt_id: str, now_s: float) -> bool:
        """An attempt has ended."""
        if not self.table.free(attempt_id):
            return False
        self._ended_at_s.append(now_s)
        return True

    def settle(self, now_s: float) -> Iterator[Grant | AskRefused]:
        """Hand out what can be handed out, and refuse asks whose patience has ended."""
        self.table.sweep(now_s)
        yield from self._answer_asks(now_s)
        if not self._asks:
            yield from self._top_up(now_s)

    def _answer_asks(self, now_s: float) -> Iterator[Grant | AskRefused]:
        late = [self._asks.pop(key) for key in self._patience.pop(now_s)]
        while self._asks:
            key, ask = next(iter(self._asks.items()))
            # In order: a large ask must not starve behind small ones.
            grant = self.table.grant(
                ask.session_id, ask.blocks, now_s + self.settings.ttl_s, ask.ask_id
            )
            if grant is None:
                break
            self._forget(key)
            yield grant
        for ask in late:
            yield self._overloaded(ask, "no decode room came free in time", now_s)

    def _top_up(self, now_s: float) -> Iterator[Grant]:
        blocks = min(self.settings.grant_blocks, self.table.blocks_per_rank)
        target = self._float_target(blocks)
        short = self.table.floats_below(self._sessions, target)
        while short:  # Those with the fewest first, so that a shortage is everyone's.
            fewest = min(self.table.floats_of(session_id) for session_id in short)
            for session_id in self.table.floats_below(short, fewest + 1):
                grant = self.table.grant(session_id, blocks, now_s + self.settings.ttl_s)
                if grant is None:
                    return
                yield grant
            short = self.table.floats_below(short, target)

    def _float_target(self, blocks: int) -> int:
        """How many grants may lie at each session: a share of what is free, of both kinds."""
        if not self._sessions:
            return 0
        free = min(self.table.seats_free, self.table.blocks_free // blocks)
        share = int(free * self.settings.float_share) // len(self._sessions)
        return min(self.settings.float_max, share)

    def _forget(self, key: tuple[str, str]) -> None:
        self._asks.pop(key, None)
        self._patience.drop(key)

    def _overloaded(self, ask: Ask, message: str, now_s: float) -> AskRefused:
        retry_after_s = self.retry_after_s(now_s)
        return AskRefused(ask.session_id, ask.ask_id, Reason.OVERLOADED, message, retry_after_s)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until an ask made then would likely be answered: queue over rate of ends."""
        if len(self._ended_at_s) < 2:
            return 1.0
        span_s = max(now_s - self._ended_at_s[0], 1e-3)
        rate = len(self._ended_at_s) / span_s
        return min(60.0, max(0.05, (len(self._asks) + 1) / rate))

    def check(self, *, settled: bool = False) -> None:
        """Assert the invariants; `settled`: nothing has changed since the last `settle`."""
        self.table.check()
        for session_id, _ in self._asks:
            assert session_id in self._sessions, "D2"
        for session_id in self.table.sessions():
            assert session_id in self._sessions, "D2"
        assert len(self._patience) == len(self._asks), "D3"
        if settled and self._asks:
            oldest = next(iter(self._asks.values()))
            assert not self.table.fits(oldest.blocks), "D1"
