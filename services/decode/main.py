"""Start a decode worker: engines first, since they are forked, then the server."""

import asyncio
import logging
import os
from collections.abc import Sequence

import grpc.aio

from services.decode.config import DecodeConfig
from services.decode.peers import GrpcPeers
from services.decode.servicer import SERVICE_NAMES, add_to
from services.decode.worker import DecodeWorker
from services.worker.group_guard import Decertified
from services.worker.start import StartedGroup, check_engine_settings, start_certified
from splitwave.core.worker import Role
from splitwave.engine.launch import last_words
from splitwave.engine.port import EngineDied
from splitwave.runtime import process
from splitwave.runtime.again import start_over
from splitwave.runtime.serve import EpochOver, serve
from splitwave.runtime.tracing import Tracing
from splitwave.runtime.tracing_export import tracing
from splitwave.runtime.worker import default_worker_id

log = logging.getLogger(__name__)

DROP_FENCE = "drop_fence"
"""In SPLITWAVE_FAULTS: show tokens without confirmation, to see that the fence is needed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says and return its exit code."""
    return process.main(DecodeConfig, arguments, run, check_engine_settings)


def run(config: DecodeConfig) -> int:
    """Run a worker until a signal or its engines end it, and again if those have died.

    No thread may be running yet.
    """
    code = process.run_until_stopped(config, lambda stop: _run(config, stop))
    return start_over(code, config.restarts_max)


async def _run(config: DecodeConfig, stop: asyncio.Event) -> int:
    started = await process.unless_stopped(start_certified(config, Role.DECODE), stop)
    if started is None:
        return 0
    try:
        async with tracing(config, config.worker_id or default_worker_id("decode")) as traces:
            return await serve(_program(started, config, traces), config, stop)
    finally:
        await started.engine.close()


def _program(started: StartedGroup, config: DecodeConfig, traces: Tracing) -> "DecodeProgram":
    peers = GrpcPeers(
        confirm_timeout_s=config.confirm_timeout_s,
        release_timeout_s=config.release_timeout_s,
    )
    worker = DecodeWorker(started.engine, peers, config, traces=traces)
    worker.guard.certify(started.certification)
    if DROP_FENCE in os.environ.get("SPLITWAVE_FAULTS", "").split(","):
        log.warning("SPLITWAVE_FAULTS: tokens are shown without confirmation")
        worker.decoding.is_fenced = False
    return DecodeProgram(worker, peers)


class DecodeProgram:
    """A decode worker as `serve` runs it."""

    service_names = SERVICE_NAMES

    def __init__(self, worker: DecodeWorker, peers: GrpcPeers) -> None:
        self.worker = worker
        self.peers = peers
        self.healthy = worker.healthy
        self.refuse = worker.refuse
        self.drained = worker.drained
        self.outstanding = worker.outstanding
        self.collect = worker.collect

    def add_to(self, server: grpc.aio.Server, address: str) -> None:
        """Add its servicers; nobody needs its address from it."""
        add_to(server, self.worker)

    async def run(self) -> None:
        """Drive the worker. Raises EpochOver with the engine's last words, or the guard's."""
        try:
            await self.worker.run()
        except EngineDied as died:
            raise EpochOver(last_words(died)) from died
        except Decertified as over:
            raise EpochOver(str(over)) from over

    async def close(self) -> None:
        """Free everything."""
        await self.worker.close()
        await self.peers.close()
