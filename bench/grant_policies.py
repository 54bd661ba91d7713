"""Three ways to choose a rank for a request, each from what its router knows.

The first two place by counts that are a refresh old, as front-ends of a
data-parallel group do; the third spends grants of the production desk.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from splitwave.core.grant import Ask, AskRefused, DeskSettings, Grant, GrantDesk, GrantTable


class Policy(Protocol):
    """Places requests of many routers on the ranks of one group."""

    load: list[int]
    """Requests on each rank."""

    def place(self, router: int, now_s: float) -> int | None:
        """Put one request of a router on a rank; None if there is no room. Returns its name."""

    def end(self, request: int, now_s: float) -> None:
        """The request has ended."""

    def refresh(self) -> None:
        """Every router learns the ranks' present counts."""


Choose = Callable[["Front", random.Random], int]


class Front:
    """What one router knows: counts of the last refresh, and its own requests."""

    def __init__(self, ranks: int, routers: int, index: int) -> None:
        self.routers = routers
        self.counts = [0] * ranks
        self.own = [0] * ranks
        self.start = ranks * index // routers

    def score(self, rank: int) -> int:
        """Estimated load: the count, or what all routers have if each has what this one has."""
        return max(self.routers * self.own[rank], self.counts[rank])


def global_minimum(front: Front, _: random.Random) -> int:
    """vLLM 0.32's data-parallel client: the lowest score, ties broken by a rotating start.

    Its penalty on waiting requests, which needs KV caches above half full, stays off.
    """
    ranks = len(front.counts)
    order = [(front.start + i) % ranks for i in range(ranks)]
    front.start = (front.start + 1) % ranks
    return min(order, key=front.score)


def two_choices(front: Front, rng: random.Random) -> int:
    """The lower score of two ranks chosen by chance."""
    a, b = rng.sample(range(len(front.counts)), 2)
    return a if front.score(a) <= front.score(b) else b


class ByCounts:
    """Routers choose ranks by stale counts; nothing stops them at a rank's last seat."""

    def __init__(self, load: list[int], routers: int, choose: Choose, rng: random.Random) -> None:
        self.load = list(load)
        self._choose = choose
        self._rng = rng
        self._fronts = [Front(len(load), routers, i) for i in range(routers)]
        self._placed: dict[int, tuple[Front | None, int]] = {}
        for rank, count in enumerate(load):
            for _ in range(count):
                self._placed[len(self._placed)] = (None, rank)
        self._named = len(self._placed)
        self.refresh()

    def place(self, router: int, now_s: float) -> int:
        """Put one request where the router thinks best."""
        front = self._fronts[router]
        rank = self._choose(front, self._rng)
        front.own[rank] += 1
        front.counts[rank] += front.routers
        self.load[rank] += 1
        self._named += 1
        self._placed[self._named] = (front, rank)
        return self._named

    def end(self, request: int, now_s: float) -> None:
        """The request has ended."""
        front, rank = self._placed.pop(request)
        self.load[rank] -= 1
        if front is not None:
            front.own[rank] -= 1

    def refresh(self) -> None:
        """Every router learns the ranks' present counts."""
        for front in self._fronts:
            front.counts = list(self.load)


class ByGrants:
    """Routers spend grants, and ask where their float is empty."""

    def __init__(self, load: list[int], routers: int, seats_per_rank: int) -> None:
        blocks = self._blocks = 4
        self._table = GrantTable(
            ranks=len(load),
            seats_per_rank=seats_per_rank,
            blocks_per_rank=seats_per_rank * blocks,
        )
        settings = DeskSettings(ttl_s=2.0, grant_blocks=blocks)
        self._desk = GrantDesk(self._table, settings)
        self._floats: list[deque[Grant]] = [deque() for _ in range(routers)]
        self.load = self._table.seats_held
        self._seated: set[int] = set()
        self._named = 0
        self.asked = 0
        """Requests that found their router's float empty, which costs a round trip."""
        self._fill(load)
        for router in range(routers):
            self._desk.open(str(router))
        self._settle(0.0)

    def _fill(self, load: list[int]) -> None:
        """Seat what is there at the start: all ranks alike, then some of it goes."""
        self._desk.open("start")
        at: dict[int, list[int]] = {rank: [] for rank in range(len(load))}
        for _ in range(max(load) * len(load)):
            grant = self._table.grant("start", self._blocks, 1e9)
            assert grant is not None
            at[self._seat("start", grant)].append(self._named)
        for rank, count in enumerate(load):
            for request in at[rank][count:]:
                self.end(request, 0.0)
        self._desk.close("start")

    def _seat(self, session_id: str, grant: Grant) -> int:
        self._named += 1
        seat = self._table.spend(session_id, grant.grant_id, str(self._named))
        assert seat is not None
        self._seated.add(self._named)
        return seat.rank

    def place(self, router: int, now_s: float) -> int | None:
        """Spend the oldest grant of the float, or ask for one."""
        self._settle(now_s)
        mine = self._floats[router]
        while mine and mine[0].expires_at_s <= now_s:
            mine.popleft()
        if not mine:
            self.asked += 1
            session_id, ask_id = str(router), f"q{self._named}"
            self._desk.ask(Ask(session_id, ask_id, self._blocks, now_s + 1.0), now_s)
            self._settle(now_s)
            if not mine:
                self._desk.cancel_ask(session_id, ask_id)
                return None
        self._seat(str(router), mine.popleft())
        self._settle(now_s)
        return self._named

    def end(self, request: int, now_s: float) -> None:
        """The request has ended."""
        if request in self._seated:
            self._seated.discard(request)
            self._desk.freed(str(request), now_s)

    def refresh(self) -> None:
        """Nobody waits for counts."""

    def _settle(self, now_s: float) -> None:
        for told in self._desk.settle(now_s):
            if not isinstance(told, AskRefused):
                self._floats[int(told.session_id)].append(told)

    @property
    def used(self) -> list[int]:
        """Seats of each rank that are granted or held."""
        return self._table.seats_used
