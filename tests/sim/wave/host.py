"""The process around a coordinator: its queue, its clock and what becomes of its effects."""

from typing import TYPE_CHECKING, Any, Protocol  # a payload is as its message defines it

from splitwave.core.wave_message import (
    Effect,
    EpochEnded,
    GroupState,
    Publish,
    RankReport,
    StartWave,
    WaveSettings,
)
from tests.sim.wave.network import ANY, Armed, Link, Parcel
from tests.sim.wave.stock import StockCoordinator
from tests.sim.wave.words import FAULTS, MESSAGES, Fault, Message, Violation

if TYPE_CHECKING:
    from tests.sim.wave.world import World


PATIENCE_US = int(WaveSettings().patience_s * 1e6) - 1
SECOND_US = 1_000_000
"""Within which every rank repeats what it last said."""


class Coordinator(Protocol):
    """What the host drives: the production one, its mutants, and the model of stock vLLM's."""

    state: GroupState
    wave: int
    epoch: int

    @property
    def ranks(self) -> int: ...
    @property
    def loads(self) -> list[tuple[int, int, float]]: ...

    def on_first_request(self, wave: int, now_s: float) -> list[Effect]: ...
    def on_report(self, report: RankReport, now_s: float) -> list[Effect]: ...
    def on_start_wave(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]: ...
    def on_wave_complete(self, rank: int, epoch: int, wave: int, now_s: float) -> list[Effect]: ...
    def on_rank_started(self, rank: int, epoch: int, now_s: float) -> list[Effect]: ...
    def on_rank_died(self, rank: int, epoch: int, reason: str, now_s: float) -> list[Effect]: ...
    def on_resized(self, epochs: list[int], now_s: float) -> list[Effect]: ...
    def on_restarted(self, *, ranks: int, epoch: int, now_s: float) -> list[Effect]: ...
    def tick(self, now_s: float) -> list[Effect]: ...
    def wait_s(self) -> float: ...
    def check(self) -> None: ...


