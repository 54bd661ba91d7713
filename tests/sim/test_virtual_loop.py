"""The virtual-time loop itself."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from tests.sim.virtual_loop import Deadlock, VirtualLoop, run


def test_hours_pass_in_no_time_and_in_order() -> None:
    async def scenario() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[str, float]] = []

        async def wait(name: str, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            seen.append((name, loop.time()))

        async with asyncio.timeout(3_000.0):
            await asyncio.gather(wait("late", 2_000.0), wait("early", 0.5))
        return seen

    began_s = time.monotonic()

    assert run(scenario()) == [("early", 0.5), ("late", 2_000.0)]
    assert time.monotonic() - began_s < 5.0


def test_a_deadlock_is_an_error_that_says_where_each_task_waits() -> None:
    async def lost_wake_up() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        await asyncio.gather(asyncio.create_task(lost_wake_up(), name="client 7"))

    with pytest.raises(Deadlock) as caught:
        run(scenario(), seed=3)

    assert "client 7: " in str(caught.value)
    assert "lost_wake_up (test_virtual_loop.py:" in str(caught.value)
    assert "Event.wait (" in str(caught.value)
    assert caught.value.__notes__ == ["virtual-time seed: 3"]


def test_a_deadlock_behind_a_periodic_timer_is_found_at_the_limit_of_the_run() -> None:
    async def scenario() -> None:
        async def heartbeat() -> None:
            for _ in range(1_000):
                await asyncio.sleep(1.0)

        beating = asyncio.create_task(heartbeat(), name="heartbeat")
        await asyncio.Event().wait()
        beating.cancel()

    with pytest.raises(Deadlock, match="passed its limit of 20 s"):
        run(scenario(), run_max_s=20.0)


def test_a_place_inside_an_async_generator_is_found() -> None:
    async def ticks() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    async def scenario() -> None:
        async for _ in ticks():
            pass

    with pytest.raises(Deadlock, match=r"ticks \(test_virtual_loop.py"):
        run(scenario())


def test_a_failure_carries_its_seed() -> None:
    async def scenario() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        run(scenario(), seed=11)

    assert caught.value.__notes__ == ["virtual-time seed: 11"]


def test_the_same_seed_draws_the_same() -> None:
    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.rng.random(), random.random()

    assert run(scenario(), seed=5) == run(scenario(), seed=5)
    assert run(scenario(), seed=5) != run(scenario(), seed=6)
