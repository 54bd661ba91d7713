"""One router of a grant world."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.router.grant_float import GrantFloat
from splitwave.core.grant import AskRefused
from splitwave.core.session import AskGrant, CancelAsk, Granted, ReturnGrants, TakeGrant

if TYPE_CHECKING:
    from tests.sim.grant_world import World

REATTACH_S = 0.5
"""How long a worker keeps the session of a router that is gone."""


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


class Router:
    """One router: a float, asks under way, attempts under way; and all of it lost in a crash."""

    def __init__(self, world: "World", index: int) -> None:
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
