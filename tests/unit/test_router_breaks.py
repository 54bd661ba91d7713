"""What a router makes of a connection to a decode worker that breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.router.first_end import STATUS_WAIT_S
from services.router.peer import DecodePeer, PeerSettings, Received
from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import Ack, AskGrant, Hello, Pulled, RouterMessage
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.unit.test_router_session import WELCOME, Peer, Rooms, ended, frame

ENDED = ServingError(Reason.WORKER_LOST, "the call has ended")
DECERTIFIED = ServingError(Reason.GROUP_DECERTIFIED, "a step outside its mode")


@dataclass
class Wire:
    """A connection that says Welcome; then the call ends, whose status is told later or never."""

    status: ServingError | None
    told_after_s: float = 0.0
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    _welcomed: bool = False

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None:
        if self.ends.is_set():
            raise ENDED

    async def receive(self) -> Received | None:
        if not self._welcomed:
            self._welcomed = True
            return Received(0, lambda asked: WELCOME)
        await self.ends.wait()
        if self.status is None:
            await asyncio.sleep(3600.0)
        await asyncio.sleep(self.told_after_s)
        assert self.status is not None
        raise self.status


@dataclass
class World:
    """A router's peer over one wire; leaving it takes a while, and nobody answers again."""

    wire: Wire
    leaving_s: float = 0.0

    def __post_init__(self) -> None:
        self.dials = 0
        self.peer = DecodePeer("d0:1", self._dial, PeerSettings(router_id="r"), Rooms())
        self.session = self.peer.session

    @contextlib.asynccontextmanager
    async def _dial(self, address: str) -> AsyncIterator[Wire]:
        self.dials += 1
        if self.dials > 1:
            raise ServingError(Reason.WORKER_LOST, "no answer")
        try:
            yield self.wire
        finally:
            await asyncio.sleep(self.leaving_s)

    def write(self) -> None:
        """Something is written, which meets the end of the call."""
        self.session.post(AskGrant("a", 1, 1.0))


def play(world: Callable[[], World], scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        played = world()
        running = asyncio.create_task(played.peer.run())
        await asyncio.sleep(0.01)
        assert played.session.usable
        try:
            await scenario(played)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.5 * STATUS_WAIT_S])
def test_why_a_call_ended_is_told_also_where_a_write_meets_its_end(after_s: float) -> None:
    async def scenario(world: World) -> None:
        world.wire.ends.set()
        world.write()
        await asyncio.sleep(2 * STATUS_WAIT_S)

        assert world.session.over is not None
        assert world.session.over.reason is Reason.GROUP_DECERTIFIED

    play(lambda: World(Wire(DECERTIFIED, after_s)), scenario)


def test_a_status_that_does_not_come_is_not_waited_for_long() -> None:
    async def scenario(world: World) -> None:
        world.wire.ends.set()
        world.write()
        await asyncio.sleep(WELCOME.reattach_s + 3 * STATUS_WAIT_S)

        assert world.dials > 1, "it was called again"
        assert world.session.over is not None
        assert world.session.over.reason is Reason.WORKER_LOST

    play(lambda: World(Wire(None)), scenario)


@pytest.mark.parametrize("by_write", [True, False], ids=["a write", "a read"])
def test_nothing_new_goes_to_a_worker_that_is_asked_whether_it_lives(*, by_write: bool) -> None:
    async def scenario(world: World) -> None:
        world.wire.ends.set()
        broke_at_s = now_s()
        if by_write:
            world.write()
        await asyncio.sleep(0.001)

        assert not world.session.usable
        assert world.dials == 1
        while world.session.over is None:  # noqa: ASYNC110  # nothing says so
            await asyncio.sleep(0.01)
        assert now_s() - broke_at_s == pytest.approx(WELCOME.reattach_s, abs=0.1)

    status = None if by_write else ENDED
    play(lambda: World(Wire(status), leaving_s=0.5), scenario)


async def test_an_attempt_that_fails_has_cost_its_handoff_all_the_same() -> None:
    peer = Peer()
    (ending, _), (lost, _) = peer.accept("a", 0), peer.accept("b", 1)
    peer.say(replace(frame((1, 0, [1])), pulled=[Pulled(1, 512, 0.5)]))

    late = ServingError(Reason.HANDOFF_EXPIRED, "too late")
    failed = replace(ended(0, "a"), finish_reason=None, error=late, handoff_bytes=256)
    peer.say(replace(frame(), ended=[failed]))
    peer.session.end(ServingError(Reason.WORKER_LOST, "killed"))

    assert (ending.handoff_bytes, lost.handoff_bytes, lost.handoff_s) == (256, 512, 0.5)