class Host:
    """Runs the coordinator as a worker would: one message at a time, ticks when they are due."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.core: Coordinator
        self.is_strict = True
        """False for stock's coordinator: it is judged by the hangs alone."""
        self.offset_us = 0
        self.read_us = 0
        self.passed_us = 0
        """Time that the process could have seen pass."""
        self.stopped = False
        self.inbox: list[tuple[int, Any, int]] = []
        self.tick_us = 0
        self.parked: dict[int, list[tuple[Link, Parcel]]] = {}
        """What the network keeps back until the group is in a given state."""
        self.tick_faults: list[Armed] = []
        self.newest: dict[int, tuple[int, int]] = {}
        """Epoch and number of each rank's latest report."""
        self.started = (-1, 0)
        """Wave and time of the latest start, on this process's clock."""
        self.starts = 0
        self.published = 0

    def run(self, core: Coordinator) -> None:
        """Take up a coordinator."""
        self.core = core
        self.is_strict = not isinstance(core, StockCoordinator)
        self.apply(core.tick(self.now_s()))

    def now_s(self) -> float:
        """The process's clock; read once for each call."""
        now_us = self.world.now_us + self.offset_us
        if now_us > self.read_us:
            self.passed_us += now_us - self.read_us
        self.read_us = now_us
        return now_us * 1e-6

    def at(self) -> int:
        """State for the coverage table: `At` begins with the states of a group."""
        return self.core.state

    def receive(self, message: int, payload: Any, fault: int) -> None:
        """Take a message, at once or when the process goes on."""
        if self.stopped:
            self.inbox.append((message, payload, fault or Fault.STOPPED))
            return
        core = self.core
        if not fault and message < Message.START and self.is_stale(message, payload):
            fault = Fault.RESTARTED
        self.world.coverage[(core.state * MESSAGES + message) * FAULTS + fault] += 1
        now_s = self.now_s()
        if message >= Message.SLEEPS and message <= Message.HOLDS:
            effects = self.hear(payload, now_s)
        elif message == Message.FIRST_REQUEST:
            wave = max(core.wave, payload)
            must_start = core.state is GroupState.PAUSED and wave != self.started[0]
            effects = core.on_first_request(payload, now_s)
            if must_start and not (effects and type(effects[0]) is StartWave):
                raise Violation("W7: the first request of a paused group starts nothing")
        else:
            effects = self.handle_rare(message, payload, now_s)
        core.check()
        self.apply(effects)

    def hear(self, report: RankReport, now_s: float) -> list[Effect]:
        """W8: a report that a later one overtook, or of a dead process, changes nothing."""
        core = self.core
        order = (report.epoch, report.number)
        newest = self.newest.get(report.rank, (0, 0))
        if report.rank >= core.ranks:
            return core.on_report(report, now_s)  # It has not heard of this rank yet.
        if order > newest:
            self.newest[report.rank] = order
            return core.on_report(report, now_s)
        held = (core.wave, core.loads)
        effects = core.on_report(report, now_s)
        if self.is_strict and held != (core.wave, core.loads):
            raise Violation(f"W8: {report} came after {newest} and changed {held}")
        return effects

    def handle_rare(self, message: int, payload: Any, now_s: float) -> list[Effect]:
        """Hand over what comes seldom."""
        core = self.core
        if message == Message.START_WAVE:
            rank, epoch, wave = payload
            return core.on_start_wave(rank, epoch, wave, now_s)
        if message == Message.WAVE_COMPLETE:
            rank, epoch, wave = payload
            return core.on_wave_complete(rank, epoch, wave, now_s)
        if message == Message.RANK_STARTED:
            rank, epoch = payload
            return core.on_rank_started(rank, epoch, now_s)
        if message == Message.RANK_DIED:
            rank, epoch, reason = payload
            return core.on_rank_died(rank, epoch, reason, now_s)
        if message == Message.RESIZED:
            return core.on_resized(payload, now_s)
        assert message == Message.GROUP_STARTED
        return core.on_restarted(ranks=payload[0], epoch=payload[1], now_s=now_s)

    def is_stale(self, message: int, payload: Any) -> bool:
        """True for the words of a process that is no more."""
        if message == Message.FIRST_REQUEST:
            return False
        seat = self.world.group.seats[payload[0]]
        return bool(payload[1] < seat.epoch) or seat.place == 0

    def tick(self, due_us: int) -> None:
        """The wait that the coordinator asked for is over."""
        if due_us != self.tick_us:
            return
        if self.stopped:
            self.inbox.append((Message.TICK, due_us, Fault.STOPPED))
            return
        fault = self.spring_tick() if self.tick_faults else 0
        if fault == Fault.STOPPED:
            self.inbox.append((Message.TICK, due_us, fault))
        else:
            self.count_tick(fault)

    def count_tick(self, fault: int) -> None:
        """Count and hand over a tick."""
        self.world.coverage[(self.core.state * MESSAGES + Message.TICK) * FAULTS + fault] += 1
        effects = self.core.tick(self.now_s())
        self.core.check()
        self.apply(effects)

    def apply(self, effects: list[Effect]) -> None:
        """Do what the coordinator asks for, and see when it wants to be called."""
        for effect in effects:
            self.do(effect)
        world = self.world
        wait_s = self.core.wait_s()
        if wait_s < 1e6:
            due_us = world.now_us + int(wait_s * 1e6) + 1
            if due_us < self.tick_us or self.tick_us <= world.now_us:
                self.tick_us = due_us
                world.push(due_us, self.tick, due_us)
        if self.parked and self.core.state in self.parked:
            for link, parcel in self.parked.pop(self.core.state):
                world.push(world.now_us + 1, link.release, parcel)

    def do(self, effect: Effect) -> None:
        """Send what an effect stands for."""
        world = self.world
        if type(effect) is StartWave:
            self.check_start(effect)
            self.starts += 1
            for rank in world.group.ranks:
                rank.down.send(Message.START, (effect.wave, effect.exclude))
        elif type(effect) is Publish:
            self.published += 1
            for front in world.fronts:
                front.down.send(Message.PUBLISH, effect)
        elif type(effect) is EpochEnded:
            world.operator.epoch_ended(effect)

    def check_start(self, effect: StartWave) -> None:
        """W6: starts are neither repeated in haste, nor sent to a group that is held.

        That it is held is known once every rank has repeated itself: a second after the hold
        began, or after the last fault, which may have cost a word that is not said sooner again.
        """
        wave, at_us = self.started
        passed_us = self.passed_us - at_us
        if self.is_strict and effect.wave == wave and passed_us < PATIENCE_US:
            raise Violation(f"W6: wave {wave} is started twice within {passed_us} us")
        self.started = (effect.wave, self.passed_us)
        held_us = self.world.operator.held_us
        if held_us is None:
            return
        known_us = max(held_us, self.world.disturbed_us) + SECOND_US
        if self.world.is_late(known_us):
            raise Violation("W6: ranks that an operator holds are woken")

    # Faults

    def spring_tick(self) -> int:
        """A fault that befalls the process as its wait ends."""
        for armed in self.tick_faults:
            if armed.when in (ANY, self.core.state):
                self.tick_faults.remove(armed)
                self.world.faults_seen |= 1 << armed.fault
                if armed.fault == Fault.CLOCK:
                    self.jump(armed.size_us)
                else:
                    self.stop(armed.size_us)
                return armed.fault
        return 0

    def jump(self, by_us: int) -> None:
        """Set the clock, forwards or back."""
        self.offset_us += by_us
        # The time since the last call may be lost to the coordinator: up to one bound.
        self.world.disturbed(self.world.now_us + 250_000)

    def stop(self, for_us: int) -> None:
        """SIGSTOP, and SIGCONT after a time."""
        self.stopped = True
        world = self.world
        world.faults_seen |= 1 << Fault.STOPPED
        world.disturbed(world.now_us + for_us)
        world.push(world.now_us + for_us, self.go_on)

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.stopped:
            return
        self.stopped = False
        inbox, self.inbox = self.inbox, []
        for message, payload, fault in inbox:
            if message == Message.TICK:
                self.count_tick(fault)
            else:
                self.receive(message, payload, fault)
