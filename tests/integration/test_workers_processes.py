"""Workers as processes of their own: ready, stopped, killed, and started wrongly."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any  # the published stubs know neither these methods nor aio channels

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.integration.worker_stack import free_port

messages: Any = reflection_pb2
SERVING = health_pb2.HealthCheckResponse.SERVING
START_S = 30.0


@asynccontextmanager
async def started(
    service: str, *flags: str, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker's process; whatever is left of it is killed. The last of a repeated flag counts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{service}",
        "--engine=sim",
        "--drain-unready-s=0.2",
        "--allow-uncertified=true",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "SPLITWAVE_FAULTS": "", **variables},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_serving(address: str) -> None:
    """Wait for SERVING, as a supervisor does."""
    async with asyncio.timeout(START_S), grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == SERVING:
                return


async def listed_services(address: str) -> set[str]:
    """What reflection lists."""
    async with grpc.aio.insecure_channel(address) as channel:
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        stub = make_stub(channel)
        request = messages.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            return {x.name for x in answer.list_services_response.service}
    raise AssertionError("no answer")


async def exit_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Its exit code and what it logged."""
    async with asyncio.timeout(START_S):
        _, log = await process.communicate()
    assert process.returncode is not None
    return process.returncode, log.decode()


@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_a_worker_becomes_ready_and_stops_on_sigterm(service: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with started(service, f"--listen={address}", "--log-format=json") as process:
        await until_serving(address)
        own = f"splitwave.v1alpha1.{service.capitalize()}Service"
        assert {own, "splitwave.v1alpha1.WorkerService"} < await listed_services(address)
        process.send_signal(signal.SIGTERM)
        code, log = await exit_of(process)

        assert code == 0
        order = [log.index(f'"message": "{word}"') for word in ("ready", "draining", "stopped")]
        assert order == sorted(order)


async def test_a_second_signal_kills() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with started("decode", f"--listen={address}", "--drain-unready-s=60") as process:
        await until_serving(address)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert (await exit_of(process))[0] == -signal.SIGTERM


@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_a_taken_port_is_said_and_ends_the_process(service: str) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, started(service, f"--listen=127.0.0.1:{port}") as process:
        code, log = await exit_of(process)

        assert code == 1
        assert f"listen: cannot listen on 127.0.0.1:{port}" in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lease-margin-s=-1"], ["lease_margin_s", "-1.0", "flag --lease-margin-s"]),
        (["--lease-margin-s=99"], ["lease_margin_s", "below the engine's lease"]),
        (["--engine-settings=rank=2"], ["rank", "known are", "ranks"]),
        (["--engine-settings=ranks=0"], ["ranks", "at least 1"]),
        (["--engine=vllm"], ["model_path", "directory of a saved model"]),
    ],
)
async def test_bad_settings_end_the_process_with_the_field_and_the_fix(
    flags: list[str], words: list[str]
) -> None:
    async with started("prefill", *flags) as process:
        code, log = await exit_of(process)

        assert code == 2
        assert [word for word in words if word not in log] == []


async def test_metrics_are_served_beside_grpc() -> None:
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    async with started("decode", f"--listen={address}", f"--metrics-listen={metrics}"):
        await until_serving(address)
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://{metrics}/metrics") as answer,
        ):
            text = await answer.text()

        assert answer.status == 200
        assert 'splitwave_decode_seats_used{rank="0"} 0.0' in text


async def test_simulated_workers_import_no_vllm() -> None:
    program = (
        "import sys, services.prefill.main, services.decode.main, splitwave.engine.sim; "
        "print(sorted({'vllm', 'torch', 'transformers', 'nixl'} & set(sys.modules)))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(START_S):
        said, _ = await process.communicate()

    assert said == b"[]\n"
