"""Faults of a simulated deployment: each is a function with a name, and chance picks among them."""

import asyncio
import random
from collections import Counter

from tests.sim.network import DecodeNode, PrefillNode
from tests.sim.router_world import World

RESTART_MAX_S = 4.0


class Faults:
    """Strikes at random until it is stopped, and then repairs everything."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.struck: Counter[str] = Counter()
        self._restarts: set[asyncio.Task[None]] = set()

    async def strike(self, every_s: float, until_s: float) -> None:
        """One fault after the other until virtual time `until_s`."""
        loop = asyncio.get_running_loop()
        kinds = [self.reset_session, self.kill_decode, self.kill_prefill, self.drain_decode]
        weights = [6, 2, 2, 1]
        while loop.time() < until_s:
            await asyncio.sleep(self._rng.expovariate(1.0 / every_s))
            kind = self._rng.choices(kinds, weights)[0]
            self.struck[kind.__name__] += 1
            await kind()
        while self._restarts:
            await asyncio.wait(self._restarts)

    async def reset_session(self) -> None:
        """A decode worker's connections break; it lives."""
        self._decode().reset()

    async def kill_decode(self) -> None:
        """A decode worker's host dies and comes back."""
        await self._replace(self._decode())

    async def kill_prefill(self) -> None:
        """A prefill worker's host dies and comes back."""
        nodes = list(self._world.network.prefill.values())
        await self._replace(self._rng.choice(nodes))

    async def drain_decode(self) -> None:
        """A decode worker is drained, and replaced whether or not it was done."""
        node = self._decode()
        if node.worker is not None:
            node.worker.refuse()
            await asyncio.sleep(self._rng.uniform(0.0, 2.0))
            await self._replace(node)

    def _decode(self) -> DecodeNode:
        return self._rng.choice(list(self._world.network.decode.values()))

    async def _replace(self, node: DecodeNode | PrefillNode) -> None:
        if node.worker is None:
            return
        await node.kill()
        task = asyncio.create_task(self._start_again(node))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _start_again(self, node: DecodeNode | PrefillNode) -> None:
        await asyncio.sleep(self._rng.uniform(0.1, RESTART_MAX_S))
        await node.start()
