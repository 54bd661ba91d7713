"""A router in front of both workers, all behind real servers on localhost, in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import grpc.aio

from services.router.config import RouterConfig
from services.router.front_door import FrontDoor
from services.router.main import RouterProgram, Service, make_door
from splitwave.engine.sim import SimSettings, write_vocabulary
from splitwave.runtime.serve import serve
from splitwave.text import Tokenizer
from splitwave.wire.channel import CHANNEL_OPTIONS
from tests.integration.worker_stack import (
    DECODE,
    DECODE_CONFIG,
    PREFILL,
    Stack,
    eventually,
    free_port,
    stack,
)
from tests.unit.traced import NO_TRACES, Traces

MODEL = "sim"


@dataclass(slots=True)
class RouterStack:
    """What a test has in its hands."""

    workers: Stack
    door: FrontDoor
    channel: grpc.aio.Channel
    http: aiohttp.ClientSession
    stop: asyncio.Event
    exit_code: "asyncio.Task[int]"
    http_address: tuple[str, int]

    def decode_seats(self) -> int:
        """Seats that attempts hold, or grants that are kept for them."""
        table = self.workers.decode_worker.room.table
        return sum(table.seats_used) - sum(table.floats().values())

    async def empty(self) -> None:
        """Wait until nothing is held anywhere."""
        await eventually(lambda: self.workers.is_empty() and not self.decode_seats())
        assert self.door.admission.live == 0
        assert self.door.admitted == self.door.outcomes.total(), "I5"


@dataclass(frozen=True, slots=True)
class Model:
    """A model directory, and its tokenizer. Made before the loop runs: files block."""

    directory: Path
    tokenizer: Tokenizer

    @classmethod
    def write(cls, directory: Path) -> "Model":
        """The simulated model's vocabulary."""
        write_vocabulary(directory)
        return cls(directory, Tokenizer.load(directory))


@contextlib.asynccontextmanager
async def router_stack(  # noqa: PLR0913  # parts of a stack, each given by its name
    model: Model,
    *,
    prefill: SimSettings = PREFILL,
    decode: SimSettings = DECODE,
    further: Sequence[Service] = (),
    traces: Traces = NO_TRACES,
    reattach_s: float = 0.2,
    **options: object,
) -> AsyncIterator[RouterStack]:
    """Start all three services; `options` are settings of the router."""
    decode_config = replace(DECODE_CONFIG, reattach_s=reattach_s)
    async with stack(prefill, decode, decode_config=decode_config, traces=traces) as both:
        config = RouterConfig(
            listen=f"127.0.0.1:{free_port()}",
            http_listen="127.0.0.1:0",
            prefill=both.prefill.address,
            decode=both.decode.address,
            model_path=str(model.directory),
            model=MODEL,
            drain_unready_s=0.0,
            drain_grace_s=5.0,
            **({"allow_uncertified": True} | options),  # type: ignore[arg-type]  # settings by name
        )
        door = make_door(config, model.tokenizer)
        door.traces = traces.router
        program = RouterProgram(door, config, further)
        stop = asyncio.Event()
        task = asyncio.create_task(serve(program, config, stop))
        try:
            await eventually(lambda: task.done() or bool(program.http_address and door.models()))
            assert not task.done(), "the router ended"
            host, _, port = program.http_address.rpartition(":")
            async with (
                grpc.aio.insecure_channel(config.listen, options=CHANNEL_OPTIONS) as channel,
                aiohttp.ClientSession(f"http://{program.http_address}") as http,
            ):
                yield RouterStack(
                    workers=both,
                    door=door,
                    channel=channel,
                    http=http,
                    stop=stop,
                    exit_code=task,
                    http_address=(host, int(port)),
                )
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)
