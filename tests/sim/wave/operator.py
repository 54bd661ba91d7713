"""Whoever runs the group: pauses and resumes it, restarts it and changes its size."""

from typing import TYPE_CHECKING

from splitwave.core.wave_message import EpochEnded
from tests.sim.wave.network import Link
from tests.sim.wave.rank import DEAD, WAITING, Rank
from tests.sim.wave.words import Fault, Message, Violation

if TYPE_CHECKING:
    from tests.sim.wave.world import World

IDLE, PAUSING, PAUSED, RESUMING, RESTARTING = range(5)
BOOT_US = 30_000
NOTICE_US = 5_000


class Operator:
    """One operation at a time. A rank's death ends all of them, and the epoch."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.links = [
            Link(world, f"operator to rank {rank.index}", rank) for rank in world.group.seats
        ]
        self.to_coordinator = Link(world, "operator to coordinator", world.host)
        self.doing = IDLE
        self.held: set[int] = set()
        self.held_us: int | None = None
        """Since when every rank is held."""
        self.wants_resume = False

    def pause(self, aborts: bool) -> None:
        """Pause all ranks' schedulers, if nothing else is under way."""
        group = self.world.group
        if self.doing != IDLE or group.resize_to or any(r.place == DEAD for r in group.ranks):
            return
        self.doing = PAUSING
        self.held.clear()
        for rank in group.ranks:
            self.links[rank.index].send(Message.PAUSE, (group.generation, aborts))

    def rank_held(self, rank: Rank) -> None:
        """A rank has paused."""
        self.held.add(rank.index)
        if self.doing == PAUSING and len(self.held) == len(self.world.group.ranks):
            self.doing = PAUSED
            self.held_us = self.world.now_us
            if self.wants_resume:
                self.resume()

    def resume(self) -> None:
        """Resume all ranks, now or once they have paused."""
        self.wants_resume = self.doing == PAUSING
        if self.doing != PAUSED:
            return
        self.doing = RESUMING
        self.held_us = None
        group = self.world.group
        for rank in group.ranks:
            self.links[rank.index].send(Message.RESUME, group.generation)

    def resumed(self) -> None:
        """Every rank has resumed."""
        self.doing = IDLE

    # Restarts

    def kill(self, index: int) -> None:
        """SIGKILL of one rank. Among sleepers it is started again alone; else the group is lost."""
        world, group = self.world, self.world.group
        if self.doing == RESTARTING or any(rank.place == DEAD for rank in group.ranks):
            return
        world.faults_seen |= 1 << Fault.RESTARTED
        rank = group.ranks[index % len(group.ranks)]
        alone = self.doing == IDLE and group.is_asleep
        group.leave(rank)
        rank.place = DEAD
        rank.stopped = False
        group.note()
        world.disturbed(world.now_us)
        if alone:
            world.push(world.now_us + BOOT_US, self.start_alone, rank, group.generation)
        else:
            self.doing = RESTARTING
            self.held_us = None
            died = (rank.index, rank.epoch, "killed by SIGKILL")
            world.push(world.now_us + NOTICE_US, self.to_coordinator.send, Message.RANK_DIED, died)
            world.push(world.now_us + 2 * NOTICE_US, self.expect_end, group.epoch)

    def expect_end(self, epoch: int) -> None:
        """W5: a rank's death ends the epoch as soon as the coordinator hears of it."""
        world = self.world
        group = world.group
        if world.host.stopped:
            world.push(world.now_us + NOTICE_US, self.expect_end, epoch)
        elif group.epoch == epoch and any(rank.place != DEAD for rank in group.ranks):
            raise Violation(f"W5: epoch {epoch} goes on without one of its ranks")

    def start_alone(self, rank: Rank, generation: int) -> None:
        """A new process takes the place of the one that died."""
        world, group = self.world, self.world.group
        if generation != group.generation or rank.place != DEAD:
            return
        if self.doing != IDLE:
            return
        group.epoch += 1
        rank.boot(group.epoch)
        world.disturbed(world.now_us + 1_000)
        self.to_coordinator.send(Message.RANK_STARTED, (rank.index, rank.epoch))
        group.enter(rank)

    def epoch_ended(self, effect: EpochEnded) -> None:
        """The coordinator gave up its group: start all of it again."""
        world = self.world
        world.group.kill()
        self.doing = RESTARTING
        self.held_us = None
        world.disturbed(world.now_us + BOOT_US + 5_000)
        world.push(world.now_us + BOOT_US, self.start_all)

    def start_all(self) -> None:
        """A new epoch; the coordinator is told before any rank can speak."""
        world = self.world
        ranks = len(world.group.ranks)
        self.doing = IDLE
        self.wants_resume = False
        started = (ranks, world.group.epoch + 1)
        # No rank can speak before this has arrived.
        self.to_coordinator.send(Message.GROUP_STARTED, started)
        world.push(world.now_us + 1_000, world.group.start, ranks)

    def resize(self, change: int) -> None:
        """Grow or shrink the group, at once if it sleeps and else after its next step."""
        group = self.world.group
        ranks = min(6, max(3, len(group.ranks) + change))
        if self.doing != IDLE or ranks == len(group.ranks):
            return
        if any(rank.place == DEAD for rank in group.ranks):
            return
        if group.is_asleep:
            group.resize(ranks)
        elif any(rank.place != WAITING for rank in group.ranks):
            group.resize_to = ranks
