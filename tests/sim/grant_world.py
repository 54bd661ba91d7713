"""Many routers at one decode group's room, over a network that delays, loses and repeats.

The production GrantDesk and GrantTable answer; routers spend their floats by the
production GrantFloat, take, return, submit, cancel and crash. Messages have no link
below them here: each may be lost or come twice, which is worse than a session allows.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from splitwave.core.grant import GrantDesk, GrantTable
from tests.sim.grant_router import Router, ToRouter, ToWorker
from tests.sim.grant_worker import SWEEP_S, Worker


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
