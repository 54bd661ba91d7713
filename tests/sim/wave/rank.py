"""One rank as vLLM 0.32's DPEngineCoreProc behaves, with the reports of Splitwave's plugin.

Modelled to the order of its statements: what is drained before a step, which messages
a paused engine discards, when it votes, and who says what to the coordinator.
"""

from typing import TYPE_CHECKING, Any  # a payload is as its message defines it

from splitwave.core.wave_message import RankReport
from tests.sim.wave.network import Link
from tests.sim.wave.words import FAULTS, MESSAGES, At, Fault, Message

if TYPE_CHECKING:
    from tests.sim.wave.group import Group
    from tests.sim.wave.world import World

DEAD, WAITING, LAGGING, FORWARD, RESUMING = range(5)
"""Where a rank is: in no process, asleep on its queue, between steps, in a step, in a barrier."""
PLACES = ("dead", "asleep", "between steps", "in a step", "in a barrier")

REPORT_BUSY_US = 100_000
REPORT_IDLE_US = 1_000_000
REPORT_COUNTS_US = 50_000

_START, _ADD, _ABORT, _PAUSE = Message.START, Message.ADD, Message.ABORT, Message.PAUSE


class Rank:
    """An engine core with its queue and its place in the lock-step."""

    __slots__ = (
        "down", "epoch", "executing", "fresh", "group", "ignores_starts", "inbox", "index",
        "number", "paused", "pending_pause", "place", "reported_us", "reports", "requests",
        "running", "said", "said_count", "step", "stopped", "timer", "up", "was_running", "wave",
        "world",
    )  # fmt: skip

    def __init__(self, world: "World", group: "Group", index: int) -> None:
        self.world = world
        self.group = group
        self.index = index
        self.up = Link(world, f"rank {index} to coordinator", world.host, index)
        self.down = Link(world, f"coordinator to rank {index}", self)
        self.place = DEAD
        self.stopped = False
        self.timer = 0
        self.reports = 0
        self.boot(0)

    def boot(self, epoch: int) -> None:
        """A new process: nothing of the old one is left."""
        self.epoch = epoch
        self.wave = 0
        self.step = 0
        self.running = False
        self.was_running = False
        self.pending_pause = False
        self.ignores_starts = False
        self.paused = False
        self.executing = False
        self.fresh = True  # It has not stepped in the group's wave yet.
        self.requests: dict[int, int] = {}
        self.inbox: list[tuple[int, Any]] = []
        self.number = 0
        self.said: tuple[int, bool, bool] | None = None
        self.said_count = 0
        self.reported_us = 0

    # The queue

    def at(self) -> int:
        """State for the coverage table."""
        if self.place == DEAD:
            return At.RANK_DEAD
        if self.place == WAITING:
            return At.RANK_HOLDS if self.ignores_starts else At.RANK_SLEEPS
        return At.RANK_STEPS

    def receive(self, message: int, payload: Any, fault: int) -> None:
        """Put a message in the queue, which wakes a sleeping rank."""
        if self.place == DEAD:
            fault = Fault.RESTARTED
        elif self.stopped and not fault:
            fault = Fault.STOPPED
        self.world.coverage[(self.at() * MESSAGES + message) * FAULTS + fault] += 1
        if self.place == DEAD:
            return
        self.inbox.append((message, payload))
        if self.place == WAITING and not self.stopped:
            self.loop()

    def loop(self) -> None:
        """From the top of the busy loop to the next step or to sleep."""
        self.was_running = self.running
        self.drain()

    def drain(self) -> None:
        """Handle what is queued, then step or sleep."""
        inbox = self.inbox
        while inbox:
            message, payload = inbox.pop(0)
            if message == _START:
                self.start(*payload)
            elif message == _ADD:
                self.add(*payload)
            elif message == _ABORT:
                self.requests.pop(payload, None)
            elif message == _PAUSE:
                self.pause(*payload)
            elif self.resume(payload):
                return
        if self.running or (self.requests and not self.paused):
            self.executing = bool(self.requests) and not self.paused
            self.say_if_changed()
            self.group.join(self)
        else:
            self.group.sleep(self)
            self.say_if_changed()

    def start(self, wave: int, exclude: int | None) -> None:
        """Wake, unless held, excluded or already beyond that wave: then the plugin says so."""
        if not self.ignores_starts and exclude != self.index and wave >= self.wave:
            self.wave = wave
            self.running = True
        else:
            self.said = None

    def add(self, request: int, wave: int, tokens: int) -> None:
        """Queue a request; one of a wave that has ended starts the next."""
        self.requests[request] = tokens
        if wave > self.wave:
            self.wave = wave
        elif wave < self.wave and not self.running and not self.paused:
            self.running = True
            self.up.send(Message.START_WAVE, (self.index, self.epoch, self.wave))

    def pause(self, generation: int, aborts: bool) -> None:
        """Hold the scheduler, and step until every rank has been asked to."""
        if generation != self.group.generation:
            return
        if aborts:
            self.requests.clear()
        self.paused = self.pending_pause = self.running = True

    def resume(self, generation: int) -> bool:
        """Release the scheduler; True if it now waits for the other ranks."""
        if generation != self.group.generation:
            return False
        assert self.ignores_starts, "model: resume only after all have paused"
        assert not self.running
        self.group.wait_to_resume(self)
        return True

    # The step

    def compute(self) -> None:
        """One token for each request."""
        requests = self.requests
        for request in [*requests]:
            requests[request] -= 1
            if not requests[request]:
                del requests[request]

    def after_vote(self, has_work: bool, all_pause: bool) -> None:
        """Go on or pause, and tell the coordinator as vLLM does."""
        if all_pause:
            self.ignores_starts = True
            self.pending_pause = False
        self.running = has_work
        if not has_work:
            if self.index == 0:
                self.up.send(Message.WAVE_COMPLETE, (0, self.epoch, self.wave))
            self.wave += 1
            self.step = 0
        elif not self.was_running and self.index == 0 and not self.pending_pause:
            self.up.send(Message.START_WAVE, (0, self.epoch, self.wave))

    # Reports

    def say_if_changed(self) -> None:
        """Report a changed state at once, and changed counts soon."""
        stepping = self.running or (bool(self.requests) and not self.paused)
        said = self.said
        if said is None or said != (self.wave, stepping, self.ignores_starts):
            self.report()
        elif len(self.requests) != self.said_count and self.timer > 0:
            due_us = self.reported_us + REPORT_COUNTS_US
            self.report_at(max(due_us, self.world.now_us))
            self.timer = -self.timer  # One early report is enough.

    def report(self) -> None:
        """Send the present state, and plan the next report."""
        stepping = self.running or (bool(self.requests) and not self.paused)
        held = self.ignores_starts
        self.said = (self.wave, stepping, held)
        self.said_count = count = len(self.requests)
        self.number += 1
        self.reports += 1
        self.reported_us = self.world.now_us
        report = RankReport(
            self.index, self.epoch, self.number, self.wave, stepping, held,
            0 if self.executing else count, count if self.executing else 0,
        )  # fmt: skip
        kind = Message.HOLDS if held else Message.STEPS if stepping else Message.SLEEPS
        self.up.send(kind, report)
        self.report_at(self.reported_us + (REPORT_BUSY_US if stepping else REPORT_IDLE_US))

    def report_at(self, at_us: int) -> None:
        """Set the time of the next report."""
        world = self.world
        world.timers = self.timer = world.timers + 1
        world.push(at_us, self.report_due, self.timer)

    def report_due(self, timer: int) -> None:
        """The plugin's thread: it runs while the engine waits in a step, but not while stopped."""
        if timer == abs(self.timer) and self.place != DEAD and not self.stopped:
            self.report()

    # Faults

    def stop(self, for_us: int) -> None:
        """SIGSTOP, and SIGCONT after a time."""
        self.stopped = True
        world = self.world
        world.faults_seen |= 1 << Fault.STOPPED
        world.disturbed(world.now_us + for_us)
        world.push(world.now_us + for_us, self.go_on)

    def jump(self, by_us: int) -> None:
        """An engine looks at no clock."""

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.stopped:
            return
        self.stopped = False
        if self.place == DEAD:
            return
        self.report()
        if self.place == WAITING and self.inbox:
            self.loop()
        elif self.place == LAGGING:
            self.group.caught_up(self, self.group.generation)
        else:
            self.group.may_fire()
