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
from splitwave.engine.launch import last_words, start_engine
from splitwave.engine.port import Engine, EngineDied, Role
from splitwave.runtime import process
from splitwave.runtime.again import start_over
from splitwave.runtime.config import ConfigError
from splitwave.runtime.serve import EpochOver, Fatal, serve
from splitwave.runtime.tracing import Tracing
from splitwave.runtime.tracing_export import tracing
from splitwave.runtime.worker import default_worker_id, make_group_settings

log = logging.getLogger(__name__)

DROP_FENCE = "drop_fence"
"""In SPLITWAVE_FAULTS: show tokens without confirmation, to see that the fence is needed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says and return its exit code."""
    return process.main(DecodeConfig, arguments, run)


def run(config: DecodeConfig) -> int:
    """Run a worker until a signal or its engines end it, and again if those have died.

    No thread may be running yet.
    """
    code = process.run_until_stopped(config, lambda stop: _run(config, stop))
    return start_over(code, config.restarts_max)


async def _run(config: DecodeConfig, stop: asyncio.Event) -> int:
    engine = await process.unless_stopped(_start(config), stop)
    if engine is None:
        return 0
    try:
        async with tracing(config, config.worker_id or default_worker_id("decode")) as traces:
            return await serve(_program(engine, config, traces), config, stop)
    finally:
        await engine.close()


def _program(engine: Engine, config: DecodeConfig, traces: Tracing) -> "DecodeProgram":
    peers = GrpcPeers(
        confirm_timeout_s=config.confirm_timeout_s,
        release_timeout_s=config.release_timeout_s,
    )
    worker = DecodeWorker(engine, peers, config, traces=traces)
    if DROP_FENCE in os.environ.get("SPLITWAVE_FAULTS", "").split(","):
        log.warning("SPLITWAVE_FAULTS: tokens are shown without confirmation")
        worker.decoding.is_fenced = False
    return DecodeProgram(worker, peers)


async def _start(config: DecodeConfig) -> Engine:
    log.info("starting engines", extra={"engine": config.engine})

    def say(rank: int, text: str) -> None:
        log.info("%s", text, extra={"rank": rank})

    try:
        engine = await start_engine(
            config.engine, lambda kind: make_group_settings(config, Role.DECODE, kind), say
        )
    except ValueError as error:
        raise ConfigError(f"engine_settings: {error}") from error
    except EngineDied as died:
        raise Fatal(last_words(died)) from died
    log.info("engines started", extra={"ranks": engine.description.ranks})
    return engine


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
        """Drive the worker. Raises EpochOver with the engine's last words."""
        try:
            await self.worker.run()
        except EngineDied as died:
            raise EpochOver(last_words(died)) from died

    async def close(self) -> None:
        """Free everything."""
        await self.worker.close()
        await self.peers.close()
