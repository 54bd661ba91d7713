"""Many routers at one decode group's room, over a network that delays, loses and repeats.

The production GrantDesk and GrantTable answer; routers spend their floats by the
production GrantFloat, take, return, submit, cancel and crash. Messages have no link
below them here: each may be lost or come twice, which is worse than a session allows.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.router.grants import GrantFloat
from splitwave.core.grant import Ask, AskRefused, DeskSettings, Grant, GrantDesk, GrantTable, Seat
from splitwave.core.session import AskGrant, CancelAsk, Granted, ReturnGrants, TakeGrant

TTL_TOLD = 0.75
"""Share of a grant's life that its router is told."""
REATTACH_S = 0.5
SWEEP_S = 0.1
SETTLED_S = 120.0
"""By then every grant's time is up and every attempt has ended."""


@dataclass(frozen=True)
class Submission:
    """What spends a grant."""

    attempt_id: str
    grant_id: str
    hold_s: float


@dataclass(frozen=True)
class Cancellation:
    """What ends an attempt."""

    attempt_id: str


ToWorker = AskGrant | CancelAsk | TakeGrant | ReturnGrants | Submission | Cancellation
ToRouter = Granted | AskRefused


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a world is, and how hard it is used."""

    ranks: int
    seats_per_rank: int
    blocks_per_rank: int
    routers: int
    requests: int
    load: float
    """Requests that want a seat at a time, over the seats."""
    faults: float
    """Chance that a message is lost, and that it comes twice."""
    crashes: int


def scale_of(rng: random.Random) -> Scale:
    """Mostly small worlds, where every corner is near; a few of full size."""
    full = rng.random() < 0.02
    return Scale(
        ranks=32 if full else rng.randint(1, 8),
        seats_per_rank=rng.randint(1, 8),
        blocks_per_rank=rng.choice([8, 20, 64]),
        routers=64 if full else rng.randint(1, 12),
        requests=600 if full else 120,
        load=rng.uniform(0.3, 2.5),
        faults=rng.choice([0.0, 0.02, 0.1]),
        crashes=rng.randint(0, 3),
    )


@dataclass
class Result:
    """What one world came to."""

    seated: int = 0
    refused: int = 0
    unknown: int = 0
    """Submissions whose grant was not live any more."""
    used_max: float = 0.0
    """Largest share of the seats that was granted or held at one time."""
    crashes: int = 0
    """Routers that forgot everything."""
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each kind of message met each fault."""


