"""Room in a decode group: who may land where.

The worker owns every seat and KV block of its ranks. `GrantTable` is the account
of them; `GrantDesk` decides who gets the next grant. Routers never choose ranks
and cannot overshoot, however many they are.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from splitwave.core.errors import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One seat and `blocks` KV blocks on one rank, for one session, until `expires_at_s`."""

    grant_id: str
    session_id: str
    rank: int
    blocks: int
    expires_at_s: float
    ask_id: str = ""
    """The ask that it answers; empty if it was pushed."""
    taken: bool = False
    """True once a request is being prefilled for it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A spent grant: what one attempt occupies."""

    rank: int
    blocks: int


class GrantTable:
    """Seats and blocks of one decode group: free, granted or seated.

    Invariants, asserted by `check`:
      G1  on each rank, granted and seated seats are within 0..seats_per_rank
      G2  on each rank, granted and seated blocks are within 0..blocks_per_rank
      G3  both are the sums over live grants and seated attempts
    """

    def __init__(self, *, ranks: int, seats_per_rank: int, blocks_per_rank: int) -> None:
        assert ranks > 0
        assert seats_per_rank > 0
        assert blocks_per_rank > 0
        self.ranks = ranks
        self.seats_per_rank = seats_per_rank
        self.blocks_per_rank = blocks_per_rank
        self.seats_used = [0] * ranks
        self.blocks_used = [0] * ranks
        self._grants: dict[str, Grant] = {}
        self._seated: dict[str, Seat] = {}
        self._ids = itertools.count(1)

    @property
    def seats_free(self) -> int:
        """Seats neither granted nor held, over all ranks."""
        return self.ranks * self.seats_per_rank - sum(self.seats_used)

    @property
    def blocks_free(self) -> int:
        """Blocks neither granted nor held, over all ranks."""
        return self.ranks * self.blocks_per_rank - sum(self.blocks_used)

    def floats(self) -> dict[str, int]:
        """Live grants that were pushed unasked and not yet taken, by session."""
        counts: dict[str, int] = {}
        for grant in self._grants.values():
            if not grant.ask_id and not grant.taken:
                counts[grant.session_id] = counts.get(grant.session_id, 0) + 1
        return counts

    def sessions(self) -> set[str]:
        """Sessions that have live grants."""
        return {grant.session_id for grant in self._grants.values()}

    def grants_for_ask(self, session_id: str, ask_id: str) -> list[Grant]:
        """Live, untaken grants that answered one ask."""
        return [
            grant
            for grant in self._grants.values()
            if grant.session_id == session_id and grant.ask_id == ask_id and not grant.taken
        ]

    def grant(
        self, session_id: str, blocks: int, expires_at_s: float, ask_id: str = ""
    ) -> Grant | None:
        """Reserve room on the least loaded rank that has it, or return None."""
        assert blocks > 0
        rank = self._roomiest(blocks)
        if rank is None:
            return None
        grant = Grant(
            grant_id=f"g{next(self._ids)}",
            session_id=session_id,
            rank=rank,
            blocks=blocks,
            expires_at_s=expires_at_s,
            ask_id=ask_id,
        )
        self._grants[grant.grant_id] = grant
        self._move(rank, 1, blocks)
        return grant

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        """Keep a grant for a request in prefill, at the size it needs. False if it is not live."""
        grant = self._owned(session_id, grant_id)
        if grant is None or not 0 < blocks <= grant.blocks:
            return False
        self._move(grant.rank, 0, blocks - grant.blocks)
        self._grants[grant_id] = replace(
            grant, blocks=blocks, expires_at_s=expires_at_s, taken=True
        )
        return True

    def give_back(self, session_id: str, grant_id: str) -> bool:
        """Return an unspent grant. Unknown ids and repeats return False."""
        grant = self._owned(session_id, grant_id)
        if grant is None:
            return False
        self._drop(grant)
        return True

    def spend(self, session_id: str, grant_id: str, attempt_id: str) -> Seat | None:
        """Seat an attempt on its grant's rank. None if the grant is not live in this session."""
        assert attempt_id not in self._seated
        grant = self._owned(session_id, grant_id)
        if grant is None:
            return None
        del self._grants[grant_id]  # Its seat and blocks pass to the attempt.
        seat = self._seated[attempt_id] = Seat(grant.rank, grant.blocks)
        return seat

    def free(self, attempt_id: str) -> bool:
        """Return an attempt's seat and blocks. Repeats return False."""
        seat = self._seated.pop(attempt_id, None)
        if seat is None:
            return False
        self._move(seat.rank, -1, -seat.blocks)
        return True

    def end_session(self, session_id: str) -> int:
        """Return all of a session's unspent grants, and how many there were."""
        mine = [g for g in self._grants.values() if g.session_id == session_id]
        for grant in mine:
            self._drop(grant)
        return len(mine)

    def sweep(self, now_s: float) -> list[Grant]:
        """Return every unspent grant whose time is up."""
        due = [g for g in self._grants.values() if g.expires_at_s <= now_s]
        for grant in due:
            self._drop(grant)
        return due

    def _roomiest(self, blocks: int) -> int | None:
        best: tuple[int, int, int] | None = None
        for rank in range(self.ranks):
            if self.seats_used[rank] >= self.seats_per_rank:
                continue
            if self.blocks_used[rank] + blocks > self.blocks_per_rank:
                continue
            load = (self.seats_used[rank], self.blocks_used[rank], rank)
            if best is None or load < best:
                best = load
        return None if best is None else best[2]

    def _owned(self, session_id: str, grant_id: str) -> Grant | None:
        grant = self._grants.get(grant_id)
        return grant if grant is not None and grant.session_id == session_id else None

    def _drop(self, grant: Grant) -> None:
        del self._grants[grant.grant_id]
        self._move(grant.rank, -1, -grant.blocks)

    def _move(self, rank: int, seats: int, blocks: int) -> None:
        self.seats_used[rank] += seats
        self.blocks_used[rank] += blocks

    def check(self) -> None:
        """Assert the invariants. Cheap enough to call after every change in tests."""
        claims: list[Grant | Seat] = [*self._grants.values(), *self._seated.values()]
        for rank in range(self.ranks):
            assert 0 <= self.seats_used[rank] <= self.seats_per_rank, "G1"
            assert 0 <= self.blocks_used[rank] <= self.blocks_per_rank, "G2"
            mine = [c.blocks for c in claims if c.rank == rank]
            assert self.seats_used[rank] == len(mine), "G3"
            assert self.blocks_used[rank] == sum(mine), "G3"


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
      D1  asks wait only while the oldest does not fit
      D2  every ask and every grant belongs to an open session
    """

    def __init__(self, table: GrantTable, settings: DeskSettings) -> None:
        self.table = table
        self.settings = settings
        self._sessions: dict[str, None] = {}  # An ordered set.
        self._asks: deque[Ask] = deque()
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
        self._asks = deque(a for a in self._asks if a.session_id != session_id)
        self.table.end_session(session_id)

    def ask(self, ask: Ask, now_s: float) -> AskRefused | None:
        """Queue an ask, or refuse it at once with the reason."""
        assert ask.session_id in self._sessions
        if ask.blocks > self.table.blocks_per_rank:
            room = self.table.blocks_per_rank
            message = f"{ask.blocks} KV blocks asked for, but one rank has {room}"
            return AskRefused(ask.session_id, ask.ask_id, Reason.INVALID_REQUEST, message)
        if len(self._asks) >= self.settings.asks_max:
            return self._overloaded(ask, "the queue for decode room is full", now_s)
        self._asks.append(ask)
        return None

    def cancel_ask(self, session_id: str, ask_id: str) -> None:
        """Withdraw an ask; a grant already made for it goes back."""
        kept = (a for a in self._asks if (a.session_id, a.ask_id) != (session_id, ask_id))
        self._asks = deque(kept)
        for grant in self.table.grants_for_ask(session_id, ask_id):
            self.table.give_back(session_id, grant.grant_id)

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
        late = [a for a in self._asks if a.waits_until_s <= now_s]
        if late:
            self._asks = deque(a for a in self._asks if a.waits_until_s > now_s)
        while self._asks:
            ask = self._asks[0]  # In order: a large ask must not starve behind small ones.
            grant = self.table.grant(
                ask.session_id, ask.blocks, now_s + self.settings.ttl_s, ask.ask_id
            )
            if grant is None:
                break
            self._asks.popleft()
            yield grant
        for ask in late:
            yield self._overloaded(ask, "no decode room came free in time", now_s)

    def _top_up(self, now_s: float) -> Iterator[Grant]:
        if not self._sessions:
            return
        share = int(self.table.seats_free * self.settings.float_share) // len(self._sessions)
        target = min(self.settings.float_max, share)
        floats = self.table.floats()
        blocks = min(self.settings.grant_blocks, self.table.blocks_per_rank)
        for session_id in self._sessions:
            for _ in range(target - floats.get(session_id, 0)):
                grant = self.table.grant(session_id, blocks, now_s + self.settings.ttl_s)
                if grant is None:
                    return
                yield grant

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

    def check(self) -> None:
        """Assert the invariants."""
        self.table.check()
        for ask in self._asks:
            assert ask.session_id in self._sessions, "D2"
        for session_id in self.table.sessions():
            assert session_id in self._sessions, "D2"
