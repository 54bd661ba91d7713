"""What the workers last said of themselves: asked while somebody looks, once a second at most.

Who looks never waits for a worker that does not answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import grpc.aio

from splitwave.core.errors import ServingError
from splitwave.core.worker import WorkerDescription
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker

AGE_MAX_S = 0.9
"""Older descriptions are asked for anew: a page that looks each second sees new ones."""
WAIT_MAX_S = 0.5
"""How long one look waits for them."""
ANSWER_MAX_S = 5.0
"""How long a worker may take: its ranks answer between two steps."""

Describe = Callable[[str], Awaitable[WorkerDescription]]
"""Asks the worker at an address, counters included. Raises ServingError."""


class Told(NamedTuple):
    """One answer."""

    description: WorkerDescription
    at_s: float


class Descriptions:
    """The last description of each worker, by address."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._told: dict[str, Told] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def refresh(self, addresses: Iterable[str]) -> None:
        """Return with new enough answers, or after a moment with those there are."""
        wanted = set(addresses)
        for gone in self._told.keys() - wanted:
            del self._told[gone]
        now_s = _now_s()
        for address in wanted:
            told = self._told.get(address)
            if address not in self._asking and (told is None or now_s - told.at_s > AGE_MAX_S):
                task = asyncio.create_task(self._ask(address), name=f"describe {address}")
                self._asking[address] = task
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=WAIT_MAX_S)

    def get(self, address: str) -> Told | None:
        """The last answer, if there was one."""
        return self._told.get(address)

    async def _ask(self, address: str) -> None:
        asked_s = _now_s()
        try:
            self._told[address] = Told(await self._describe(address), asked_s)
        except ServingError:
            pass  # What was known stays, and its age tells.
        finally:
            del self._asking[address]

    async def close(self) -> None:
        """Give up the questions that are out."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class GrpcWorkers:
    """Workers over gRPC, one channel each, opened when first asked."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def describe(self, address: str) -> WorkerDescription:
        """See `Describe`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            self._channels[address] = channel
        return await describe_worker(channel, ANSWER_MAX_S, counters=True)

    async def close(self) -> None:
        """Close every channel."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
