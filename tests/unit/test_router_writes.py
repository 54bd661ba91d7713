"""What a router writes to a decode worker at once: a write costs the same whatever is in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from services.router.grants import LINGER_S
from services.router.peer import DecodePeer, PeerSettings, Received
from services.router.session import ACK_DELAY_S
from splitwave.core.session import (
    Accepted,
    Ack,
    AskGrant,
    CancelAsk,
    Grants,
    GroupLoad,
    Hello,
    ReturnGrants,
    RouterMessage,
    Welcome,
)
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.unit.test_router_session import WELCOME, Peer, Rooms

BATCHES = replace(WELCOME, takes_batches=True)
NEWS = Grants((), (), GroupLoad(1, 1, 0, False))


class Wire:
    """A connection that notes what is written when, and each write takes a millisecond."""

    def __init__(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self.writes: list[tuple[float, list[object]]] = []
        self._came: asyncio.Queue[Received] = asyncio.Queue()
        self._came.put_nowait(Received(0, lambda asked: welcome))

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None:
        await asyncio.sleep(0.001)
        self.writes.append((now_s(), [message for _, message in messages]))

    async def receive(self) -> Received | None:
        return await self._came.get()

    def say(self, number: int, message: object) -> None:
        """The worker says something."""
        self._came.put_nowait(Received(number, lambda asked: message))

    def said(self) -> list[list[object]]:
        """What was written since it was last asked, a list a write."""
        writes, self.writes = self.writes, []
        return [messages for _, messages in writes]


@contextlib.asynccontextmanager
async def connected(welcome: Welcome) -> AsyncIterator[tuple[DecodePeer, Wire]]:
    wire = Wire(welcome)

    @contextlib.asynccontextmanager
    async def dial(address: str) -> AsyncIterator[Wire]:
        yield wire

    peer = DecodePeer("d0:1", dial, PeerSettings(router_id="r"), Rooms())
    running = asyncio.create_task(peer.run())
    await asyncio.sleep(0.01)
    ((hello,),) = wire.said()
    assert isinstance(hello, Hello)
    assert hello.takes_batches
    try:
        yield peer, wire
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def ask(name: str) -> AskGrant:
    return AskGrant(name, 1, 1.0)


def test_what_is_ready_together_is_one_write() -> None:
    async def scenario() -> None:
        async with connected(BATCHES) as (peer, wire):
            for name in "abc":
                peer.session.post(ask(name))
            await asyncio.sleep(0.0005)  # The first write is under way.
            peer.session.post(ask("d"))
            peer.session.post(CancelAsk("a"))
            await asyncio.sleep(0.01)

            assert wire.said() == [[ask("a"), ask("b"), ask("c")], [ask("d"), CancelAsk("a")]]

    virtual_loop.run(scenario())


def test_a_worker_that_takes_no_batches_gets_one_message_a_write() -> None:
    async def scenario() -> None:
        async with connected(WELCOME) as (peer, wire):
            for name in "abc":
                peer.session.post(ask(name))
            await asyncio.sleep(0.01)

            assert wire.said() == [[ask("a")], [ask("b")], [ask("c")]]

    virtual_loop.run(scenario())


def test_what_nobody_waits_for_shares_the_next_write_or_goes_after_a_while() -> None:
    async def scenario() -> None:
        async with connected(BATCHES) as (peer, wire):
            peer.session.post(ReturnGrants(("g1",)), LINGER_S)
            await asyncio.sleep(LINGER_S / 2)
            assert wire.said() == []
            peer.session.post(ask("a"))
            await asyncio.sleep(0.005)
            assert wire.said() == [[ReturnGrants(("g1",)), ask("a")]]

            peer.session.post(ReturnGrants(("g2",)), LINGER_S)
            began_s = now_s()
            await asyncio.sleep(2 * LINGER_S)
            ((at_s, messages),) = wire.writes
            assert messages == [ReturnGrants(("g2",))]
            assert LINGER_S <= at_s - began_s < 1.5 * LINGER_S

    virtual_loop.run(scenario())


def test_an_acknowledgement_goes_along_with_the_next_write() -> None:
    async def scenario() -> None:
        async with connected(BATCHES) as (peer, wire):
            for number in (1, 2):
                wire.say(number, NEWS)
            await asyncio.sleep(0.01)
            assert wire.said() == []
            peer.session.post(ask("a"))
            await asyncio.sleep(0.01)
            assert wire.said() == [[ask("a"), Ack(2)]]
            await asyncio.sleep(2 * ACK_DELAY_S)
            assert wire.said() == [], "it was said already"

            wire.say(3, NEWS)
            await asyncio.sleep(ACK_DELAY_S / 2)
            assert wire.said() == []
            await asyncio.sleep(ACK_DELAY_S)
            assert wire.said() == [[Ack(3)]]

    virtual_loop.run(scenario())


def test_an_old_worker_is_acknowledged_by_a_message_of_its_own() -> None:
    async def scenario() -> None:
        async with connected(WELCOME) as (peer, wire):
            wire.say(1, NEWS)
            await asyncio.sleep(0.01)
            peer.session.post(ask("a"))
            await asyncio.sleep(2 * ACK_DELAY_S)

            assert wire.said() == [[ask("a")], [Ack(1)]]

    virtual_loop.run(scenario())


async def test_a_submission_that_was_taken_for_a_write_that_broke_is_sent_again() -> None:
    peer = Peer()
    peer.session.attach(BATCHES)
    attempt = peer.submit("a")
    (written,) = peer.session.take_outbox()
    peer.session.detach()
    peer.session.attach(replace(BATCHES, reattached=True, known=(("a", False),)))

    assert peer.session.take_outbox() == [written]
    peer.say(Accepted("a", 0, 0))
    await attempt.accepted()


@pytest.mark.parametrize("broken_s", [0.5 * ACK_DELAY_S, 2 * ACK_DELAY_S])
@pytest.mark.parametrize("quiet_s", [0.0, 0.9 * ACK_DELAY_S])
def test_a_break_leaves_acknowledgements_as_they_were(broken_s: float, quiet_s: float) -> None:
    async def scenario() -> None:
        peer = Peer()
        peer.session.attach(BATCHES)
        peer.say(NEWS)
        peer.session.detach()
        await asyncio.sleep(broken_s)
        peer.session.attach(replace(BATCHES, reattached=True))
        await asyncio.sleep(quiet_s)
        assert peer.sent() == [], "Hello has told what came before"

        peer.say(NEWS)
        await asyncio.sleep(0.75 * ACK_DELAY_S)
        assert peer.sent() == [], "what came after it is told a whole delay later"
        await asyncio.sleep(0.5 * ACK_DELAY_S)
        assert peer.sent() == [Ack(2)]

    virtual_loop.run(scenario())
