"""A peer whose process stands still is noticed in the time that the channel's options say."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc.aio
import pytest

from splitwave.wire.channel import CHANNEL_OPTIONS, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S

FASTER = 10
"""The options' times are divided by it, so that the test need not wait so long."""
SERVER = """
import asyncio, grpc, grpc.aio
from splitwave.wire.channel import SERVER_OPTIONS

async def speak(requests, context):
    await context.write(b"hello")
    await asyncio.sleep(3600)

async def main():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    method = grpc.stream_stream_rpc_method_handler(speak)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"S": method}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its pid and port."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def faster(name: str, value: int) -> tuple[str, int]:
    return name, value // FASTER if "keepalive_time" in name or "ping_timeout" in name else value


@pytest.mark.timeout(60)
async def test_a_process_that_stands_still_is_given_up_in_time(server: tuple[int, int]) -> None:
    pid, port = server
    options = [faster(name, value) for name, value in CHANNEL_OPTIONS]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/t.T/S")()
        assert await call.read() == b"hello"
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()

        with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
            async with asyncio.timeout(30.0):
                await call.read()

        told_s = (KEEPALIVE_S + KEEPALIVE_TIMEOUT_S) / FASTER
        assert time.monotonic() - began_s < told_s + 5.0
