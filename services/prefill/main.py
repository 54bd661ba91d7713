"""Start a prefill worker: engines first, since they are forked, then the server."""

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio

from services.prefill.config import PrefillConfig
from services.prefill.servicer import SERVICE_NAMES, add_to
from services.prefill.worker import PrefillWorker
from splitwave.engine.launch import last_words, start_engine
from splitwave.engine.port import Engine, EngineDied, Role
from splitwave.runtime import process
from splitwave.runtime.again import start_over
from splitwave.runtime.config import ConfigError
from splitwave.runtime.serve import EpochOver, Fatal, serve
from splitwave.runtime.tracing_export import tracing
from splitwave.runtime.worker import default_worker_id, make_group_settings

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says and return its exit code."""
    return process.main(PrefillConfig, arguments, run)


def run(config: PrefillConfig) -> int:
    """Run a worker until a signal or its engines end it, and again if those have died.

    No thread may be running yet.
    """
    code = process.run_until_stopped(config, lambda stop: _run(config, stop))
    return start_over(code, config.restarts_max)


async def _run(config: PrefillConfig, stop: asyncio.Event) -> int:
    engine = await process.unless_stopped(_start(config), stop)
    if engine is None:
        return 0
    try:
        async with tracing(config, config.worker_id or default_worker_id("prefill")) as traces:
            worker = PrefillWorker(engine, config, traces=traces)
            return await serve(PrefillProgram(worker), config, stop)
    finally:
        await engine.close()


async def _start(config: PrefillConfig) -> Engine:
    log.info("starting engines", extra={"engine": config.engine})

    def say(rank: int, text: str) -> None:
        log.info("%s", text, extra={"rank": rank})

    try:
        engine = await start_engine(
            config.engine, lambda kind: make_group_settings(config, Role.PREFILL, kind), say
        )
    except ValueError as error:
        raise ConfigError(f"engine_settings: {error}") from error
    except EngineDied as died:
        raise Fatal(last_words(died)) from died
    log.info("engines started", extra={"ranks": engine.description.ranks})
    return engine


class PrefillProgram:
    """A prefill worker as `serve` runs it."""

    service_names = SERVICE_NAMES

    def __init__(self, worker: PrefillWorker) -> None:
        self.worker = worker
        self.healthy = worker.healthy
        self.refuse = worker.refuse
        self.drained = worker.drained
        self.outstanding = worker.outstanding
        self.collect = worker.collect
        self.close = worker.close

    def add_to(self, server: grpc.aio.Server, address: str) -> None:
        """Add its servicers; handoffs will name `address`."""
        self.worker.listen_at(address)
        add_to(server, self.worker)

    async def run(self) -> None:
        """Drive the worker. Raises EpochOver with the engine's last words."""
        try:
            await self.worker.run()
        except EngineDied as died:
            raise EpochOver(last_words(died)) from died
