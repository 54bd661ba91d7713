"""What a router makes of workers that break the contract: an error each, and it goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from services.router.backoff import DISTRUST_S, FIRST_S, Backoff
from services.router.discovery import Share, Workers, follow
from services.router.peer import DecodePeer, Gone, PeerSettings, Received
from services.router.prefill_client import PrefillPeer, PrefillPool
from services.router.session import Session
from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import Accepted, Ack, Hello, ReturnGrants, RouterMessage, Welcome
from splitwave.core.worker import Role, WorkerDescription, WorkerLoad
from tests.contract.golden_messages import DESCRIPTION as DECODE_DESCRIPTION
from tests.sim import virtual_loop
from tests.unit.test_router_session import WELCOME, Peer, Rooms

DESCRIPTION = replace(DECODE_DESCRIPTION, role=Role.PREFILL)


class Wire:
    """A connection over which a worker says Welcome, and then one thing."""

    def __init__(self, welcome: Welcome, then: object) -> None:
        self._said = [(0, welcome), (1, then)]

    def end_after_welcome(self) -> None:
        """Say nothing but Welcome."""
        del self._said[1:]

    async def send(self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]) -> None: ...

    async def receive(self) -> Received | None:
        if not self._said:
            await asyncio.sleep(3600.0)
        number, message = self._said.pop(0)
        if isinstance(message, Exception):
            raise message
        return Received(number, lambda asked: message)


@pytest.mark.parametrize(
    ("welcome", "then"),
    [
        (replace(WELCOME, received_number=99), None),
        (WELCOME, "no message of a worker at all"),
        (WELCOME, ValueError("a field that cannot be read")),
    ],
    ids=["acknowledges what was never sent", "sends nonsense", "cannot be read"],
)
def test_a_decode_worker_that_breaks_the_contract_gets_a_new_session(
    welcome: Welcome, then: object
) -> None:
    async def scenario() -> None:
        wires = [Wire(welcome, then), Wire(WELCOME, Accepted("nobody", 0, 0))]

        @contextlib.asynccontextmanager
        async def dial(address: str) -> AsyncIterator[Wire]:
            yield wires.pop(0) if wires else Wire(WELCOME, ServingError(Reason.WORKER_LOST, ""))

        peer = DecodePeer("d0:1", dial, PeerSettings(router_id="r"), Rooms())
        running = asyncio.create_task(peer.run())
        first = peer.session
        await asyncio.sleep(10.0)

        assert first.over is not None
        assert not wires, "it was called again, and again"
        assert not running.done()
        running.cancel()

    virtual_loop.run(scenario())


@pytest.mark.parametrize(
    ("end", "after_s"),
    [
        (ServingError(Reason.WORKER_LOST, "the connection broke"), 2.0),
        (ServingError(Reason.EPOCH_MISMATCH, "the engine group is gone"), 0.0),
        (Gone("nobody listens"), 0.0),
    ],
    ids=["it may come back", "the worker says that its group is gone", "its process has ended"],
)
def test_a_session_that_cannot_be_gone_on_with_ends_at_once(
    end: ServingError, after_s: float
) -> None:
    async def scenario() -> None:
        wires = [Wire(replace(WELCOME, reattach_s=2.0), end)]

        @contextlib.asynccontextmanager
        async def dial(address: str) -> AsyncIterator[Wire]:
            if not wires:
                raise ServingError(Reason.WORKER_LOST, "no answer")
            yield wires.pop()

        peer = DecodePeer("d0:1", dial, PeerSettings(router_id="r"), Rooms())
        running, session = asyncio.create_task(peer.run()), peer.session
        began_s = asyncio.get_running_loop().time()
        while session.over is None:  # noqa: ASYNC110  # nothing says so
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(after_s, abs=0.1)
        assert session.over.reason is Reason.WORKER_LOST
        running.cancel()

    virtual_loop.run(scenario())


def dials_of(then: object) -> tuple[int, int]:
    """Calls in a minute of a decode worker that welcomes and then says that: first 30 s, rest."""
    at_s: list[float] = []

    @contextlib.asynccontextmanager
    async def dial(address: str) -> AsyncIterator[Wire]:
        at_s.append(asyncio.get_running_loop().time())
        yield Wire(WELCOME, then)

    async def scenario() -> None:
        peer = DecodePeer("d0:1", dial, PeerSettings(router_id="r"), Rooms())
        running = asyncio.create_task(peer.run())
        await asyncio.sleep(60.0)
        running.cancel()

    virtual_loop.run(scenario())
    early = sum(x < 30.0 for x in at_s)
    return early, len(at_s) - early


@pytest.mark.parametrize(
    "then",
    [
        ValueError("a field that cannot be read"),
        Accepted("nobody", 0, 0),
        ServingError(Reason.INTERNAL, "frame.slots: one came twice: a worker broke the contract"),
    ],
    ids=["cannot be read", "about nothing", "broken frame"],
)
def test_a_decode_worker_that_only_its_welcome_speaks_for_is_called_ever_more_rarely(
    then: object, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = dials_of(then)

    assert early < 25
    assert 10 < late < 20
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == isinstance(then, ValueError), "the rest say it in a line"
    assert len(caplog.records) >= late, "each is told"


def test_a_decode_worker_whose_connections_merely_break_is_called_again_at_once() -> None:
    early, late = dials_of(ServingError(Reason.WORKER_LOST, "connection reset"))

    assert min(early, late) > 300


def test_trust_comes_back_some_time_after_the_last_offence() -> None:
    async def scenario() -> None:
        backoff = Backoff()
        waits_s = []
        for _ in range(3):
            backoff.distrust()
            backoff.reset()
            waits_s.append(await waited(backoff))
        await asyncio.sleep(DISTRUST_S)
        backoff.reset()

        assert waits_s == pytest.approx([FIRST_S, 2 * FIRST_S, 4 * FIRST_S])
        assert await waited(backoff) == pytest.approx(FIRST_S)

    virtual_loop.run(scenario())


async def waited(backoff: Backoff) -> float:
    began_s = asyncio.get_running_loop().time()
    await backoff.wait()
    return asyncio.get_running_loop().time() - began_s


def test_a_session_that_is_over_is_replaced_though_its_worker_reads_nothing() -> None:
    async def scenario() -> None:
        class Full(Wire):
            async def send(
                self, messages: Sequence[tuple[int, RouterMessage | Hello | Ack]]
            ) -> None:
                if any(number for number, _ in messages):
                    await asyncio.sleep(3600.0)  # Flow control: the worker's process hangs.

        @contextlib.asynccontextmanager
        async def dial(address: str) -> AsyncIterator[Wire]:
            wire = Full(WELCOME, None)
            wire.end_after_welcome()
            yield wire

        peer = DecodePeer("d0:1", dial, PeerSettings(router_id="r", silence_max_s=20.0), Rooms())
        running = asyncio.create_task(peer.run())
        await asyncio.sleep(1.0)
        first = peer.session
        while first.over is None:
            first.post(ReturnGrants(()))
        await asyncio.sleep(10.0)

        assert peer.session is not first
        assert peer.session.usable
        running.cancel()

    virtual_loop.run(scenario())


def test_a_peer_that_is_stopped_as_its_connection_breaks_stops() -> None:
    async def scenario() -> None:
        broke = asyncio.Event()

        class Breaking(Wire):
            async def receive(self) -> Received | None:
                received = await super().receive() if self._said else None
                if received is not None and received.number == 0:
                    return received
                await broke.wait()
                raise ServingError(Reason.WORKER_LOST, "broke")

        @contextlib.asynccontextmanager
        async def dial(address: str) -> AsyncIterator[Wire]:
            yield Breaking(WELCOME, None)

        running = asyncio.create_task(
            DecodePeer("d0:1", dial, PeerSettings(router_id="r"), Rooms()).run()
        )
        await asyncio.sleep(1.0)
        broke.set()
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(5.0)

        assert running.cancelled(), "the router's own stop would wait for ever"

    virtual_loop.run(scenario())


def test_a_prefill_worker_that_breaks_the_contract_is_asked_again() -> None:
    class Transport:
        asked = 0

        async def describe(self, timeout_s: float) -> WorkerDescription:
            self.asked += 1
            raise ValueError("a field that cannot be read")

        def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
            raise AssertionError

    async def scenario() -> None:
        transport = Transport()
        peer = PrefillPeer("p0:1", transport)  # type: ignore[arg-type]  # the rest is not reached
        watching = asyncio.create_task(peer.watch("r", PrefillPool(lambda: ())))
        await asyncio.sleep(10.0)

        assert transport.asked > 3
        assert not watching.done()
        watching.cancel()

    virtual_loop.run(scenario())


def test_a_prefill_worker_whose_watch_cannot_be_read_is_asked_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Transport:
        asked = 0

        async def describe(self, timeout_s: float) -> WorkerDescription:
            self.asked += 1
            return DESCRIPTION

        async def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
            yield DESCRIPTION.epoch, DESCRIPTION.load
            raise ValueError("a field that cannot be read")

    async def scenario() -> None:
        transport = Transport()
        peer = PrefillPeer("p0:1", transport)  # type: ignore[arg-type]  # the rest is not reached
        watching = asyncio.create_task(peer.watch("r", PrefillPool(lambda: ())))
        await asyncio.sleep(60.0)
        watching.cancel()

        assert 20 < transport.asked < 45

    virtual_loop.run(scenario())
    assert sum(bool(record.exc_info) for record in caplog.records) == 1


async def test_a_slot_in_which_an_attempt_runs_cannot_be_given_to_another() -> None:
    peer = Peer()
    peer.accept("a", 0)
    peer.submit("b")

    with pytest.raises(ServingError, match="slot 0"):
        peer.say(Accepted("b", 0, 0))


async def test_an_attempt_whose_answer_broke_the_contract_ends_with_its_session() -> None:
    peer = Peer()
    peer.accept("a", 0)
    second = peer.submit("b")
    with pytest.raises(ServingError, match="slot 0") as broken:
        peer.say(Accepted("b", 0, 0))
    session: Session = peer.session
    session.end(broken.value)

    with pytest.raises(ServingError):
        await second.accepted()
    assert session.running == 0


async def test_a_name_that_cannot_be_looked_up_leaves_what_was_known() -> None:
    listed: list[list[str]] = []
    name = Workers(f"dns:{'a' * 70}.test:1,127.0.0.1:2")
    following = asyncio.create_task(follow(name, Share(), listed.append, 0.01))
    await asyncio.sleep(0.1)

    assert not following.done()
    assert listed == [[]]
    following.cancel()
