"""Everything of one run: the queue of events, the actions, the watch and the end."""

import heapq
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple  # arguments of an event are its function's business

from splitwave.core.wave import WaveCoordinator
from splitwave.core.wave_message import GroupState
from tests.sim.wave.front import Front
from tests.sim.wave.group import Group
from tests.sim.wave.host import Coordinator, Host
from tests.sim.wave.network import (
    ANY,
    DELAY_SPAN_US,
    LATE_SPAN_US,
    STRAY_SPAN_US,
    Armed,
    Link,
    Parcel,
)
from tests.sim.wave.operator import Operator
from tests.sim.wave.rank import PLACES, WAITING
from tests.sim.wave.schedule import Action, Op, Schedule
from tests.sim.wave.words import (
    FAULTS,
    MESSAGES,
    STATES,
    Fault,
    Message,
    Violation,
)

BOUND_US = 250_000 + 6_000
"""W1: the watchdog's bound, four messages on their way and two ranks that lag."""
QUIET_US = 2_500_000
"""All work is done this long after the last action and fault."""
IDLE_US = 7_000_000
"""How long the idle group is then watched: longer than the longest silence of any process."""

ORDER_BITS: Final = 24
"""Room for more events than a run has."""

Make = Callable[[int, int, float], Coordinator]


def production(ranks: int, epoch: int, now_s: float) -> Coordinator:
    """The coordinator that Splitwave runs."""
    return WaveCoordinator(ranks=ranks, epoch=epoch, now_s=now_s)


class Outcome(NamedTuple):
    """What a run that broke nothing was like."""

    events: int
    fault_kinds: int
    starts: int
    steps: int
    requests: int


