"""A schedule: the size of a group, and what is done to it when. Drawn from a seed alone."""

import enum
import random
from typing import NamedTuple


class Op(enum.IntEnum):
    """What an action does; `a`, `b`, `c` and `d` of the action are its arguments."""

    ADD = 0
    """Front a sends a request to rank b (-1: the least loaded) of c tokens."""
    ABORT = 1
    """Front a aborts its b-th latest request."""
    PAUSE = 2
    """The operator pauses the group; a: aborts all requests."""
    RESUME = 3
    RESIZE = 4
    """The group grows by a ranks."""
    KILL = 5
    """Rank a is killed."""
    RESTART_FRONT = 6
    STOP_RANK = 7
    """Rank a is stopped for b us."""
    STOP_COORDINATOR = 8
    """It is stopped for b us."""
    CUT_RANK = 9
    """Nothing passes between rank a and the coordinator for b us."""
    CUT_FRONT = 10
    """Nothing passes between front a and the coordinator for b us."""
    ARM = 11
    """Fault b, of size d, befalls the next message a to a receiver in state c (-1: any)."""
    JUMP = 12
    """The coordinator's clock jumps by b us."""
    CLEAR = 13
    """Faults that still wait for their message are forgotten."""


class Action(NamedTuple):
    """One thing that is done at a time."""

    at_us: int
    op: Op
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0


class Schedule(NamedTuple):
    """All that a run depends on."""

    seed: int
    ranks: int
    fronts: int
    sync_interval: int
    step_us: int
    actions: tuple[Action, ...]

    @property
    def ends_us(self) -> int:
        """When the last action has been done."""
        return self.actions[-1].at_us if self.actions else 0


class Draw:
    """Draws of one seed. Its methods cost a fifth of `randrange`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chance = self.random.random

    def below(self, limit: int) -> int:
        """0 to limit - 1."""
        return int(self.chance() * limit)

    def us(self, limit: int) -> int:
        """A time up to the limit, short ones more often."""
        return int(self.chance() ** 3 * limit) + 1
