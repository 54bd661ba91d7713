"""The ranks of one group and what binds them: steps, votes and barriers that all must join."""

from typing import TYPE_CHECKING

from tests.sim.wave.agreement import Agreement
from tests.sim.wave.rank import DEAD, FORWARD, LAGGING, RESUMING, WAITING, Rank

if TYPE_CHECKING:
    from tests.sim.wave.world import World

SEATS = 6
"""Ranks that a group may grow to."""
LAG_SHARE = 0.15
LAG_US = 1_000


class Group:
    """Ranks in lock-step, and the watch on what they owe each other.

    `generation` changes whenever what is under way among the ranks no longer counts.
    """

    def __init__(self, world: "World", *, ranks: int, sync_interval: int, step_us: int) -> None:
        self.world = world
        self.seats = [Rank(world, self, index) for index in range(SEATS)]
        self.ranks: list[Rank] = []
        self.sync_interval = sync_interval
        self.step_us = step_us
        self.generation = 0
        self.epoch = 0
        self.steps = 0
        self.in_step = 0
        self.asleep = 0
        self.resuming = 0
        self.is_fire_due = False
        self.apart_since_us: int | None = None
        self.agreement = Agreement(world)
        self.resize_to = 0
        self.start(ranks)

    def start(self, ranks: int) -> None:
        """Start every rank anew, with the next epoch."""
        self.generation += 1
        self.epoch += 1
        self.ranks = self.seats[:ranks]
        self.in_step = self.asleep = self.resuming = 0
        self.is_fire_due = False
        self.resize_to = 0
        self.agreement.restarted()
        for rank in self.ranks:
            rank.boot(self.epoch)
            rank.place = LAGGING
            delay_us = int(self.world.chance() * 2_000)
            self.world.push(self.world.now_us + delay_us, self.caught_up, rank, self.generation)

    def kill(self) -> None:
        """Every process is gone."""
        self.generation += 1
        for rank in self.seats:
            rank.place = DEAD
        self.in_step = self.asleep = self.resuming = 0
        self.note()

    @property
    def is_asleep(self) -> bool:
        """True if every rank waits on its queue and none is held."""
        return all(r.place == WAITING and not r.ignores_starts for r in self.ranks)

    # Where ranks are

    def leave(self, rank: Rank) -> None:
        """Count a rank out of where it was."""
        if rank.place == WAITING:
            if not rank.ignores_starts:
                self.asleep -= 1
        elif rank.place == FORWARD:
            self.in_step -= 1
        elif rank.place == RESUMING:
            self.resuming -= 1

    def join(self, rank: Rank) -> None:
        """A rank enters its step, which runs once all have."""
        self.leave(rank)
        rank.place = FORWARD
        self.in_step += 1
        self.note()
        if self.in_step == len(self.ranks):
            world = self.world
            world.push(world.now_us + self.step_us, self.fire, self.generation)

    def sleep(self, rank: Rank) -> None:
        """A rank waits on its queue."""
        if rank.place == WAITING:
            return
        self.leave(rank)
        rank.place = WAITING
        if rank.ignores_starts:
            self.world.operator.rank_held(rank)
        else:
            self.asleep += 1
        self.note()

    def note(self) -> None:
        """See whether ranks wait in a step for others that sleep, and since when."""
        if not (self.in_step and self.asleep):
            self.apart_since_us = None
        elif self.apart_since_us is None:
            self.apart_since_us = self.world.now_us
            self.world.watch_waiting()

    # Steps

    def may_fire(self) -> None:
        """A stopped rank goes on: the step may end now."""
        if self.is_fire_due:
            self.fire(self.generation)

    def fire(self, generation: int) -> None:
        """A step ends on all ranks: tokens, then the vote, then the top of each loop."""
        ranks = self.ranks
        if generation != self.generation or self.in_step != len(ranks):
            return
        self.is_fire_due = any(rank.stopped for rank in ranks)
        if self.is_fire_due:
            return  # Until the last of them goes on.
        self.steps += 1
        for rank in ranks:
            if rank.executing:
                rank.compute()
            rank.step += 1
            rank.place = LAGGING
        self.in_step = 0
        self.note()
        self.agreement.check(ranks)
        self.vote()
        if self.resize_to:
            self.resize(self.resize_to)
        self.go_round()

    def go_round(self) -> None:
        """Each rank gets to the top of its loop, some a little later than others."""
        for rank in [*self.ranks]:
            if self.world.chance() < LAG_SHARE:
                late_us = self.world.now_us + int(self.world.chance() * LAG_US)
                self.world.push(late_us, self.caught_up, rank, self.generation)
            else:
                rank.loop()

    def enter(self, rank: Rank) -> None:
        """A new process gets to its loop."""
        rank.place = LAGGING
        rank.loop()

    def caught_up(self, rank: Rank, generation: int) -> None:
        """A rank that lagged gets to the top of its loop."""
        if generation == self.generation and rank.place == LAGGING and not rank.stopped:
            rank.loop()

    def vote(self) -> None:
        """At the first step and every `sync_interval`: does anyone have work, do all pause?"""
        ranks = self.ranks
        has_work, all_pause = True, False
        step = ranks[0].step
        if step == 1 or step % self.sync_interval == 0:
            pausing = sum(rank.pending_pause for rank in ranks)
            unfinished = any(rank.requests and not rank.paused for rank in ranks)
            all_pause = pausing == len(ranks)
            has_work = unfinished or (pausing > 0 and not all_pause)
        for rank in ranks:
            rank.after_vote(has_work, all_pause)

    # Barriers

    def wait_to_resume(self, rank: Rank) -> None:
        """A rank waits until all have resumed; then they agree whether there is work."""
        self.leave(rank)
        rank.place = RESUMING
        rank.paused = rank.ignores_starts = False
        self.note()
        self.resuming += 1
        if self.resuming < len(self.ranks):
            return
        self.resuming = 0
        has_work = any(one.requests for one in self.ranks)
        self.world.operator.resumed()
        for one in self.ranks:
            one.running = one.running or has_work
            one.place = LAGGING
        for one in self.ranks:
            one.drain()

    def resize(self, ranks: int) -> None:
        """Grow or shrink between steps; all agree on running, wave and step, as elastic EP does."""
        self.resize_to = 0
        was_asleep = self.asleep > 0
        self.generation += 1
        self.epoch += 1
        for rank in self.seats[ranks:]:
            rank.place = DEAD
        self.ranks = self.seats[:ranks]
        for rank in self.ranks:
            if rank.place == DEAD:
                rank.boot(self.epoch)
                rank.stopped = False
                rank.place = LAGGING
        running = any(rank.running for rank in self.ranks)
        wave = max(rank.wave for rank in self.ranks)
        step = max(rank.step for rank in self.ranks)
        for rank in self.ranks:
            rank.running, rank.wave, rank.step = running, wave, step
        self.asleep = sum(rank.place == WAITING for rank in self.ranks)
        self.world.resized([rank.epoch for rank in self.ranks])
        if was_asleep:
            for rank in self.ranks:
                if rank.place == LAGGING:
                    rank.loop()
        self.note()
