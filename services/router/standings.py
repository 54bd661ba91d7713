"""How the groups stand: who may get work, within which envelope, and who is told to drain.

Each listed worker's WorkerService is asked what the group is certified for, and watched for how
it stands. Of the decertified groups of a pool so many are told to drain as the pool can spare,
the others to serve on (`splitwave.core.mode_guard.PoolGuard`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.router.backoff import Backoff
from splitwave.core.demands import Demands, RefusedGroup
from splitwave.core.envelope import Envelope
from splitwave.core.errors import ServingError
from splitwave.core.mode_guard import Action, PoolGuard, Standing
from splitwave.core.worker import Certification, Role, WorkerDescription

CALL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Stands(Protocol):
    """Who may get work."""

    def admits(self, address: str) -> bool:
        """True if the group behind an address may get work."""

    def why_not(self, address: str) -> str:
        """Why it gets none; empty if it may."""

    def envelope(self, address: str) -> Envelope | None:
        """What it is certified for; None if that is not known."""


class _Any:
    """Every group may, as in simulations of other things."""

    def admits(self, address: str) -> bool:
        return True

    def why_not(self, address: str) -> str:
        return ""

    def envelope(self, address: str) -> Envelope | None:
        return None


ANY: Stands = _Any()


class WorkerLink(Protocol):
    """One worker's WorkerService. Every method raises ServingError when it fails."""

    async def describe(self, timeout_s: float) -> WorkerDescription:
        """What the worker is."""

    def standings(self, router_id: str) -> AsyncIterator[tuple[int, Standing]]:
        """The group's epoch and how it stands, at once and then on change."""

    async def judge(self, epoch: int, action: Action, why: str) -> None:
        """Say what becomes of a decertified group."""

    async def close(self) -> None:
        """Drop the connection."""


@dataclass(slots=True)
class GroupStand:
    """One worker's group, as this router sees it."""

    role: Role
    certification: Certification | None = None
    """None until it has described itself."""
    standing: Standing | None = None

    def refused(self, demands: Demands) -> tuple[RefusedGroup, str] | None:
        """Why it gets no work; None if it may."""
        if self.certification is None or self.standing is None:
            return RefusedGroup.UNKNOWN, "it has not said how it stands"
        return demands.refuse(self.certification, self.standing)


class Standings:
    """All groups of one router."""

    def __init__(
        self,
        demands: Demands,
        router_id: str,
        connect: Callable[[str], WorkerLink],
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when a group may get work that might not, or the other way."""
        self.demands = demands
        self._router_id = router_id
        self._connect = connect
        self._changed = changed
        self._groups: dict[str, GroupStand] = {}
        share = demands.decertified_groups_max
        self.pools = {role: PoolGuard(share) for role in Role}
        self.judged: Counter[tuple[Role, Action]] = Counter()

    def admits(self, address: str) -> bool:
        """True if the group behind an address may get work."""
        group = self._groups.get(address)
        return group is not None and group.refused(self.demands) is None

    def why_not(self, address: str) -> str:
        """Why the group behind an address gets no work; empty if it may."""
        refused = self._groups.get(address, GroupStand(Role.DECODE)).refused(self.demands)
        return "" if refused is None else refused[1]

    def envelope(self, address: str) -> Envelope | None:
        """What the group behind an address is certified for; None if that is not known."""
        group = self._groups.get(address)
        return group.certification.envelope if group and group.certification else None

    def groups(self) -> Iterator[tuple[str, GroupStand]]:
        """Every group by its worker's address."""
        yield from self._groups.items()

    async def follow(self, role: Role, address: str) -> None:
        """Follow one worker until cancelled, through its restarts."""
        self._groups[address] = GroupStand(role)
        link, backoff = self._connect(address), Backoff()
        try:
            while True:
                try:
                    await self._watch(role, address, link, backoff)
                except ServingError as error:
                    _log.debug("%s: %r", address, error)
                except Exception:  # noqa: BLE001  # What one worker sends must not cost us it.
                    _log.exception("%s: what it sent could not be taken", address)
                await backoff.wait()
        finally:
            del self._groups[address]
            self.pools[role].forget(address, _now_s())
            await link.close()

    async def _watch(self, role: Role, address: str, link: WorkerLink, backoff: Backoff) -> None:
        described = await link.describe(CALL_TIMEOUT_S)
        async for epoch, standing in link.standings(self._router_id):
            if epoch != described.epoch:
                return  # Another life of the group: ask anew what it is.
            backoff.reset()
            if standing is Standing.DECERTIFIED and not described.certification.violations:
                described = await link.describe(CALL_TIMEOUT_S)  # Which step, and why.
            self._observe(address, described.certification, standing)
            await self._judge(role, address, link, epoch)

    def _observe(self, address: str, certification: Certification, standing: Standing) -> None:
        group = self._groups[address]
        admitted = self.admits(address)
        group.certification, group.standing = certification, standing
        if self.admits(address) == admitted:
            return
        if admitted:
            _log.warning("%s gets no work: %s", address, self.why_not(address))
        self._changed()

    async def _judge(self, role: Role, address: str, link: WorkerLink, epoch: int) -> None:
        standing = self._groups[address].standing
        assert standing is not None
        pool = self.pools[role]
        action = pool.observe(address, epoch, standing, _now_s())
        if action is None:
            return
        why = (
            f"{pool.out} of at most {pool.out_max} {role} groups out, as {self._router_id} sees it"
        )
        try:
            await link.judge(epoch, action, why)
        except ServingError:
            pool.untold(address)
            raise
        self.judged[role, action] += 1
        _log.warning("%s is told: %s (%s)", address, action, why)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
