"""What our channel options promise of the way to a peer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker
from tests.integration.worker_stack import stack

LATE_S = 0.5
"""Longer than a first backoff: a host with more to do than cores answers so late."""


@contextlib.asynccontextmanager
async def late(address: str) -> AsyncIterator[str]:
    """A way to `address` whose connections come to life late."""
    host, _, port = address.rpartition(":")
    pipes: list[asyncio.Task[None]] = []
    ends: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        await asyncio.sleep(LATE_S)
        there, back = await asyncio.open_connection(host, int(port))
        ends.append(back)
        ways = ((reader, back), (there, writer))
        pipes.extend(asyncio.create_task(pass_on(*way)) for way in ways)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for pipe in pipes:
            pipe.cancel()
        for end in ends:
            end.close()
        closing = (end.wait_closed() for end in ends)
        await asyncio.gather(*pipes, *closing, return_exceptions=True)


async def test_a_peer_that_answers_late_is_waited_for() -> None:
    async with (
        stack() as workers,
        late(workers.decode.address) as address,
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        assert (await describe_worker(channel, 5.0)).ranks == 2
