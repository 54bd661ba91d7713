"""What the adapter knows of each request id: running, held, or released before it came.

Plain state: no await, no clock, no vLLM. Methods return what is to be done.
"""

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

TOMBSTONES_MAX = 65536


class Admission(enum.Enum):
    """What to do with a submitted id."""

    RUN = "run"
    RUN_WITHOUT_HOLD = "run_without_hold"
    """It was released before it came."""
    REFUSE = "refuse"
    """An id that still lives: the engine's scheduler would die of it."""


@dataclass(slots=True)
class Running:
    """A request that the engine may still give outputs for."""

    rank: int
    hold: bool
    started: bool = False
    """It has given an output."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A finished prompt that the engine may still hold."""

    rank: int
    forget_at_s: float


@dataclass(slots=True)
class Release:
    """What a call of `released` asks for, by rank. `unknown` goes to every rank."""

    abort: list[str] = field(default_factory=list)
    by_rank: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    unknown: list[str] = field(default_factory=list)


class Ledger:
    """Ids of one group.

    Invariants, asserted by `check`:
      G1  an id is in at most one of running and holding
      G2  an id that came after its release holds nothing
      G3  a request whose pull's end is awaited is not running
      G4  there are at most TOMBSTONES_MAX tombstones
    """

    def __init__(self, *, lease_ttl_s: float, pulls: bool) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._pulls = pulls
        self._pulling: set[str] = set()
        self._running: dict[str, Running] = {}
        self._holding: OrderedDict[str, Holding] = OrderedDict()
        self._tombstones: OrderedDict[str, float] = OrderedDict()

    def admit(self, request_id: str, *, rank: int, hold: bool, now_s: float) -> Admission:
        """Register a submitted id, or refuse it."""
        self._sweep(now_s)
        if self._is_live(request_id):
            return Admission.REFUSE
        released = hold and request_id in self._tombstones
        self._running[request_id] = Running(rank, hold and not released)
        return Admission.RUN_WITHOUT_HOLD if released else Admission.RUN

    def _is_live(self, request_id: str) -> bool:
        """True if the engine may know this id."""
        return any(request_id in ids for ids in (self._running, self._holding, self._pulling))

    def running(self, request_id: str) -> Running | None:
        """Return the request if outputs for it are wanted."""
        return self._running.get(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request that has given its last output and holds nothing."""
        self._running.pop(request_id, None)

    def held(self, request_id: str, expires_at_s: float) -> None:
        """Note that a request has ended and its blocks wait to be pulled.

        A pulling decode engine prolongs the lease, so the id is known for one more lease.
        """
        running = self._running.pop(request_id)
        self._holding[request_id] = Holding(running.rank, expires_at_s + self._lease_ttl_s)

    def aborted(self, request_ids: Iterable[str]) -> list[str]:
        """Stop outputs of these ids and return those that the engine must be told of."""
        stopped = []
        for name in request_ids:
            if (running := self._running.pop(name, None)) is not None:
                stopped.append(name)
                if self._pulls and not running.started:
                    self._pulling.add(name)
        return stopped

    def pull_ended(self, request_id: str) -> bool:
        """True, once, for a request that was aborted before its first output."""
        if request_id not in self._pulling:
            return False
        self._pulling.remove(request_id)
        return True

    def released(self, request_ids: Iterable[str], now_s: float) -> Release:
        """Give up what these ids hold, will hold, or would have held."""
        self._sweep(now_s)
        release = Release()
        for name in request_ids:
            if (running := self._running.pop(name, None)) is not None:
                release.abort.append(name)
                # The engine may have finished it already: it releases after it has aborted.
                release.by_rank[running.rank].append(name)
            elif (holding := self._holding.pop(name, None)) is not None:
                release.by_rank[holding.rank].append(name)
            else:
                release.unknown.append(name)
                self._tombstones[name] = now_s + self._lease_ttl_s
        while len(self._tombstones) > TOMBSTONES_MAX:
            self._tombstones.popitem(last=False)
        return release

    def holding(self) -> dict[int, list[str]]:
        """Return the ids that may still be held, by rank."""
        by_rank: dict[int, list[str]] = defaultdict(list)
        for name, holding in self._holding.items():
            by_rank[holding.rank].append(name)
        return by_rank

    def _sweep(self, now_s: float) -> None:
        """Forget what has had its time. Entries are in order of time, but for ties."""
        while self._holding and next(iter(self._holding.values())).forget_at_s <= now_s:
            self._holding.popitem(last=False)
        while self._tombstones and next(iter(self._tombstones.values())) <= now_s:
            self._tombstones.popitem(last=False)

    def check(self) -> None:
        """Assert the invariants."""
        assert not self._running.keys() & self._holding.keys(), "G1"
        assert not any(
            self._running[name].hold for name in self._running.keys() & self._tombstones.keys()
        ), "G2"
        assert not self._running.keys() & self._pulling, "G3"
        assert len(self._tombstones) <= TOMBSTONES_MAX, "G4"