class World:
    """One run of a schedule in virtual microseconds."""

    def __init__(
        self,
        schedule: Schedule,
        make: Make = production,
        *,
        coverage: list[int] | None = None,
        log: list[str] | None = None,
    ) -> None:
        self.now_us = 0
        self.heap: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        """By time and then by order of pushing, both in one number: see `push`."""
        self.pushed = 0
        self.timers = 0
        self.chance = random.Random(schedule.seed).random
        self.coverage = coverage if coverage is not None else [0] * (STATES * MESSAGES * FAULTS)
        self.log = log
        self.faults_seen = 0
        self.armed: dict[int, list[Armed]] = {}
        """Faults of messages on their way, by message."""
        self.armed_ahead: dict[int, list[Armed]] = {}
        """Faults of receivers, by the message that they come before."""
        self.disturbed_us = 0
        self.is_watched = False
        self.requests = 0
        self.schedule = schedule
        self.host = Host(self)
        self.group = Group(
            self,
            ranks=schedule.ranks,
            sync_interval=schedule.sync_interval,
            step_us=schedule.step_us,
        )
        self.fronts: list[Front] = []
        self.operator = Operator(self)
        self.fronts += [Front(self, index) for index in range(schedule.fronts)]
        self.host.run(make(schedule.ranks, self.group.epoch, 0.0))

    # Time

    def push(self, at_us: int, call: Callable[..., None], *args: Any) -> None:
        """Let something happen later."""
        self.pushed += 1
        heapq.heappush(self.heap, ((at_us << ORDER_BITS) + self.pushed, call, args))

    def run_until(self, end_us: int) -> int:
        """Let everything happen up to a time; returns how many events there were."""
        heap = self.heap
        pop = heapq.heappop
        events = 0
        end_key = (end_us + 1) << ORDER_BITS
        while heap and heap[0][0] < end_key:
            key, call, args = pop(heap)
            self.now_us = key >> ORDER_BITS
            call(*args)
            events += 1
        self.now_us = end_us
        return events

    def say(self, text: str, fault: Fault = Fault.NONE) -> None:
        """Add a line to the trace, if one is kept."""
        if self.log is not None:
            mark = f"  <-- {fault.name}" if fault else ""
            self.log.append(f"{self.now_us / 1e3:12.3f} ms  {text}{mark}")

    def arm(self, message: int, armed: Armed) -> None:
        """Let a fault befall the next message of its kind that finds its receiver in that state."""
        ahead = armed.fault in (Fault.STOPPED, Fault.CLOCK)
        (self.armed_ahead if ahead else self.armed).setdefault(message, []).append(armed)

    def disarm(self) -> None:
        """Forget the faults that have found no message."""
        self.armed.clear()
        self.armed_ahead.clear()
        self.host.tick_faults.clear()

    def park(self, link: Link, parcel: Parcel, until: int) -> None:
        """Keep a message back until the coordinator is in that state, or for a random time."""
        span_us = STRAY_SPAN_US if link.backlog is None else LATE_SPAN_US
        if until == link.receiver.at():
            span_us = DELAY_SPAN_US  # So that it still is, probably.
        late_us = self.now_us + 1 + int(self.chance() * span_us)
        self.disturbed(self.now_us if link.backlog is None else late_us)
        self.push(late_us, link.release, parcel)
        if until != ANY:
            self.host.parked.setdefault(until, []).append((link, parcel))

    # The watch

    def disturbed(self, until_us: int) -> None:
        """A fault acts until then: bounds count from its end."""
        if until_us > self.disturbed_us:
            self.disturbed_us = until_us

    def is_late(self, since_us: int) -> bool:
        """True if what began then, or was disturbed since, has lasted longer than the bound."""
        return self.now_us - max(since_us, self.disturbed_us) > BOUND_US

    @property
    def is_calm(self) -> bool:
        """True if nothing has been disturbed for a bound."""
        return self.now_us - self.disturbed_us > BOUND_US

    def watch_waiting(self) -> None:
        """Ranks wait in a step for others that sleep: look again when the bound has passed."""
        if not self.is_watched:
            self.is_watched = True
            self.push(max(self.now_us, self.disturbed_us) + BOUND_US + 1, self.check_waiting)

    def check_waiting(self) -> None:
        """W1: no rank waits on a sleeping one for longer than the bound."""
        self.is_watched = False
        since_us = self.group.apart_since_us
        if since_us is None:
            return
        if self.is_late(since_us):
            places = [f"{PLACES[rank.place]} in wave {rank.wave}" for rank in self.group.ranks]
            raise Violation(
                f"W1: work waits on a sleeping rank for {(self.now_us - since_us) / 1e3:.0f} ms;"
                f" ranks are {places},"
                f" the coordinator is {self.host.core.state.name} in {self.host.core.wave}"
            )
        self.is_watched = True
        self.push(max(since_us, self.disturbed_us) + BOUND_US + 1, self.check_waiting)

    def resized(self, epochs: list[int]) -> None:
        """Tell the coordinator of the group's new size."""
        self.disturbed(self.now_us + 1_000)
        self.operator.to_coordinator.send(Message.RESIZED, epochs)

    # Actions

    def act(self, action: Action) -> None:
        """Do one action."""
        if self.log is not None:
            self.say(f"** {action.op.name} {action.a} {action.b} {action.c}")
        _ACT[action.op](self, action)

    def run(self) -> Outcome:
        """Run the schedule, let the dust settle, and watch the idle group."""
        for action in self.schedule.actions:
            self.push(action.at_us, self.act, action)
        events = self.run_until(self.schedule.ends_us)
        self.heal()
        self.disturbed(self.now_us)
        events += self.run_until(self.disturbed_us + QUIET_US)
        self.check_done()
        seen = [(rank.reports, rank.epoch) for rank in self.group.ranks]
        steps, starts, began_us = self.group.steps, self.host.starts, self.now_us
        events += self.run_until(began_us + IDLE_US)
        self.check_idle([reports for reports, _ in seen], steps, starts)
        self.check_counts()
        kinds = (self.faults_seen >> 1).bit_count()
        return Outcome(events, kinds, self.host.starts, self.group.steps, self.requests)

    def heal(self) -> None:
        """End all faults that are under way or armed, and any hold."""
        self.say("** all faults end")
        self.disarm()
        for link in self.links():
            link.cut_until_us = min(link.cut_until_us, self.now_us)
        self.host.go_on()
        for rank in self.group.seats:
            rank.go_on()
        self.operator.resume()

    def links(self) -> list[Link]:
        """Every link of the wave protocol."""
        links = [link for rank in self.group.seats for link in (rank.up, rank.down)]
        return links + [link for front in self.fronts for link in (front.up, front.down)]

    # The end

    def check_done(self) -> None:
        """W1, in the end: no work is left, and nobody waits."""
        ranks = self.group.ranks
        left = [len(rank.requests) for rank in ranks]
        if any(left):
            raise Violation(f"W1: requests never ended: {left} on the ranks")
        if any(rank.place != WAITING for rank in ranks):
            places = [PLACES[rank.place] for rank in ranks]
            raise Violation(f"W1: ranks never came to rest: {places}")

    def check_idle(self, reports: list[int], steps: int, starts: int) -> None:
        """W4: an idle group makes no step, is not woken and sends a message a second a rank."""
        if self.group.steps != steps:
            raise Violation(f"W4: {self.group.steps - steps} steps of an idle group")
        if self.host.starts != starts:
            raise Violation(f"W4: {self.host.starts - starts} starts of an idle group")
        sent = [rank.reports - was for rank, was in zip(self.group.ranks, reports, strict=True)]
        if max(sent) > IDLE_US // 1_000_000 + 1:
            raise Violation(f"W4: idle ranks sent {sent} messages in {IDLE_US / 1e6} s")
        if self.host.core.state is not GroupState.PAUSED:
            raise Violation(f"W4: an idle group is {self.host.core.state.name}")

    def check_counts(self) -> None:
        """W3: no front-end believes that an idle rank has work, or that the group runs."""
        for front in self.fronts:
            if front.counts != [0] * len(self.group.ranks):
                raise Violation(f"W3: front {front.index} avoids ranks for ever: {front.counts}")
            if front.running:
                raise Violation(f"W3: front {front.index} believes that the group runs")


