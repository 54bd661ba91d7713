"""The account of a decode group's seats and KV blocks."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from splitwave.core.due import Due


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

    @property
    def floats(self) -> bool:
        """True while it lies at its router for no request: pushed unasked and not yet taken."""
        return not self.ask_id and not self.taken


@dataclass(frozen=True, slots=True)
class Seat:
    """A spent grant: what one attempt occupies. Its rank may differ from the grant's."""

    rank: int
    blocks: int


_SEAT: Final = 1 << 40
"""A seat weighs more than all blocks of a rank."""


class GrantTable:
    """Seats and blocks of one decode group: free, granted or seated.

    Invariants, asserted by `check`:
      G1  on each rank, granted and seated seats are within 0..seats_per_rank
      G2  on each rank, granted and seated blocks are within 0..blocks_per_rank
      G3  both are the sums over live grants and seated attempts
      G4  the indexes by session say what the grants say
      G5  every live grant has a time at which it falls due
      G6  the loads to choose by say what the counts say, and what was corrected
    """

    def __init__(self, *, ranks: int, seats_per_rank: int, blocks_per_rank: int) -> None:
        assert ranks > 0
        assert seats_per_rank > 0
        assert 0 < blocks_per_rank < _SEAT
        self.ranks = ranks
        self.seats_per_rank = seats_per_rank
        self.blocks_per_rank = blocks_per_rank
        self.seats_used = [0] * ranks
        self.blocks_used = [0] * ranks
        self.seats_held = [0] * ranks
        """Those of `seats_used` in which an attempt sits."""
        self.blocks_held = [0] * ranks
        """Those of `blocks_used` that attempts hold."""
        # (seats, blocks) of each rank as one number, so that `min` finds the least at once.
        self._load_used = [0] * ranks
        self._load_held = [0] * ranks
        self._seats_free = ranks * seats_per_rank
        self._blocks_free = ranks * blocks_per_rank
        self.unaccounted = [(0, 0)] * ranks
        """Seats and blocks of each rank that it says are taken, beyond this account."""
        self._grants: dict[str, Grant] = {}
        self._by_session: dict[str, dict[str, None]] = {}  # Ordered sets of grant ids.
        self._floats: dict[str, int] = {}
        self._due: Due[str] = Due()
        self._seated: dict[str, Seat] = {}
        self._ids = itertools.count(1)

    @property
    def seats_free(self) -> int:
        """Seats neither granted nor held, over all ranks."""
        return max(0, self._seats_free - sum([seats for seats, _ in self.unaccounted]))

    @property
    def blocks_free(self) -> int:
        """Blocks neither granted nor held, over all ranks."""
        return max(0, self._blocks_free - sum([blocks for _, blocks in self.unaccounted]))

    def floats(self) -> dict[str, int]:
        """Live grants that were pushed unasked and not yet taken, by session."""
        return dict(self._floats)

    def floats_of(self, session_id: str) -> int:
        """The same of one session."""
        return self._floats.get(session_id, 0)

    def floats_below(self, sessions: Iterable[str], count: int) -> list[str]:
        """Those of some sessions that have fewer than `count` floats, in their order."""
        floats = self._floats
        return [session_id for session_id in sessions if floats.get(session_id, 0) < count]

    def sessions(self) -> set[str]:
        """Sessions that have live grants."""
        return set(self._by_session)

    def grants_of(self, session_id: str) -> list[Grant]:
        """Live grants of one session, oldest first."""
        return [self._grants[grant_id] for grant_id in self._by_session.get(session_id, ())]

    def grants_for_ask(self, session_id: str, ask_id: str) -> list[Grant]:
        """Live, untaken grants that answered one ask."""
        return [g for g in self.grants_of(session_id) if g.ask_id == ask_id and not g.taken]

    def fits(self, blocks: int) -> bool:
        """True if a grant of that size could be made now."""
        return self._least(self._load_used, blocks) is not None

    def grant(
        self, session_id: str, blocks: int, expires_at_s: float, ask_id: str = ""
    ) -> Grant | None:
        """Reserve room on the least loaded rank that has it, or return None."""
        assert blocks > 0
        rank = self._least(self._load_used, blocks)
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
        self._put(grant)
        self._move(rank, 1, blocks)
        return grant

    def take(self, session_id: str, grant_id: str, blocks: int, expires_at_s: float) -> bool:
        """Keep a grant for a request in prefill, at the size it needs. False if it is not live."""
        grant = self._owned(session_id, grant_id)
        if grant is None or not 0 < blocks <= grant.blocks:
            return False
        self._pop(grant)
        self._put(replace(grant, blocks=blocks, expires_at_s=expires_at_s, taken=True))
        self._move(grant.rank, 0, blocks - grant.blocks)
        return True

    def give_back(self, session_id: str, grant_id: str) -> bool:
        """Return an unspent grant. Unknown ids and repeats return False."""
        grant = self._owned(session_id, grant_id)
        if grant is None:
            return False
        self._drop(grant)
        return True

    def spend(self, session_id: str, grant_id: str, attempt_id: str) -> Seat | None:
        """Seat an attempt. None if the grant is not live in this session.

        The seat is on the grant's rank, or on one with room where fewer attempts sit:
        unspent grants lie unevenly over the ranks, attempts do not.
        """
        assert attempt_id not in self._seated
        grant = self._owned(session_id, grant_id)
        if grant is None:
            return None
        self._drop(grant)
        rank = self._least(self._load_held, grant.blocks)
        if rank is None or self.seats_held[rank] == self.seats_held[grant.rank]:
            rank = grant.rank  # It has room, unless that was corrected: what is granted, is.
        seat = self._seated[attempt_id] = Seat(rank, grant.blocks)
        self._move(rank, 1, grant.blocks)
        self._hold(rank, 1, grant.blocks)
        return seat

    def correct(self, rank: int, seats: int, blocks: int) -> None:
        """A rank holds so much beyond this account: nothing is granted in that room."""
        assert seats >= 0
        assert blocks >= 0
        was_seats, was_blocks = self.unaccounted[rank]
        more = (seats - was_seats) * _SEAT + blocks - was_blocks
        self.unaccounted[rank] = (seats, blocks)
        self._load_used[rank] += more
        self._load_held[rank] += more

    def seat(self, attempt_id: str) -> Seat | None:
        """Where an attempt sits, if it does."""
        return self._seated.get(attempt_id)

    def is_seated(self, attempt_id: str) -> bool:
        """True while an attempt holds a seat."""
        return attempt_id in self._seated

    def free(self, attempt_id: str) -> bool:
        """Return an attempt's seat and blocks. Repeats return False."""
        seat = self._seated.pop(attempt_id, None)
        if seat is None:
            return False
        self._move(seat.rank, -1, -seat.blocks)
        self._hold(seat.rank, -1, -seat.blocks)
        return True

    def end_session(self, session_id: str) -> int:
        """Return all of a session's unspent grants, and how many there were."""
        mine = self.grants_of(session_id)
        for grant in mine:
            self._drop(grant)
        return len(mine)

    def sweep(self, now_s: float) -> list[Grant]:
        """Return every unspent grant whose time is up."""
        due = [self._grants[grant_id] for grant_id in self._due.pop(now_s)]
        for grant in due:
            self._drop(grant)
        return due

    def _least(self, load: list[int], blocks: int) -> int | None:
        """The rank with the least load that has room; the first of several."""
        rank = load.index(min(load))
        if self._has_room(rank, blocks):
            return rank
        fit = (rank for rank in range(self.ranks) if self._has_room(rank, blocks))
        return min(fit, key=load.__getitem__, default=None)

    def _has_room(self, rank: int, blocks: int) -> bool:
        more_seats, more_blocks = self.unaccounted[rank]
        return (
            self.seats_used[rank] + more_seats < self.seats_per_rank
            and self.blocks_used[rank] + more_blocks + blocks <= self.blocks_per_rank
        )

    def _owned(self, session_id: str, grant_id: str) -> Grant | None:
        grant = self._grants.get(grant_id)
        return grant if grant is not None and grant.session_id == session_id else None

    def _put(self, grant: Grant) -> None:
        self._grants[grant.grant_id] = grant
        self._by_session.setdefault(grant.session_id, {})[grant.grant_id] = None
        self._due.set(grant.grant_id, grant.expires_at_s)
        if grant.floats:
            self._floats[grant.session_id] = self._floats.get(grant.session_id, 0) + 1

    def _pop(self, grant: Grant) -> None:
        del self._grants[grant.grant_id]
        mine = self._by_session[grant.session_id]
        del mine[grant.grant_id]
        if not mine:
            del self._by_session[grant.session_id]
        self._due.drop(grant.grant_id)
        if grant.floats:
            self._floats[grant.session_id] -= 1
            if not self._floats[grant.session_id]:
                del self._floats[grant.session_id]

    def _drop(self, grant: Grant) -> None:
        self._pop(grant)
        self._move(grant.rank, -1, -grant.blocks)

    def _move(self, rank: int, seats: int, blocks: int) -> None:
        self.seats_used[rank] += seats
        self.blocks_used[rank] += blocks
        self._seats_free -= seats
        self._blocks_free -= blocks
        self._load_used[rank] += seats * _SEAT + blocks
        self._load_held[rank] += blocks

    def _hold(self, rank: int, seats: int, blocks: int) -> None:
        self.seats_held[rank] += seats
        self.blocks_held[rank] += blocks
        self._load_held[rank] += seats * _SEAT

    def check(self) -> None:
        """Assert the invariants. Cheap enough to call after every change in tests."""
        grants = self._grants.values()
        seats, blocks = self._claims(grants, self._seated.values())
        held, held_blocks = self._claims((), self._seated.values())
        for rank in range(self.ranks):
            assert 0 <= self.seats_used[rank] <= self.seats_per_rank, "G1"
            assert 0 <= self.blocks_used[rank] <= self.blocks_per_rank, "G2"
        assert self.seats_used == seats, "G3"
        assert self.blocks_used == blocks, "G3"
        assert self.seats_held == held, "G3"
        assert self.blocks_held == held_blocks, "G3"
        assert self._seats_free == self.ranks * self.seats_per_rank - sum(seats), "G3"
        assert self._blocks_free == self.ranks * self.blocks_per_rank - sum(blocks), "G3"
        assert self._floats == Counter(g.session_id for g in grants if g.floats), "G4"
        by_session = {s: set(ids) for s, ids in self._by_session.items()}
        assert by_session == _by_session(grants), "G4"
        assert len(self._due) == len(grants), "G5"
        for rank, (more_seats, more_blocks) in enumerate(self.unaccounted):
            used = (seats[rank] + more_seats) * _SEAT + blocks[rank] + more_blocks
            sits = (held[rank] + more_seats) * _SEAT + blocks[rank] + more_blocks
            assert (self._load_used[rank], self._load_held[rank]) == (used, sits), "G6"

    def _claims(
        self, grants: Iterable[Grant], seated: Iterable[Seat]
    ) -> tuple[list[int], list[int]]:
        seats = [0] * self.ranks
        blocks = [0] * self.ranks
        for claim in itertools.chain[Grant | Seat](grants, seated):
            seats[claim.rank] += 1
            blocks[claim.rank] += claim.blocks
        return seats, blocks


def _by_session(grants: Iterable[Grant]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for grant in grants:
        found.setdefault(grant.session_id, set()).add(grant.grant_id)
    return found
