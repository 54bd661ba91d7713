"""W2: the ranks of a step agree on what they step in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.wave.words import Violation

if TYPE_CHECKING:
    from tests.sim.wave.rank import Rank
    from tests.sim.wave.world import World


class Agreement:
    """Watches the steps and waves of ranks that step together.

    All are at the same step, or they would vote apart. None is more than one wave
    behind, once it has stepped in the group's wave; new ones start at wave 0. That is the
    latest wave that any rank has stepped in, even one that is replaced by now: a coordinator
    that is stopped knows an earlier one, and so does who asks it. Until the coordinator knows
    of a new group that group has no wave, whatever its front-ends make it step in. Nobody
    stays behind: not for longer than the bound in one wave, nor for many waves, since each
    start mends at least one rank.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        self.uneven_since_us: int | None = None
        self.uneven_waves = 0
        self.latest = 0

    def restarted(self) -> None:
        """All ranks are new."""
        self.latest = 0

    def check(self, ranks: Sequence["Rank"]) -> None:
        """Look at the ranks of one step, before they vote."""
        step = ranks[0].step
        top = ranks[0].wave
        for rank in ranks:
            if rank.step != step:
                raise Violation(f"W2: ranks vote apart, at steps {[r.step for r in ranks]}")
            if rank.wave != top:
                self.uneven(ranks)
                return
        self.uneven_waves = 0
        self.uneven_since_us = None
        if self.leads(top):
            for rank in ranks:
                rank.fresh = False

    def leads(self, top: int) -> bool:
        """Note a wave that is stepped in; true if it is the group's."""
        core = self.world.host.core
        is_known = core.epoch == self.world.group.epoch
        yes = is_known and top >= core.wave and top >= self.latest
        self.latest = max(self.latest, top)
        return yes

    def uneven(self, ranks: Sequence["Rank"]) -> None:
        """Some rank is behind: by how much, and for how long?"""
        world = self.world
        waves = [rank.wave for rank in ranks]
        top = max(waves)
        leads = self.leads(top)
        for rank in ranks:
            if rank.wave == top and leads:
                rank.fresh = False
            elif rank.wave < top - 1 and not rank.fresh:
                raise Violation(f"W2: ranks step in waves {waves}")
        if ranks[0].step == 1 or self.uneven_since_us is None:
            self.uneven_since_us = world.now_us
            self.uneven_waves = self.uneven_waves + 1 if world.is_calm else 0
        elif world.is_late(self.uneven_since_us):
            raise Violation(f"W2: ranks stay in waves {waves}")
        if self.uneven_waves > 2 * len(ranks):
            raise Violation(f"W2: ranks never agree on a wave: {waves}")
