"""All workers of one router: who they are, room in decode, prefill, releases, budgets."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field

from services.router.absence import POOL_RETRY_S, absence
from services.router.budget import ResumeBudget
from services.router.discovery import Share, Workers, follow
from services.router.generate import RoomNeed
from services.router.grants import POOL_WAIT_S, Rooms, TakenRoom
from services.router.held import Held
from services.router.peer import DecodePeer, Dial, PeerSettings
from services.router.prefill_client import PrefillPeer, PrefillPool, PrefillTransport
from services.router.releases import Releases
from services.router.session import Session
from services.router.standings import ANY, Standings, Stands, WorkerLink
from services.router.tally import Tally
from splitwave.core.deadline import Deadline
from splitwave.core.demands import Demands, RequestShape
from splitwave.core.envelope import Limit
from splitwave.core.errors import Reason, ServingError
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role

LEAVING_LOOK_EVERY_S = 1.0
"""How often a worker that is no longer listed is looked at: it goes when nothing runs there."""

PREFILL_LINGER_S = 60.0
"""How long a prefill worker that is no longer listed can be called, for answers and releases."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What a fleet is made of and what it may spend."""

    router_id: str
    """Unique for ever: ids of sessions begin with it."""
    prefill: Workers
    decode: Workers
    share: Share = field(default_factory=Share)
    resolve_every_s: float = 3.0
    silence_max_s: float = 35.0
    """See PeerSettings."""
    pool_wait_s: float = POOL_WAIT_S
    """How long a request waits for any worker of a role to be there."""
    resumes_per_s: float = 32.0
    resumes_burst: int = 512
    demands: Demands | None = None
    """What is demanded of groups; None: nothing, and nothing is asked."""


@dataclass(frozen=True, slots=True)
class Network:
    """How workers are reached: gRPC in production, memory in the simulator."""

    dial_decode: Dial
    connect_prefill: Callable[[str], PrefillTransport]
    connect_worker: Callable[[str], WorkerLink] | None = None
    """Needed where something is demanded of groups."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers that are there can serve."""

    model_len_max_tokens: int
    """Prompt and completion together."""
    output_max_tokens: int
    """Longest completion that any group of decode is certified for."""