class World:
    """One seed's run: the clock, the network and the invariants over all."""

    def __init__(
        self,
        seed: int,
        *,
        table: type[GrantTable] = GrantTable,
        desk: type[GrantDesk] = GrantDesk,
        scale: Scale | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.scale = scale or scale_of(self.rng)
        self.now_s = 0.0
        self.result = Result()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counted = 0
        self.worker = Worker(self, table, desk)
        self.routers = [Router(self, i) for i in range(self.scale.routers)]

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen later."""
        self._counted += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._counted, event))

    def carry(self, message: ToWorker | ToRouter, deliver: Callable[[], None]) -> None:
        """Deliver a message late, never or twice."""
        kind, chance = type(message).__name__, self.rng.random()
        copies, fault = 1, "none"
        if chance < self.scale.faults:
            copies, fault = 0, "lost"
        elif chance < 2 * self.scale.faults:
            copies, fault = 2, "repeated"
        for _ in range(copies):
            late = self.rng.random() < self.scale.faults
            if late:
                self.result.met[kind, "late"] += 1
            delay_s = self.rng.uniform(0.1, 3.0) if late else self.rng.uniform(0.0002, 0.01)
            self.at(delay_s, deliver)
        self.result.met[kind, fault] += 1

    def run(self) -> Result:
        """Arrivals and crashes, then everyone leaves; at the end nothing is held."""
        scale, rng = self.scale, self.rng
        mean_hold_s = 0.3
        rate = scale.load * scale.ranks * scale.seats_per_rank / mean_hold_s
        arrivals_s = 0.0
        for _ in range(scale.requests):
            arrivals_s += rng.expovariate(rate)
            self.at(arrivals_s, rng.choice(self.routers).begin)
        for _ in range(scale.crashes):
            self.at(rng.uniform(0, arrivals_s), rng.choice(self.routers).crash)
        for router in self.routers:
            leave = router.crash_for_good if rng.random() < 0.5 else router.leave
            self.at(arrivals_s + rng.uniform(0, 2), leave)
        self.at(SWEEP_S, self.worker.sweep)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self.worker.check()
        self.worker.check_empty()
        return self.result


class Worker:
    """The decode worker's account of its room, and a ledger kept beside it.

    The ledger knows only what was promised and what sits: S1  both together never
    exceed the seats, nor the blocks. S2  each ask has one answer. S3  in the end
    nothing is held. S4  once settled, the table's account is the ledger's.
    """

    def __init__(self, world: World, table: type[GrantTable], desk: type[GrantDesk]) -> None:
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

    def open(self, session_id: str, router: "Router") -> None:
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


class Router:
    """One router: a float, asks under way, attempts under way; and all of it lost in a crash."""

    def __init__(self, world: World, index: int) -> None:
        self._world = world
        self._index = index
        self._lives = 0
        self._gone = False
        self._asks: dict[str, int] = {}
        self._count = 0
        self.alive = False
        self._start()

    def _start(self) -> None:
        if self._gone:
            return
        self._lives += 1
        self.session_id = f"r{self._index}.{self._lives}"
        self._float = GrantFloat()
        self._asks.clear()
        self.alive = True
        self._world.worker.open(self.session_id, self)

    def crash(self) -> None:
        """Forget everything; the worker notices, and a new life begins."""
        if self.alive:
            self._vanish()
            self._world.at(self._world.rng.uniform(0.01, 1), self._start)

    def crash_for_good(self) -> None:
        """Forget everything and stay away."""
        self._gone = True
        self._vanish()

    def leave(self) -> None:
        """End the session in order."""
        self._gone = True
        if self.alive:
            self.alive = False
            self._world.worker.close(self.session_id)

    def _vanish(self) -> None:
        """The worker notices when the session is not taken up again."""
        session_id, was_alive = self.session_id, self.alive
        self.alive = False
        if was_alive:
            self._world.result.crashes += 1
            self._world.at(REATTACH_S, lambda: self._world.worker.close(session_id))

    def _post(self, message: ToWorker) -> None:
        session_id, worker = self.session_id, self._world.worker
        self._world.carry(message, lambda: worker.receive(session_id, message))

    def begin(self) -> None:
        """A request arrives: take from the float, or ask."""
        if not self.alive:
            return
        rng = self._world.rng
        self._count += 1
        name = f"{self.session_id}/{self._count}"
        blocks = rng.choice([1, 2, 3, 4, 4, 8, self._world.scale.blocks_per_rank + 1])
        granted = self._float.take(blocks, self._world.now_s)
        if granted is not None:
            self._prefill(granted, blocks)
            return
        self._asks[name] = blocks
        self._post(AskGrant(name, blocks, rng.choice([0.05, 0.5, 2.0])))
        self._world.at(rng.choice([0.1, 1.0, 5.0]), lambda: self._withdraw(name))

    def _withdraw(self, ask_id: str) -> None:
        if self.alive and self._asks.pop(ask_id, None) is not None:
            self._post(CancelAsk(ask_id))

    def granted(self, session_id: str, granted: Granted) -> None:
        """A grant came, perhaps for an earlier life or for an ask that was withdrawn."""
        if not self.alive or session_id != self.session_id:
            return
        if not granted.ask_id:
            self._float.add(granted, self._world.now_s)
        elif granted.ask_id in self._asks:
            self._prefill(granted, self._asks.pop(granted.ask_id))

    def refused(self, refused: AskRefused) -> None:
        """An ask gets nothing."""
        self._asks.pop(refused.ask_id, None)

    def _prefill(self, granted: Granted, blocks: int) -> None:
        rng, session_id = self._world.rng, self.session_id
        self._post(TakeGrant(granted.grant_id, blocks, 4.0))

        def submit() -> None:
            if not self.alive or session_id != self.session_id:
                return
            if rng.random() < 0.1:  # The client left.
                self._post(ReturnGrants((granted.grant_id,)))
                return
            attempt_id = f"{granted.grant_id}/{session_id}"
            self._post(Submission(attempt_id, granted.grant_id, rng.expovariate(1 / 0.3)))
            if rng.random() < 0.1:
                self._world.at(rng.uniform(0, 0.5), lambda: self._cancel(session_id, attempt_id))

        self._world.at(rng.uniform(0.005, 0.3), submit)

    def _cancel(self, session_id: str, attempt_id: str) -> None:
        if self.alive and session_id == self.session_id:
            self._post(Cancellation(attempt_id))