def _cut(world: World, ends: tuple[Link, Link], span_us: int) -> None:
    until_us = world.now_us + span_us
    world.faults_seen |= 1 << Fault.CUT
    world.disturbed(until_us)
    for link in ends:
        link.cut_until_us = max(link.cut_until_us, until_us)


def _cut_rank(world: World, action: Action) -> None:
    rank = world.group.seats[action.a % len(world.group.ranks)]
    _cut(world, (rank.up, rank.down), action.b)


def _cut_front(world: World, action: Action) -> None:
    front = world.fronts[action.a % len(world.fronts)]
    _cut(world, (front.up, front.down), action.b)


def _arm(world: World, action: Action) -> None:
    message, fault, when, size_us = action.a, action.b, action.c, action.d
    armed = Armed(fault, when, size_us)
    if message == Message.TICK:
        world.host.tick_faults.append(armed)
    else:
        world.arm(message, armed)


_ACT: dict[Op, Callable[[World, Action], None]] = {
    Op.ADD: lambda world, x: world.fronts[x.a % len(world.fronts)].send(x.b, x.c),
    Op.ABORT: lambda world, x: world.fronts[x.a % len(world.fronts)].abort(x.b),
    Op.PAUSE: lambda world, x: world.operator.pause(bool(x.a)),
    Op.RESUME: lambda world, _: world.operator.resume(),
    Op.RESIZE: lambda world, x: world.operator.resize(x.a),
    Op.KILL: lambda world, x: world.operator.kill(x.a),
    Op.RESTART_FRONT: lambda world, x: world.fronts[x.a % len(world.fronts)].reset(),
    Op.STOP_RANK: lambda world, x: world.group.ranks[x.a % len(world.group.ranks)].stop(x.b),
    Op.STOP_COORDINATOR: lambda world, x: world.host.stop(x.b),
    Op.CUT_RANK: _cut_rank,
    Op.CUT_FRONT: _cut_front,
    Op.ARM: _arm,
    Op.CLEAR: lambda world, _: world.disarm(),
    Op.JUMP: lambda world, x: world.host.jump(x.b),
}
