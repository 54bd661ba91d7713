"""A front-end as vLLM 0.32's DPLBAsyncMPClient behaves."""

from typing import TYPE_CHECKING, Any  # a payload is as its message defines it

from tests.sim.wave.network import Link
from tests.sim.wave.words import FAULTS, MESSAGES, At, Fault, Message

if TYPE_CHECKING:
    from tests.sim.wave.world import World


class Front:
    """Sends requests; tells the coordinator only of those that it sends to a paused group."""

    def __init__(self, world: "World", index: int) -> None:
        self.world = world
        self.index = index
        self.stopped = False
        self.up = Link(world, f"front {index} to coordinator", world.host)
        self.down = Link(world, f"coordinator to front {index}", self)
        self.to_ranks = [
            Link(world, f"front {index} to rank {rank.index}", rank) for rank in world.group.seats
        ]
        self.sent: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        """A new process: it knows nothing."""
        self.wave = 0
        self.running = False
        self.counts: list[int] = []

    def at(self) -> int:
        """State for the coverage table."""
        return At.FRONT_BELIEVES_RUNNING if self.running else At.FRONT_BELIEVES_PAUSED

    def receive(self, message: int, payload: Any, fault: int) -> None:
        """Take a publication."""
        self.world.coverage[(self.at() * MESSAGES + message) * FAULTS + fault] += 1
        self.wave = payload.wave
        self.running = payload.running
        self.counts = [waiting + running for waiting, running, _ in payload.counts]

    def send(self, target: int, tokens: int) -> None:
        """Send a request to the rank named, or to the one that seems least loaded."""
        world = self.world
        ranks = len(world.group.ranks)
        if target < 0:
            loads = self.counts[:ranks]
            target = loads.index(min(loads)) if len(loads) == ranks else 0
        target %= ranks
        if target < len(self.counts):
            self.counts[target] += 1
        world.requests += 1
        self.sent.append((world.requests, target))
        self.to_ranks[target].send(Message.ADD, (world.requests, self.wave, tokens))
        if not self.running:
            # It believes its own word: the flag is wrong until the next publication.
            self.running = True
            self.up.send(Message.FIRST_REQUEST, self.wave)

    def abort(self, back: int) -> None:
        """Abort one of the latest requests, whether or not it has ended."""
        if self.sent:
            request, target = self.sent[-1 - back % len(self.sent)]
            self.to_ranks[target].send(Message.ABORT, request)

    def stop(self, for_us: int) -> None:
        """No matter: it would send nothing, and learn later."""

    def jump(self, by_us: int) -> None:
        """It looks at no clock."""

    def reset(self) -> None:
        """A fault: this process restarts."""
        self.world.faults_seen |= 1 << Fault.RESTARTED
        self.restart()