class WorkerFleet:
    """The production `Fleet`. Use `running` to start and stop one."""

    def __init__(
        self, settings: FleetSettings, network: Network, chance: Callable[[], float]
    ) -> None:
        """`chance` returns numbers in [0, 1)."""
        self._settings = settings
        self._network = network
        self._decode: dict[str, DecodePeer] = {}
        self._prefill: dict[str, PrefillPeer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.tally = Tally()
        self.outside: Counter[Limit] = Counter()
        """Requests that were outside every envelope, by the limit that they would have left."""
        self.standings = self._make_standings()
        self.stands: Stands = self.standings or ANY
        self.rooms = Rooms(
            self.sessions, chance, settings.pool_wait_s, lambda: self.absence(Role.DECODE)
        )
        self.prefill_pool = PrefillPool(
            lambda: self._prefill.values(), self.stands, settings.pool_wait_s
        )
        self.releases = Releases(self.prefill_pool.by_worker)
        self._resumes = ResumeBudget(
            per_s=settings.resumes_per_s, burst=settings.resumes_burst, now_s=_now_s()
        )

    def _make_standings(self) -> Standings | None:
        demands, connect = self._settings.demands, self._network.connect_worker
        if demands is None:
            return None
        assert connect is not None
        return Standings(demands, self._settings.router_id, connect, self._standing_changed)

    def _standing_changed(self) -> None:
        """Groups may get work that might not, or the other way."""
        self.prefill_pool.changed()
        self.rooms.session_changed()

    def decode_peers(self) -> list[DecodePeer]:
        """Decode workers, those that leave included."""
        return list(self._decode.values())

    def prefill_peers(self) -> list[PrefillPeer]:
        """Prefill workers, those that leave included."""
        return list(self._prefill.values())

    def listed(self) -> dict[Role, int]:
        """Workers that this router is to serve, there or not."""
        return {
            Role.PREFILL: sum(not peer.leaving for peer in self._prefill.values()),
            Role.DECODE: sum(not peer.leaving for peer in self._decode.values()),
        }

    def sessions(self) -> list[Session]:
        """Sessions that may get new work if they are usable."""
        admitted = [
            peer
            for peer in self._decode.values()
            if not peer.leaving and self.stands.admits(peer.address)
        ]
        for peer in admitted:
            peer.session.envelope = self.stands.envelope(peer.address)
        return [peer.session for peer in admitted]

    # What a request needs.

    async def decode_room(self, need: RoomNeed) -> TakenRoom:
        """Take room in a decode group. Raises OVERLOADED or POOL_UNAVAILABLE."""
        return await self.rooms.take(need)

    def hold(self, handoff_id: str) -> Held:
        """Own a handoff until decode has accepted it; released in the background otherwise."""
        return Held(handoff_id, self.releases.start)

    async def prefill(
        self, call: PrefillCall, held: Held, deadline: Deadline, avoid: set[str]
    ) -> PrefillResult:
        """Place and compute a prompt; see `generate.Fleet`."""
        return await self.prefill_pool.prefill(call, held, deadline, avoid)

    def spend_resume(self) -> None:
        """Take one attempt from the budget, or raise RESUME_BUDGET_EXHAUSTED."""
        self._resumes.spend(_now_s())

    def refuse_outside(self, shape: RequestShape) -> None:
        """Raise OUTSIDE_ENVELOPE for a request that no group of a role is certified for."""
        decode = [session.envelope for session in self.sessions()]
        prefill = [
            self.stands.envelope(peer.address)
            for peer in self._prefill.values()
            if self.stands.admits(peer.address)
        ]
        outside = shape.outside_all(decode) or shape.in_prefill.outside_all(prefill)
        if outside is not None:
            self.outside[outside.limit] += 1
            raise ServingError(Reason.OUTSIDE_ENVELOPE, str(outside))

    def limits(self) -> Limits | None:
        """What can be served now; None while no decode worker is there."""
        limits = [
            (session.welcome.model_len_max_tokens, session.envelope)
            for session in self.sessions()
            if session.welcome is not None and session.over is None
        ]
        if not limits:
            return None
        outputs = [x.traffic.output_max_tokens if x else length for length, x in limits]
        return Limits(min(length for length, _ in limits), max(outputs))

    def completions_max(self, tokens: int) -> int | None:
        """How many completions of `tokens` each all decode workers together run while empty.

        None while one of them has not said: it may have room for any number.
        """
        most = [
            None if session.welcome is None else session.welcome.completions_max(tokens)
            for session in self.sessions()
        ]
        known = [count for count in most if count is not None]
        return sum(known) if known and len(known) == len(most) else None

    def usable(self) -> dict[Role, int]:
        """Workers that new work may go to."""
        prefill = [x for x in self._prefill.values() if self.stands.admits(x.address)]
        return {
            Role.PREFILL: sum(peer.usable for peer in prefill),
            Role.DECODE: sum(session.usable for session in self.sessions()),
        }

    def ready(self) -> bool:
        """True if a request could be served: both roles are there."""
        return all(self.usable().values())

    def absence(self, role: Role, retry_after_s: float = POOL_RETRY_S) -> ServingError:
        """The error of a request for which no worker of a role is there."""
        peers = self._decode if role is Role.DECODE else self._prefill
        return absence(role, peers.values(), self.stands, retry_after_s)

    # Membership.

    def list_decode(self, addresses: list[str]) -> None:
        """Serve exactly these decode workers; others finish what runs there and go."""
        for address in addresses:
            peer = self._decode.get(address)
            if peer is None or not self._runs(f"decode {address}"):  # It has left already.
                settings = PeerSettings(
                    router_id=self._settings.router_id,
                    silence_max_s=self._settings.silence_max_s,
                    tally=self.tally,
                )
                peer = DecodePeer(address, self._network.dial_decode, settings, self.rooms)
                self._decode[address] = peer
                self._spawn(f"decode {address}", peer.run())
                self._follow(Role.DECODE, address)
            if peer.leaving:
                peer.leaving = False
                self._end(f"leave decode {address}")
        for address, peer in self._decode.items():
            if address not in addresses and not peer.leaving:
                peer.leaving = True
                self._spawn(f"leave decode {address}", self._leave(address, peer))

    def list_prefill(self, addresses: list[str]) -> None:
        """Serve exactly these prefill workers; others answer what they were asked and go."""
        for address in addresses:
            peer = self._prefill.get(address)
            if peer is None:
                peer = PrefillPeer(address, self._network.connect_prefill(address))
                self._prefill[address] = peer
                watch = peer.watch(self._settings.router_id, self.prefill_pool)
                self._spawn(f"prefill {address}", watch)
                self._follow(Role.PREFILL, address)
            if peer.leaving:
                peer.leaving = False
                self._end(f"leave prefill {address}")
        for address, peer in self._prefill.items():
            if address not in addresses and not peer.leaving:
                peer.leaving = True
                self._spawn(f"leave prefill {address}", self._leave_prefill(address, peer))

    async def _leave_prefill(self, address: str, peer: PrefillPeer) -> None:
        """Cancelled if the worker is listed again before it has gone."""
        await asyncio.sleep(PREFILL_LINGER_S)
        while peer.calls:  # noqa: ASYNC110  # nothing says so
            # With the channel closed, gRPC would cancel the tasks of those that wait.
            await asyncio.sleep(LEAVING_LOOK_EVERY_S)
        del self._prefill[address]
        self._end(f"prefill {address}")
        self._end(f"standing of prefill {address}")
        await peer.transport.close()

    async def _leave(self, address: str, peer: DecodePeer) -> None:
        """Cancelled if the worker is listed again before it has gone."""
        while peer.session.running:  # noqa: ASYNC110  # nothing says so
            await asyncio.sleep(LEAVING_LOOK_EVERY_S)
        if self._decode.get(address) is peer:
            del self._decode[address]
            self._end(f"decode {address}")
            self._end(f"standing of decode {address}")

    def _follow(self, role: Role, address: str) -> None:
        """Follow how a worker's group stands, unless that is done already."""
        name = f"standing of {role} {address}"
        if self.standings is not None and not self._runs(name):
            self._spawn(name, self.standings.follow(role, address))

    def _runs(self, name: str) -> bool:
        task = self._tasks.get(name)
        return task is not None and not task.done()

    def _end(self, name: str) -> None:
        """Cancel a task, unless it has ended by itself."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    def _spawn(self, name: str, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s: our bug", task.get_name(), exc_info=task.exception())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["WorkerFleet"]:
        """Follow the workers until the block ends; then finish releases and let go of all."""
        settings = self._settings
        for role, workers, listed in (
            ("decode", settings.decode, self.list_decode),
            ("prefill", settings.prefill, self.list_prefill),
        ):
            self._spawn(
                f"follow {role}", follow(workers, settings.share, listed, settings.resolve_every_s)
            )
        try:
            yield self
        finally:
            await self._stop()

    async def _stop(self) -> None:
        sessions = [t for name, t in self._tasks.items() if name.startswith("decode ")]
        await _cancel(sessions)
        await self.releases.drained()
        await _cancel(list(self._tasks.values()))
        for peer in self._prefill.values():
            await peer.transport.close()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
