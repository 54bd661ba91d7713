"""A request of smaller priority passes those that wait, from the API to a decode group's seat."""

import asyncio
import functools
from dataclasses import replace
from typing import Any  # JSON

import pytest

from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import DECODE, eventually


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


async def complete(stack: RouterStack, **fields: Any) -> int:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 5, "ignore_eos": True, **fields}
    async with stack.http.post("/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def test_of_those_that_wait_for_the_only_seat_the_smallest_priority_goes_first(
    model: Model,
) -> None:
    one_seat = replace(DECODE, ranks=1, seats_per_rank=1, step_fixed_s=0.01)
    async with router_stack(model, decode=one_seat) as stack:
        rooms, order = stack.door.fleet.rooms, list[str]()

        def all_wait(count: int) -> bool:
            return rooms.waiting == count

        async def wait(name: str, priority: int) -> None:
            assert await complete(stack, priority=priority, request_id=name) == 200
            order.append(name)

        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(complete(stack, max_tokens=100))]
        await eventually(lambda: stack.decode_seats() == 1)
        coming = [("low0", 100), ("low1", 100), ("low2", 100), ("low3", 100), ("high", -100)]
        for waiting, (name, priority) in enumerate(coming, 1):
            tasks.append(asyncio.create_task(wait(name, priority)))
            await eventually(functools.partial(all_wait, waiting))
        await asyncio.gather(*tasks)

        assert order == ["high", "low0", "low1", "low2", "low3"]
        await stack.empty()
