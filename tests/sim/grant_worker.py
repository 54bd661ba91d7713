"""The decode worker of a grant world, with a ledger beside its account."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from splitwave.core.grant import Ask, AskRefused, DeskSettings, Grant, GrantDesk, GrantTable, Seat
from splitwave.core.session import AskGrant, CancelAsk, Granted, ReturnGrants, TakeGrant
from tests.sim.grant_router import Cancellation, Router, Submission, ToWorker

if TYPE_CHECKING:
    from tests.sim.grant_world import World

TTL_TOLD = 0.75
"""Share of a grant's life that its router is told."""
SWEEP_S = 0.1
SETTLED_S = 120.0
"""By then every grant's time is up and every attempt has ended."""


class Worker:
    """The decode worker's account of its room, and a ledger kept beside it.

    The ledger knows only what was promised and what sits: S1  both together never
    exceed the seats, nor the blocks. S2  each ask has one answer. S3  in the end
    nothing is held. S4  once settled, the table's account is the ledger's.
    """

    def __init__(self, world: "World", table: type[GrantTable], desk: type[GrantDesk]) -> None:
        scale = world.scale
        self._world = world
        self._table = table(
            ranks=scale.ranks,
            seats_per_rank=scale.seats_per_rank,
            blocks_per_rank=scale.blocks_per_rank,
        )
        self._desk = desk(self._table, DeskSettings(ttl_s=1.0, grant_blocks=4, asks_max=64))
        self._sessions: dict[str, Router] = {}
        self._attempts: dict[str, dict[str, Seat]] = {}
        self._seen: set[str] = set()
        self._asked: set[tuple[str, str]] = set()
        self._promised: dict[str, Grant] = {}

    def open(self, session_id: str, router: Router) -> None:
        """A router has connected."""
        self._sessions[session_id] = router
        self._attempts[session_id] = {}
        self._desk.open(session_id)
        self.settle()

    def close(self, session_id: str) -> None:
        """A router has left, or has not come back in time."""
        if self._sessions.pop(session_id, None) is None:
            return
        self._desk.close(session_id)
        for attempt_id in list(self._attempts[session_id]):
            self._free(session_id, attempt_id)
        del self._attempts[session_id]
        self._promised = {k: g for k, g in self._promised.items() if g.session_id != session_id}
        self._asked = {key for key in self._asked if key[0] != session_id}
        self.settle()

    def receive(self, session_id: str, message: ToWorker) -> None:
        """Act on a router's message; one of a session that is gone changes nothing."""
        if session_id not in self._sessions:
            return
        match message:
            case Submission():
                self._submit(session_id, message)
            case Cancellation():
                self._free(session_id, message.attempt_id)
            case _:
                self._room(session_id, message)
        self.settle()

    def _room(
        self, session_id: str, message: AskGrant | CancelAsk | TakeGrant | ReturnGrants
    ) -> None:
        match message:
            case AskGrant():
                self._ask(session_id, message)
            case CancelAsk():
                self._cancel_ask(session_id, message.ask_id)
            case TakeGrant():
                self._take(session_id, message)
            case ReturnGrants():
                for grant_id in message.grant_ids:
                    if self._table.give_back(session_id, grant_id):
                        del self._promised[grant_id]

    def _ask(self, session_id: str, message: AskGrant) -> None:
        now_s = self._world.now_s
        ask = Ask(session_id, message.ask_id, message.blocks, now_s + message.wait_max_s)
        waits = self._desk.asks_waiting
        refused = self._desk.ask(ask, now_s)
        if refused is not None:
            self._tell(refused)
        elif self._desk.asks_waiting > waits:
            self._asked.add((session_id, message.ask_id))

    def _cancel_ask(self, session_id: str, ask_id: str) -> None:
        self._desk.cancel_ask(session_id, ask_id)
        self._asked.discard((session_id, ask_id))
        for grant in list(self._promised.values()):
            if (grant.session_id, grant.ask_id, grant.taken) == (session_id, ask_id, False):
                del self._promised[grant.grant_id]

    def _take(self, session_id: str, message: TakeGrant) -> None:
        until_s = self._world.now_s + message.keep_s
        if self._table.take(session_id, message.grant_id, message.blocks, until_s):
            self._promised[message.grant_id] = replace(
                self._promised[message.grant_id],
                blocks=message.blocks,
                expires_at_s=until_s,
                taken=True,
            )

    def _submit(self, session_id: str, message: Submission) -> None:
        if message.attempt_id in self._seen:
            return  # It gets the answer that it got before.
        self._seen.add(message.attempt_id)
        seat = self._table.spend(session_id, message.grant_id, message.attempt_id)
        if seat is None:
            self._world.result.unknown += 1
            return
        self._world.result.seated += 1
        del self._promised[message.grant_id]
        self._attempts[session_id][message.attempt_id] = seat
        self._world.at(message.hold_s, lambda: self._end(session_id, message.attempt_id))

    def _end(self, session_id: str, attempt_id: str) -> None:
        if session_id in self._sessions:
            self._free(session_id, attempt_id)
            self.settle()

    def _free(self, session_id: str, attempt_id: str) -> None:
        was = self._attempts[session_id].pop(attempt_id, None) is not None
        assert self._desk.freed(attempt_id, self._world.now_s) is was

    def sweep(self) -> None:
        """Settle by time alone, as the worker's timer does."""
        self.settle()
        if self._world.now_s < SETTLED_S:
            quiet = not self._sessions and not self._promised
            self._world.at(SETTLED_S if quiet else SWEEP_S, self.sweep)

    def settle(self) -> None:
        """Hand out what can be, and write it into the ledger."""
        now_s = self._world.now_s
        self._promised = {k: g for k, g in self._promised.items() if g.expires_at_s > now_s}
        for told in list(self._desk.settle(now_s)):
            if isinstance(told, Grant):
                self._promised[told.grant_id] = told
            if told.ask_id:
                self._asked.remove((told.session_id, told.ask_id))  # S2: KeyError at a second.
            if isinstance(told, AskRefused):
                self._tell(told)
            else:
                ttl_s = TTL_TOLD * (told.expires_at_s - now_s)
                granted = Granted(told.grant_id, told.rank, told.blocks, ttl_s, told.ask_id)
                router = self._sessions[told.session_id]
                self._world.carry(granted, _later(router.granted, told.session_id, granted))
        self._desk.check(settled=True)
        assert sum(self._table.seats_used) == len(self._promised) + len(self._sitting()), "S4"

    def _sitting(self) -> list[Seat]:
        return [seat for seats in self._attempts.values() for seat in seats.values()]

    def _tell(self, refused: AskRefused) -> None:
        self._world.result.refused += 1
        router = self._sessions[refused.session_id]
        self._world.carry(refused, lambda: router.refused(refused))

    def check(self) -> None:
        """S1, by the ledger alone."""
        scale, sitting = self._world.scale, self._sitting()
        seats = scale.ranks * scale.seats_per_rank
        used = len(self._promised) + len(sitting)
        assert used <= seats, f"S1: {used} of {seats} seats"
        blocks = sum(g.blocks for g in self._promised.values()) + sum(s.blocks for s in sitting)
        assert blocks <= scale.ranks * scale.blocks_per_rank, "S1"
        for rank, held in Counter(seat.rank for seat in sitting).items():
            assert held <= scale.seats_per_rank, f"S1: {held} sit on rank {rank}"
        self._world.result.used_max = max(self._world.result.used_max, used / seats)

    def check_empty(self) -> None:
        """S3."""
        assert not self._sessions
        assert not self._asked, "S2: an ask without an answer"
        assert self._table.seats_used == [0] * self._world.scale.ranks, "S3"
        assert self._table.blocks_used == [0] * self._world.scale.ranks, "S3"
        assert self._desk.asks_waiting == 0, "S3"


def _later(
    receive: Callable[[str, Granted], None], session_id: str, granted: Granted
) -> Callable[[], None]:
    return lambda: receive(session_id, granted)
