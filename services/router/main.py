"""Start a router."""

import asyncio
import contextlib
import gc
import importlib.util
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc.aio
from prometheus_client import Metric

from services.router.config import RouterConfig
from services.router.discovery import Share, Workers
from services.router.fleet import FleetSettings, WorkerFleet
from services.router.front_door import DoorSettings, FrontDoor
from services.router.metrics import collect
from services.router.openai.connections import HttpLimits
from services.router.openai.http import http_port
from services.router.refusals import GuardedServer
from services.router.servicer import SERVICE_NAMES, add_to
from services.router.transport import grpc_network
from splitwave.runtime import process
from splitwave.runtime.config import BadSetting
from splitwave.runtime.serve import Fatal, serve
from splitwave.runtime.tracing_export import tracing
from splitwave.text import ModelDirectoryError, Tokenizer

log = logging.getLogger(__name__)

GC_ALLOCATIONS = 20_000
"""New objects after which cycles are looked for."""
SILENCE_MARGIN_S = 5.0
"""How much longer than a stall a worker may be silent: it ends what stalls, and says so."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a router as the command line says and return its exit code."""
    return process.main(RouterConfig, arguments, run)


def run(config: RouterConfig) -> int:
    """Run a router until a signal ends it."""
    return process.run_until_stopped(config, lambda stop: _run(config, stop))


async def _run(config: RouterConfig, stop: asyncio.Event) -> int:
    try:
        tokenizer = Tokenizer.load(Path(config.model_path))
    except ModelDirectoryError as error:
        raise BadSetting("model_path", str(error)) from error
    door = make_door(config, tokenizer)
    # What is there now stays; a request makes a thousand objects, and hardly a cycle among them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    async with tracing(config, door.settings.router_id) as door.traces:
        return await serve(RouterProgram(door, config, further_services(config)), config, stop)


def make_door(config: RouterConfig, tokenizer: Tokenizer) -> FrontDoor:
    """Everything behind the two APIs, on the network of a deployment."""
    router_id = config.router_id or f"router-{secrets.token_hex(4)}"
    fleet = WorkerFleet(
        FleetSettings(
            router_id=router_id,
            prefill=Workers(config.prefill),
            decode=Workers(config.decode),
            share=Share(
                router_index=config.router_index,
                routers=config.routers,
                workers_max=config.workers_per_router_max,
            ),
            resolve_every_s=config.resolve_s,
            silence_max_s=config.stall_max_s + SILENCE_MARGIN_S,
            pool_wait_s=config.pool_wait_s,
            resumes_per_s=config.resumes_per_s,
            resumes_burst=config.resumes_burst,
            demands=config.demands(),
        ),
        grpc_network(),
        random.random,
    )
    settings = DoorSettings(
        router_id=router_id,
        model=config.model,
        live_max=config.live_max,
        timeout_s=config.timeout_s,
        stall_max_s=config.stall_max_s,
        reserve_tokens=config.reserve_tokens,
        trace_text=config.trace_text,
    )
    return FrontDoor(settings, tokenizer, fleet)


def http_limits(config: RouterConfig) -> HttpLimits:
    """What clients may take of the HTTP port."""
    return HttpLimits(
        head_max_s=config.http_head_max_s,
        body_max_s=config.http_body_max_s,
        idle_max_s=config.http_idle_max_s,
        connections_max=config.http_connections_max,
    )


@dataclass(frozen=True, slots=True)
class Service:
    """A gRPC service beside our own, on the same port."""

    names: Sequence[str]
    add_to: Callable[[grpc.aio.Server, FrontDoor], None]


def further_services(config: RouterConfig) -> Sequence[Service]:
    """What is served beside our own API. Raises BadSetting for one that cannot be."""
    installed = importlib.util.find_spec("smg_grpc_proto") is not None
    if config.vllm_engine == "off" or (config.vllm_engine == "auto" and not installed):
        return ()
    if not installed:
        fix = "needs the extra `smg`: pip install 'splitwave[smg]', or set it to off"
        raise BadSetting("vllm_engine", fix)
    from services.router.vllm_engine import servicer  # The extra's package may be absent.
    from services.router.vllm_engine.model import EngineModel

    model = EngineModel.read(Path(config.model_path))
    return (Service(servicer.SERVICE_NAMES, lambda s, door: servicer.add_to(s, door, model)),)


class RouterProgram:
    """A router as `serve` runs it."""

    def __init__(
        self, door: FrontDoor, config: RouterConfig, further: Sequence[Service] = ()
    ) -> None:
        self.door = door
        self.service_names = (*SERVICE_NAMES, *(name for each in further for name in each.names))
        self.http_address = ""
        """Where the HTTP API is, once it is; empty if there is none."""
        self._config = config
        self._further = further

    def add_to(self, server: grpc.aio.Server, address: str) -> None:
        """Add the gRPC APIs."""
        guarded = GuardedServer(server, self.service_names, self.door.refusals)
        stand_in = cast(grpc.aio.Server, guarded)  # Whoever adds a service uses only what it has.
        add_to(stand_in, self.door)
        for service in self._further:
            service.add_to(stand_in, self.door)

    async def run(self) -> None:
        """Follow the workers and serve HTTP, for ever. Raises Fatal if its port is taken."""
        async with self.door.fleet.running(), self._http():
            await asyncio.get_running_loop().create_future()

    def healthy(self) -> bool:
        """True while a request could be served."""
        return self.door.ready()

    def refuse(self) -> None:
        """Let nobody in any more."""
        self.door.admission.closed = True

    async def drained(self) -> None:
        """Return once no request is live."""
        await self.door.admission.idle.wait()

    def outstanding(self) -> int:
        """Requests that are live."""
        return self.door.admission.live

    async def close(self) -> None:
        """Nothing is left: `run` closes what it opened."""

    async def collect(self) -> Iterable[Metric]:
        """Metrics, made now."""
        return await collect(self.door)

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        listen = self._config.http_listen
        if not listen:
            yield
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                self.http_address = await stack.enter_async_context(
                    http_port(self.door, listen, http_limits(self._config))
                )
            except OSError as error:
                fix = "choose another port, or 0 for a free one"
                raise Fatal(f"http_listen: cannot listen on {listen}: {error}; {fix}") from error
            log.info("http ready", extra={"address": self.http_address})
            yield
