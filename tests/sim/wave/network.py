"""One-way links in virtual time: in order with a small delay, unless a fault is armed."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol  # payloads are the receiver's business

from splitwave.core.wave_message import RankReport
from tests.sim.wave.words import CUT, LOST, REPORTS, At, Fault, Message, index

if TYPE_CHECKING:
    from tests.sim.wave.world import World

DELAY_MIN_US = 20
DELAY_SPAN_US = 480
LATE_SPAN_US = 60_000
STRAY_SPAN_US = 400_000
"""A message that holds up no other may arrive this late."""
ANY = -1


class Armed(NamedTuple):
    """A fault that waits for its message, and for its receiver's state if one is named."""

    fault: int
    when: int
    size_us: int
    """How long a stop or a partition lasts, or how far a clock jumps."""


class Parcel:
    """A message that is kept back until its time has come."""

    __slots__ = ("fault", "is_parked", "message", "payload")

    def __init__(self, message: int, payload: Any, fault: int) -> None:
        self.message = message
        self.payload = payload
        self.fault = fault
        self.is_parked = True


class Receiver(Protocol):
    """What a link ends at."""

    stopped: bool

    def at(self) -> int:
        """Its state, as `words.At` counts it."""

    def receive(self, message: int, payload: Any, fault: int) -> None:
        """Take a message."""

    def stop(self, for_us: int) -> None:
        """Stop the process for a time."""

    def jump(self, by_us: int) -> None:
        """Set the process's clock."""


class Link:
    """Carries messages one way. Without a fault it keeps order and loses nothing, as TCP does."""

    __slots__ = ("backlog", "cut_until_us", "last_us", "name", "receiver", "sender", "world")

    def __init__(self, world: "World", name: str, receiver: Receiver, sender: int = ANY) -> None:
        """`sender`: index of the rank that sends, if one does."""
        self.world = world
        self.name = name
        self.receiver = receiver
        self.sender = sender
        self.last_us = 0
        self.cut_until_us = 0
        self.backlog: list[tuple[int, Any, int]] | None = None

    def send(self, message: int, payload: Any) -> None:
        """Send; what happens to it is up to the armed faults and the seed."""
        world = self.world
        now_us = world.now_us
        armed = self.spring(message) if message in world.armed else None
        if world.log is not None:
            self.say(message, payload, armed)
        if now_us < self.cut_until_us:
            self.lose(message, CUT)
        elif armed is not None:
            self.send_faulty(message, payload, armed)
        elif self.backlog is not None:
            self.backlog.append((message, payload, 0))
        else:
            at_us = now_us + DELAY_MIN_US + int(world.chance() * DELAY_SPAN_US)
            if at_us < self.last_us:
                at_us = self.last_us
            self.last_us = at_us
            arrive = self.arrive if message in world.armed_ahead else self.receiver.receive
            world.push(at_us, arrive, message, payload, 0)

    def spring(self, message: int) -> Armed | None:
        """The fault that befalls this message on its way."""
        at = self.receiver.at()
        waiting = self.world.armed[message]
        for armed in waiting:
            if armed.when in (ANY, at) or (armed.fault in _PARKED and at < At.RANK_SLEEPS):
                waiting.remove(armed)
                if not waiting:
                    del self.world.armed[message]
                return armed
        return None

    def lose(self, message: int, fault: int) -> None:
        """It never arrives."""
        world = self.world
        world.faults_seen |= 1 << fault
        world.disturbed(world.now_us)
        at = self.receiver.at()
        if not self.receiver.stopped and at != At.RANK_DEAD:  # Else it is in no state to miss it.
            world.coverage[index(at, message, fault)] += 1

    def send_faulty(self, message: int, payload: Any, armed: Armed) -> None:
        """Let a fault befall it."""
        world = self.world
        fault = armed.fault
        if fault in (LOST, CUT):
            self.cut_until_us = world.now_us + armed.size_us
            world.disturbed(self.cut_until_us)
            self.lose(message, fault)
            return
        world.faults_seen |= 1 << fault
        at_us = max(world.now_us + DELAY_MIN_US + int(world.chance() * DELAY_SPAN_US), self.last_us)
        if fault == Fault.DUPLICATED:
            self.last_us = at_us
            world.push(at_us, self.receiver.receive, message, payload, 0)
        elif fault == Fault.DELAYED and self.backlog is None:
            # What follows on the connection waits for it.
            self.backlog = []
        elif fault == Fault.RESTARTED:
            world.push(world.now_us + 1, world.operator.kill, self.sender)
            fault = Fault.NONE  # Its receiver sees for itself that it is stale.
        if armed.when == At.COORDINATOR_ENDED and self.sender != ANY:
            world.push(world.now_us + 1, world.operator.kill, self.sender)
        world.park(self, Parcel(message, payload, fault), armed.when)

    def arrive(self, message: int, payload: Any, fault: int) -> None:
        """Stop the receiver, or set its clock, just before it gets this."""
        receiver = self.receiver
        waiting = self.world.armed_ahead.get(message, [])
        at = receiver.at()
        for armed in waiting:
            if armed.when in (ANY, at):
                waiting.remove(armed)
                self.world.faults_seen |= 1 << armed.fault
                if armed.fault == Fault.STOPPED:
                    receiver.stop(armed.size_us)
                else:
                    receiver.jump(armed.size_us)
                    fault = fault or armed.fault
                break
        receiver.receive(message, payload, fault)

    def release(self, parcel: Parcel) -> None:
        """What was parked arrives at last, if it has not, and what waited behind it."""
        if not parcel.is_parked:
            return
        parcel.is_parked = False
        world = self.world
        world.disturbed(world.now_us + DELAY_SPAN_US)
        self.arrive(parcel.message, parcel.payload, parcel.fault)
        backlog, self.backlog = self.backlog, None
        for late in backlog or ():
            self.last_us = max(self.last_us, world.now_us)
            world.push(self.last_us, self.receiver.receive, *late)

    def say(self, message: int, payload: Any, armed: Armed | None) -> None:
        """Add a line to the trace."""
        fault = CUT if self.world.now_us < self.cut_until_us else armed.fault if armed else 0
        words = _report(payload) if message in REPORTS else payload
        self.world.say(f"{self.name}: {Message(message).name} {words}", Fault(fault))


def _report(report: RankReport) -> str:
    load = f"{report.waiting} waiting, {report.running} running"
    return f"in wave {report.wave}, {load} (epoch {report.epoch}, number {report.number})"


_PARKED = (Fault.DELAYED, Fault.DUPLICATED, Fault.REORDERED, Fault.RESTARTED)
