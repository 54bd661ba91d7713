"""What a client hears when a decode group dies: soon if its stream has begun, else if it must."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.router.generate import RoomNeed
from services.router.grants import POOL_WAIT_S
from services.router.peer import Gone
from services.router.transport import dial_decode, nobody_listens
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.session import Hello
from splitwave.engine.sim import RankDeath, SimFaults
from splitwave.wire.client import Ask, generate
from tests.integration.router_stack import Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, free_port

TOLD_WITHIN_S = 2.0
REATTACH_S = 2.0
"""As in production: what a broken connection is given to come back."""
ENDLESS = Sampling(max_tokens=3000, temperature=0.0, ignore_eos=True)
DIES = SimFaults(death=RankDeath(rank=0, at_step=40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def doomed(model: Model) -> AsyncIterator[RouterStack]:
    """A stack whose only decode group dies some steps into its first stream."""
    decode = replace(DECODE, step_fixed_s=0.02, faults=DIES)
    async with router_stack(model, decode=decode, reattach_s=REATTACH_S) as stack:
        yield stack


async def stream(stack: RouterStack, request_id: str) -> tuple[int, float, ServingError | None]:
    """Tokens that came, how long the client stood without one at the end, and the error."""
    tokens, last_s, loop = 0, 0.0, asyncio.get_running_loop()
    ask = Ask(prompt="Hi there", sampling=ENDLESS, request_id=request_id)
    try:
        async for answer in generate(stack.channel, ask, timeout_s=30.0):
            tokens += len(answer.token_ids)
            last_s = loop.time()
    except ServingError as error:
        return tokens, loop.time() - last_s, error
    return tokens, 0.0, None


async def test_a_stream_that_has_begun_is_told_within_two_seconds(doomed: RouterStack) -> None:
    streams = [stream(doomed, f"r{i}") for i in range(4)]

    for tokens, stood_s, error in await asyncio.gather(*streams):
        assert tokens > 1
        assert error is not None
        assert error.reason is Reason.POOL_UNAVAILABLE
        assert stood_s <= TOLD_WITHIN_S


async def test_a_request_that_comes_later_is_told_within_two_seconds(doomed: RouterStack) -> None:
    _, _, error = await stream(doomed, "first")
    assert error is not None

    began_s = asyncio.get_running_loop().time()
    tokens, _, error = await stream(doomed, "late")
    took_s = asyncio.get_running_loop().time() - began_s

    assert tokens == 0
    assert error is not None
    assert error.reason is Reason.POOL_UNAVAILABLE
    assert error.retry_after_s
    assert took_s <= TOLD_WITHIN_S


async def test_a_request_waits_for_a_worker_to_come_for_as_long_as_is_set(
    doomed: RouterStack,
) -> None:
    _, _, error = await stream(doomed, "first")
    assert error is not None
    doomed.door.fleet.rooms.pool_wait_s = 30.0

    deadline = Deadline(asyncio.get_running_loop().time() + 30.0)
    need = RoomNeed(tokens=20, waits_until=deadline, keep_until=deadline)
    late = asyncio.ensure_future(doomed.door.fleet.decode_room(need))
    done, _ = await asyncio.wait({late}, timeout=3 * POOL_WAIT_S)
    late.cancel()

    assert not done, "it was shed, though a worker may come"


async def test_an_address_at_which_nobody_listens_is_known() -> None:
    port = free_port()
    assert await nobody_listens(f"127.0.0.1:{port}")
    assert not await nobody_listens("no such host:1")
    assert not await nobody_listens("127.0.0.1:no port")

    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port):
        assert not await nobody_listens(f"127.0.0.1:{port}")
        assert not await nobody_listens(f"localhost:{port}"), "one of its addresses answers"


async def test_a_session_with_a_process_that_has_ended_is_gone_one_that_broke_is_not() -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with pytest.raises(Gone):
        await _hello(address)

    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port):
        with pytest.raises(ServingError) as broke:
            await _hello(address)
    assert broke.value.reason is Reason.WORKER_LOST
    assert not isinstance(broke.value, Gone)


async def _hello(address: str) -> None:
    async with dial_decode(address) as connection:
        await connection.send([(0, Hello(router_id="r", session_id="s"))])
        await connection.receive()
