"""Start a prefill worker: engines first, since they are forked, then the server."""

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio

from services.prefill.config import PrefillConfig
from services.prefill.servicer import SERVICE_NAMES, add_to
from services.prefill.worker import PrefillWorker
from services.worker.group_guard import Decertified
from services.worker.start import check_engine_settings, start_certified
from splitwave.core.worker import Role
from splitwave.engine.launch import last_words
from splitwave.engine.port import EngineDied
from splitwave.runtime import process
from splitwave.runtime.again import start_over
from splitwave.runtime.serve import EpochOver, serve
from splitwave.runtime.tracing_export import tracing
from splitwave.runtime.worker import default_worker_id

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says and return its exit code."""
    return process.main(PrefillConfig, arguments, run, check_engine_settings)


def run(config: PrefillConfig) -> int:
    """Run a worker until a signal or its engines end it, and again if those have died.

    No thread may be running yet.
    """
    code = process.run_until_stopped(config, lambda stop: _run(config, stop))
    return start_over(code, config.restarts_max)


async def _run(config: PrefillConfig, stop: asyncio.Event) -> int:
    started = await process.unless_stopped(start_certified(config, Role.PREFILL), stop)
    if started is None:
        return 0
    try:
        async with tracing(config, config.worker_id or default_worker_id("prefill")) as traces:
            worker = PrefillWorker(started.engine, config, traces=traces)
            worker.guard.certify(started.certification)
            return await serve(PrefillProgram(worker), config, stop)
    finally:
        await started.engine.close()


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
        """Drive the worker. Raises EpochOver with the engine's last words, or the guard's."""
        try:
            await self.worker.run()
        except EngineDied as died:
            raise EpochOver(last_words(died)) from died
        except Decertified as over:
            raise EpochOver(str(over)) from over
