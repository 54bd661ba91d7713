"""A rank or a worker is killed under load: requests go on or end by name, the group comes back."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest

from splitwave.core.errors import Reason, ServingError
from splitwave.core.worker import WorkerDescription
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.wire.client import Ask, describe_worker, generate
from tests.e2e.adapter_cases import greedy, prompt
from tests.e2e.live_stack import LiveStack, running

CLIENTS = 8
TOKENS = 150
NOTICED_WITHIN_S = 5.0
"""What takes 0.1 s on an idle machine; the bound is for a shared one."""
FREED_WITHIN_S = 2.0
STOPPED_S = 0.5
"""Half of what a rank may be stopped for before its group is given up."""
TOLD_WITHIN_S = 2.0
"""From the fault to the error of a stream that has begun, if no other group can go on with it."""
BACK_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    with running(model, tmp_path_factory.mktemp("stack")) as live:
        yield live


@dataclass(slots=True)
class Client:
    """One stream: its tokens, and the error that it ended with."""

    tokens: list[int] = field(default_factory=list)
    error: ServingError | None = None
    ended_s: float = 0.0

    async def run(self, stack: LiveStack, seed: int) -> None:
        ask = Ask(prompt=prompt(40, seed), sampling=greedy(TOKENS))
        async with stack.channel("grpc") as channel:
            try:
                async for answer in generate(channel, ask, 120.0):
                    assert answer.offset == len(self.tokens)
                    self.tokens += answer.token_ids
            except ServingError as error:
                self.error = error
        self.ended_s = time.monotonic()


async def described(stack: LiveStack) -> WorkerDescription:
    async with stack.channel("decode") as channel:
        return await describe_worker(channel, 10.0, counters=True)


def decode_worker(stack: LiveStack) -> psutil.Process:
    """The process that listens on the decode worker's port."""
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            if stack.ports["decode"] in ports and process.children():
                return process
    raise AssertionError("no decode worker")


def kill_rank(worker: psutil.Process) -> None:
    engines = sorted(worker.children(), key=lambda child: child.create_time())
    os.kill(engines[1].pid, signal.SIGKILL)


def stop_rank(worker: psutil.Process) -> None:
    engines = sorted(worker.children(), key=lambda child: child.create_time())
    os.kill(engines[1].pid, signal.SIGSTOP)


def kill_worker(worker: psutil.Process) -> None:
    worker.kill()


async def answered(stack: LiveStack, clients: list[Client]) -> None:
    await asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(clients)))


async def until(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kill", [kill_rank, stop_rank, kill_worker])
async def test_every_stream_goes_on_or_ends_by_name_and_the_group_comes_back(
    kill: Callable[[psutil.Process], None], stack: LiveStack
) -> None:
    before = await back(stack)
    undisturbed = [Client() for _ in range(CLIENTS)]
    await answered(stack, undisturbed)
    clients = [Client() for _ in range(CLIENTS)]
    load = asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(clients)))
    await until(lambda: all(len(client.tokens) > 3 for client in clients), 30, "no load")
    lost = stack.said().count("starting it over")

    kill(decode_worker(stack))
    killed_s = time.monotonic()
    noticed = lambda: stack.said().count("starting it over") > lost  # noqa: E731  # one use
    await until(noticed, NOTICED_WITHIN_S, "a hang")
    await asyncio.wait_for(load, BACK_WITHIN_S)

    for client, whole in zip(clients, undisturbed, strict=True):
        if client.error is None:
            assert client.tokens == whole.tokens
        else:
            assert client.error.reason in (Reason.POOL_UNAVAILABLE, Reason.WORKER_LOST)
            assert client.ended_s - killed_s <= TOLD_WITHIN_S
            assert client.tokens == whole.tokens[: len(client.tokens)]
    assert (await back(stack)).epoch > before.epoch
    again = [Client() for _ in range(CLIENTS)]
    await answered(stack, again)
    assert [client.tokens for client in again] == [client.tokens for client in undisturbed]


@pytest.mark.timeout(180)
async def test_a_rank_that_is_stopped_for_a_moment_costs_no_stream_a_token(
    stack: LiveStack,
) -> None:
    before = await back(stack)
    undisturbed = [Client() for _ in range(CLIENTS)]
    await answered(stack, undisturbed)
    clients = [Client() for _ in range(CLIENTS)]
    load = asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(clients)))
    await until(lambda: all(len(client.tokens) > 3 for client in clients), 30, "no load")

    engines = sorted(decode_worker(stack).children(), key=lambda child: child.create_time())
    os.kill(engines[1].pid, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    os.kill(engines[1].pid, signal.SIGCONT)
    seen = [len(client.tokens) for client in clients]
    went_on = lambda: [len(client.tokens) for client in clients] != seen  # noqa: E731  # one use
    await until(went_on, TOLD_WITHIN_S, "a hang")
    await asyncio.wait_for(load, BACK_WITHIN_S)

    assert [client.error for client in clients] == [None] * CLIENTS
    assert [client.tokens for client in clients] == [client.tokens for client in undisturbed]
    assert (await described(stack)).epoch == before.epoch


async def back(stack: LiveStack) -> WorkerDescription:
    """The decode worker, once it is there again and the router knows."""
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while True:
        probe = Client()
        with contextlib.suppress(ServingError):
            found = await described(stack)
            await probe.run(stack, 0)
            if probe.error is None:
                return found
        assert time.monotonic() < deadline_s, f"not back: {probe.error}\n{stack.said()}"
        await asyncio.sleep(0.2)


async def test_64_clients_that_leave_give_every_seat_and_block_back(stack: LiveStack) -> None:
    await back(stack)
    clients = [Client() for _ in range(64)]
    await answered(stack, clients[:1])  # So that the router has its float of grants again.
    before = sum((await described(stack)).load.seats_used)
    load = [asyncio.create_task(client.run(stack, seed)) for seed, client in enumerate(clients)]
    await until(lambda: sum(len(client.tokens) > 3 for client in clients) >= 8, 30, "no load")
    for client in load:
        client.cancel()
    await asyncio.gather(*load, return_exceptions=True)

    left: object = None
    deadline_s = time.monotonic() + FREED_WITHIN_S
    while time.monotonic() < deadline_s and left != (before, 0):
        now = await described(stack)
        blocks = sum(rank.blocks_used for rank in now.rank_counters)
        left = (sum(now.load.seats_used), blocks)
        await asyncio.sleep(0.05)
    assert left == (before, 0), "seats granted or held, and blocks in the engines"
