"""What ranks say that they hold, against the account of their room. Pure.

The worker's own placements count at once, so the account is ahead of any report; but a rank
may hold what the account does not know: a generation that has outgrown what was reserved for
it, or a request that was given up and that the engine still has. No room is given for that.
"""

from dataclasses import dataclass

from splitwave.core.grant_table import GrantTable, Seat

REPORT_S = 0.25
"""How long a report may be under way, and with it the word of a placement or of an end."""
ABORT_S = 1.0
"""How long after an abort its rank may still count the request: to the end of a step."""
KEPT_S = 30.0
"""How long changes are kept for a rank that says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One rank's word on what it holds."""

    rank: int
    requests: int
    """Those that wait and those that run."""
    blocks: int
    """KV blocks in use."""
    said_s: float
    """When it said so, on this host's monotonic clock."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A seat that was taken (1) or freed (-1), and until when a report may not know of it."""

    unsure_until_s: float
    seats: int
    blocks: int


class GrantReports:
    """Corrects a `GrantTable` by what its ranks report.

    Tell it each seat that is taken or freed. What a rank holds beyond the account lies between
    two bounds: all that was freed lately is still in the report, and nothing that was placed
    lately is missing in it; or the reverse. A correction changes no more than these demand. So
    no report takes room away that the account had right, and none gives it back by chance.
    """

    def __init__(self, table: GrantTable) -> None:
        self._table = table
        self._changes: list[list[_Change]] = [[] for _ in range(table.ranks)]
        self._said_s = [float("-inf")] * table.ranks
        self.missing = [0] * table.ranks
        """Attempts that sit on a rank and that it does not count: their own limits end them."""
        self.corrections = 0
        """Times that a rank was found to hold more than before, beyond the account."""

    def seated(self, seat: Seat, now_s: float) -> None:
        """An attempt has been seated."""
        self._note(seat.rank, _Change(now_s + REPORT_S, 1, seat.blocks), now_s)

    def freed(self, seat: Seat, now_s: float, *, aborted: bool) -> None:
        """A seat has come back: the engine has ended the attempt, or is told to."""
        unsure_s = ABORT_S if aborted else REPORT_S
        self._note(seat.rank, _Change(now_s + unsure_s, -1, -seat.blocks), now_s)

    def on_load(self, load: RankLoad) -> bool:
        """A rank has spoken; True if there is now more room, or less."""
        table, rank = self._table, load.rank
        if load.said_s < self._said_s[rank]:
            return False
        self._said_s[rank] = load.said_s
        unsure = self._changes[rank] = [
            change for change in self._changes[rank] if load.said_s < change.unsure_until_s
        ]
        placed = [change for change in unsure if change.seats > 0]
        freed = [change for change in unsure if change.seats < 0]
        seats = load.requests - table.seats_held[rank]
        blocks = load.blocks - table.blocks_held[rank]
        if blocks <= load.requests:  # A step ahead of what was reserved: a block each.
            blocks = min(0, blocks)
        self.missing[rank] = max(0, -seats - len(placed))
        was = table.unaccounted[rank]
        now = (
            _within(was[0], seats - len(freed), seats + len(placed)),
            _within(was[1], blocks + _blocks(freed), blocks + _blocks(placed)),
        )
        self.corrections += now[0] > was[0] or now[1] > was[1]
        if now != was:
            table.correct(rank, *now)
        return now != was

    def _note(self, rank: int, change: _Change, now_s: float) -> None:
        changes = self._changes[rank]
        changes.append(change)
        if changes[0].unsure_until_s < now_s - KEPT_S:  # It says nothing.
            del changes[: len(changes) // 2]


def _blocks(changes: list[_Change]) -> int:
    return sum([change.blocks for change in changes])


def _within(value: int, least: int, most: int) -> int:
    return max(0, min(max(value, least), most))
