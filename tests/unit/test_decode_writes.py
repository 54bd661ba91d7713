"""What a decode worker writes to a router at once."""

import asyncio
from collections.abc import Sequence

import pytest

from services.decode.session import LINGER_S, Connection, Numbered
from splitwave.core.errors import Reason, ServingError
from splitwave.core.session import (
    Accepted,
    Ack,
    Frame,
    Granted,
    Grants,
    GroupLoad,
    Refused,
    WorkerMessage,
)
from splitwave.wire.batch import BATCH_MESSAGES_MAX
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.unit.test_router_session import WELCOME

LOAD = GroupLoad(1, 1, 0, False)
ACCEPTED = Accepted("a", 0, 0)
PUSHED = Grants((Granted("g", 0, 1, 2.0),), (), LOAD)
FRAME = Frame(step=1, slots=[0], offsets=[0], token_counts=[1], token_ids=[5])
ERROR = ServingError(Reason.OVERLOADED, "full")


class Wire:
    """A connection of a worker, with what was written and when, behind Welcome."""

    def __init__(self, *, batches: bool) -> None:
        self.connection = Connection(WELCOME, [], batches=batches)
        self.writes: list[tuple[float, list[Numbered]]] = []
        self._writing = asyncio.create_task(self.connection.write_all(self._write))

    async def _write(self, messages: Sequence[Numbered]) -> None:
        self.writes.append((now_s(), list(messages)))

    async def welcomed(self) -> None:
        await asyncio.sleep(0.001)
        assert self.said() == [[(0, WELCOME)]]

    def said(self) -> list[list[Numbered]]:
        """What was written since it was last asked, a list a write."""
        writes, self.writes = self.writes, []
        return [messages for _, messages in writes]

    async def close(self) -> None:
        self.connection.close()
        await self._writing


def test_what_is_ready_together_is_one_write_with_the_acknowledgement() -> None:
    async def scenario() -> None:
        wire = Wire(batches=True)
        await wire.welcomed()
        wire.connection.push(1, ACCEPTED)
        wire.connection.push(2, PUSHED)
        wire.connection.push(3, FRAME)
        wire.connection.acknowledge(7)
        await asyncio.sleep(0.001)

        assert wire.said() == [[(1, ACCEPTED), (2, PUSHED), (3, FRAME), (0, Ack(7))]]
        await wire.close()

    virtual_loop.run(scenario())


def test_a_router_that_takes_no_batches_gets_one_message_a_write() -> None:
    async def scenario() -> None:
        wire = Wire(batches=False)
        await wire.welcomed()
        wire.connection.push(1, ACCEPTED)
        wire.connection.push(2, FRAME)
        wire.connection.acknowledge(7)
        await asyncio.sleep(0.001)

        assert wire.said() == [[(1, ACCEPTED)], [(2, FRAME)], [(0, Ack(7))]]
        await wire.close()

    virtual_loop.run(scenario())


AWAITED: list[WorkerMessage] = [
    FRAME,
    Refused("a", ERROR),
    Grants((Granted("g", 0, 1, 2.0, "ask"),), (), LOAD),
    Grants((), (("ask", ERROR),), LOAD),
]


@pytest.mark.parametrize("message", AWAITED, ids=["tokens", "refused", "asked for", "ask refused"])
def test_what_somebody_waits_for_is_written_at_once(message: WorkerMessage) -> None:
    async def scenario() -> None:
        wire = Wire(batches=True)
        await wire.welcomed()
        wire.connection.push(1, message)
        await asyncio.sleep(LINGER_S / 10)

        assert wire.said() == [[(1, message)]]
        await wire.close()

    virtual_loop.run(scenario())


@pytest.mark.parametrize("message", [ACCEPTED, PUSHED], ids=["accepted", "pushed room"])
def test_what_nobody_waits_for_is_written_after_a_while(message: WorkerMessage) -> None:
    async def scenario() -> None:
        wire = Wire(batches=True)
        await wire.welcomed()
        wire.connection.push(1, message)
        began_s = now_s()
        await asyncio.sleep(2 * LINGER_S)

        ((at_s, messages),) = wire.writes
        assert messages == [(1, message)]
        assert at_s - began_s == pytest.approx(LINGER_S, abs=LINGER_S / 10)
        await wire.close()

    virtual_loop.run(scenario())


def test_a_connection_that_is_closed_writes_no_more_than_what_is_under_way() -> None:
    async def scenario() -> None:
        replay = [(number, FRAME) for number in range(1, 10 * BATCH_MESSAGES_MAX)]
        connection = Connection(WELCOME, list(replay), batches=True)
        written: list[Numbered] = []
        go_on = asyncio.Event()

        async def write(messages: Sequence[Numbered]) -> None:
            written.extend(messages)
            if len(written) > 1:  # Behind Welcome: the router reads slowly.
                await go_on.wait()

        writing = asyncio.create_task(connection.write_all(write))
        await asyncio.sleep(0.001)
        under_way = len(written)
        connection.close()
        go_on.set()
        await writing

        assert len(written) == under_way
        assert 1 < under_way <= 1 + BATCH_MESSAGES_MAX

    virtual_loop.run(scenario())


def test_what_is_more_than_a_write_holds_is_written_in_order() -> None:
    async def scenario() -> None:
        wire = Wire(batches=True)
        await wire.welcomed()
        pushed = [(number, FRAME) for number in range(1, 2 * BATCH_MESSAGES_MAX + 2)]
        for number, message in pushed:
            wire.connection.push(number, message)
        wire.connection.acknowledge(7)
        await asyncio.sleep(0.001)

        writes = wire.said()
        assert [each for write in writes for each in write if each[0]] == pushed
        assert [each for write in writes for each in write if not each[0]] == [(0, Ack(7))]
        assert len(writes) == 3
        await wire.close()

    virtual_loop.run(scenario())
