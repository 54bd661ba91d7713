"""A pool in which nobody takes new work: requests are told so soon and truly, and hold nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any  # JSON

import grpc.aio
import pytest

from splitwave.wire.client import drain_worker
from tests.integration.router_stack import MODEL, Model, RouterStack, router_stack
from tests.integration.worker_stack import eventually

BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 2}
WAIT_S = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stack(model: Model) -> AsyncIterator[RouterStack]:
    async with router_stack(model, pool_wait_s=WAIT_S) as started:
        yield started


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_drained_pool_is_no_full_one(stack: RouterStack, role: str) -> None:
    channel: grpc.aio.Channel = getattr(stack.workers, role).channel
    await drain_worker(channel, "test", 5.0)
    await eventually(lambda: not stack.door.ready())
    if role == "decode":  # It ends the session, and takes no new one.
        await eventually(lambda: not stack.door.fleet.decode_peers()[0].session.connected)
        await eventually(lambda: stack.door.fleet.decode_peers()[0].reachable)

    began_s = asyncio.get_running_loop().time()
    async with stack.http.post("/v1/completions", json=BODY) as response:
        error = (await response.json())["error"]

    assert (response.status, error["code"]) == (503, "pool_unavailable")
    assert error["message"] == f"no {role} worker takes this request now: 1 draining or not ready"
    assert asyncio.get_running_loop().time() - began_s < WAIT_S + 2.0
    await stack.empty()
