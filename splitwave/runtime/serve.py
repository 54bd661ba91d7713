"""Run one service from its first byte to its last. Every services/*/main.py ends here.

Start: the engine exists already (it forks processes, which must not inherit a gRPC
server); bind, add servicers, health and reflection; SERVING once the program is healthy.

Stop, on SIGTERM or SIGINT: NOT_SERVING, wait for clients to notice, refuse new work,
wait until nothing is outstanding or the grace is over, stop the server, close the
program. Closing the engine sooner would fail work that was promised its grace.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Metric

from splitwave.runtime.config import ProcessConfig
from splitwave.runtime.metrics import metrics_port
from splitwave.wire.channel import SERVER_OPTIONS

log = logging.getLogger(__name__)

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

HEALTH_S: Final = 0.1
"""How often health is asked of the program."""
STOP_S: Final = 1.0
"""What calls get to end by themselves once the drain is over."""


class Program(Protocol):
    """One service as `serve` runs it."""

    @property
    def service_names(self) -> Sequence[str]:
        """Full names of its gRPC services, for health and reflection."""

    def add_to(self, server: grpc.aio.Server, address: str) -> None:
        """Add its servicers; `address` is where others reach them."""

    async def run(self) -> None:
        """Work in the background, for ever. Raising Fatal ends the process."""

    def healthy(self) -> bool:
        """True while it can take work: started, alive, and making progress."""

    def refuse(self) -> None:
        """Take no new work from now on. Idempotent."""

    async def drained(self) -> None:
        """Return once nothing that was admitted is outstanding.

        Cancelled when the grace is over: then it ends what is left, with a status.
        """

    def outstanding(self) -> int:
        """How much of it is."""

    async def close(self) -> None:
        """Free everything, engines included. Idempotent."""

    async def collect(self) -> Iterable[Metric]:
        """Metrics, made now. It may wait for others, but only for a moment."""


class Fatal(Exception):
    """The program cannot go on; the message says why, for the log's last line."""

    exit_code = 1


class Uncertified(Fatal):
    """The group must not serve: it has no certificate that fits, or failed its self-check."""

    exit_code = 3


class EpochOver(Fatal):
    """The engine group has died. A new process can start it again, with a larger epoch."""


EXIT_EPOCH_OVER: Final = 75
"""Exit code then: sysexits.h calls it EX_TEMPFAIL. A supervisor starts the service again."""


class CannotListen(Exception):
    """The gRPC port is taken or not ours to take."""


async def serve(program: Program, config: ProcessConfig, stop: asyncio.Event) -> int:
    """Serve until `stop` is set, then drain. Returns the process's exit code."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_servicer = health.aio.HealthServicer()
    try:
        address = _assemble(server, health_servicer, program, config)
        async with metrics_port(config.metrics_listen, program.collect):
            await server.start()
            return await _serve_and_drain(
                _Served(program, config, server, health_servicer, address), stop
            )
    except OSError as error:
        log.error("metrics_listen: cannot listen on %s: %s", config.metrics_listen, error)
        return 1
    except CannotListen as error:
        log.error("%s", error)
        return 1
    finally:
        await server.stop(0)
        await program.close()


@dataclass(slots=True)
class _Served:
    """What a running service consists of."""

    program: Program
    config: ProcessConfig
    server: grpc.aio.Server
    health_servicer: health.aio.HealthServicer
    address: str
    _said: bool | None = None

    async def say(self, healthy: bool) -> None:
        """Set the health of every service and of the whole."""
        if healthy == self._said:
            return
        self._said = healthy
        status = SERVING if healthy else NOT_SERVING
        for name in ("", *self.program.service_names):
            await self.health_servicer.set(name, status)
        log.info("ready" if healthy else "not serving", extra={"address": self.address})

    async def follow_health(self) -> None:
        """Keep saying what the program says."""
        while True:
            await self.say(self.program.healthy())
            await asyncio.sleep(HEALTH_S)


def _assemble(
    server: grpc.aio.Server,
    health_servicer: health.aio.HealthServicer,
    program: Program,
    config: ProcessConfig,
) -> str:
    """Bind and add everything; return the address that others use."""
    host, _, wanted = config.listen.rpartition(":")
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError:
        port = 0
    if not port:
        raise CannotListen(
            f"listen: cannot listen on {config.listen}: port {wanted} is taken or not allowed; "
            "choose another, or 0 for a free one"
        )
    reached_at = socket.gethostname() if host in ("0.0.0.0", "[::]") else host
    address = config.advertise or f"{reached_at}:{port}"
    program.add_to(server, address)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (*program.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return address


async def _serve_and_drain(served: _Served, stop: asyncio.Event) -> int:
    running = asyncio.create_task(served.program.run(), name="program")
    following = asyncio.create_task(served.follow_health(), name="health")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    draining: asyncio.Task[object] | None = None
    tasks: list[asyncio.Task[object]] = [running, following, stopping]
    try:
        await _first_of(running, stopping)
        if not running.done():
            await _ended(following)
            draining = asyncio.create_task(_drain(served), name="drain")
            tasks.append(draining)
            await _first_of(running, draining)
        if running.done():
            return await _died(served, running)
        await served.server.stop(STOP_S)
        log.info("stopped")
        return 0
    finally:
        for task in tasks:
            await _ended(task)


async def _drain(served: _Served) -> None:
    program, config = served.program, served.config
    log.info("draining", extra={"outstanding": program.outstanding()})
    await served.say(False)
    await asyncio.sleep(config.drain_unready_s)
    program.refuse()
    try:
        await asyncio.wait_for(program.drained(), config.drain_grace_s)
    except TimeoutError:
        log.warning("the grace is over", extra={"outstanding": program.outstanding()})


async def _died(served: _Served, running: "asyncio.Task[None]") -> int:
    """Say why, let the calls learn it, and return the exit code."""
    error = running.exception()
    if isinstance(error, Fatal):
        log.error("%s", error)
    else:
        log.error("the program ended by itself", exc_info=error)
    await served.say(False)
    await served.server.stop(STOP_S)
    return EXIT_EPOCH_OVER if isinstance(error, EpochOver) else 1


async def _first_of(*tasks: "asyncio.Task[object]") -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _ended(task: "asyncio.Task[object]") -> None:
    """Cancel a task and wait for its end; how it ended does not matter any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def stop_on_signal() -> AsyncIterator[asyncio.Event]:
    """An event set by the first SIGTERM or SIGINT. A second one kills as usual."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
