"""A rank or a worker is killed under load: requests go on or end by name, the group comes back."""

import asyncio
import contextlib
import itertools
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
FEW_TOKENS = 4
COMES_EVERY_S = 0.05
ARRIVING_S = 2.0
"""How long clients still come once a lost rank was noticed."""
RUNNING: set[asyncio.Task[None]] = set()
"""What must not be collected as garbage."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    with running(model, tmp_path_factory.mktemp("stack"), "--prefill-ranks", "2") as live:
        yield live


@pytest.fixture(scope="module")
def whole(stack: LiveStack) -> list[list[int]]:
    """What each client is given if nothing happens."""
    undisturbed = [Client() for _ in range(CLIENTS)]
    asyncio.run(answered(stack, undisturbed))
    assert [client.error for client in undisturbed] == [None] * CLIENTS
    return [client.tokens for client in undisturbed]


@dataclass(slots=True)
class Client:
    """One stream: its tokens, and the error that it ended with."""

    tokens_max: int = TOKENS
    tokens: list[int] = field(default_factory=list)
    error: ServingError | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    async def run(self, stack: LiveStack, seed: int) -> None:
        ask = Ask(prompt=prompt(40, seed), sampling=greedy(self.tokens_max))
        self.began_s = time.monotonic()
        async with stack.channel("grpc") as channel:
            try:
                async for answer in generate(channel, ask, 120.0):
                    assert answer.offset == len(self.tokens)
                    self.tokens += answer.token_ids
            except ServingError as error:
                self.error = error
        self.ended_s = time.monotonic()


async def described(stack: LiveStack, role: str = "decode") -> WorkerDescription:
    async with stack.channel(role) as channel:
        return await describe_worker(channel, 10.0, counters=True)


def worker_of(stack: LiveStack, role: str) -> psutil.Process:
    """The process that listens on a worker's port."""
    for process in stack.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
            if stack.ports[role] in ports and process.children():
                return process
    raise AssertionError(f"no {role} worker")


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


def right_or_told(client: Client, whole: list[int], lost_s: float) -> None:
    """Its tokens are right, and all are there or it was soon told by name why not."""
    if client.error is None:
        assert client.tokens == whole
        return
    assert client.error.reason in (Reason.POOL_UNAVAILABLE, Reason.WORKER_LOST)
    assert client.ended_s - max(client.began_s, lost_s) <= TOLD_WITHIN_S
    assert client.tokens == whole[: len(client.tokens)]


async def arrive(stack: LiveStack, clients: list[Client]) -> None:
    """Clients that want few tokens come one by one, until this is cancelled; they go on then."""
    for number in itertools.count():
        clients.append(Client(FEW_TOKENS))
        running = asyncio.create_task(clients[-1].run(stack, number % CLIENTS))
        RUNNING.add(running)
        running.add_done_callback(RUNNING.discard)
        await asyncio.sleep(COMES_EVERY_S)


async def until(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kill", [kill_rank, stop_rank, kill_worker])
async def test_every_stream_goes_on_or_ends_by_name_and_the_group_comes_back(
    kill: Callable[[psutil.Process], None], stack: LiveStack, whole: list[list[int]]
) -> None:
    before = await back(stack)
    clients = [Client() for _ in range(CLIENTS)]
    load = asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(clients)))
    await until(lambda: all(len(client.tokens) > 3 for client in clients), 30, "no load")
    lost = stack.said().count("starting it over")

    kill(worker_of(stack, "decode"))
    killed_s = time.monotonic()
    noticed = lambda: stack.said().count("starting it over") > lost  # noqa: E731  # one use
    await until(noticed, NOTICED_WITHIN_S, "a hang")
    await asyncio.wait_for(load, BACK_WITHIN_S)

    for client, tokens in zip(clients, whole, strict=True):
        right_or_told(client, tokens, killed_s)
    assert (await back(stack)).epoch > before.epoch
    again = [Client() for _ in range(CLIENTS)]
    await answered(stack, again)
    assert [client.tokens for client in again] == whole


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lose", [kill_rank, stop_rank])
async def test_a_lost_prefill_rank_is_told_in_time_also_to_who_comes_later_and_costs_decode_nothing(
    lose: Callable[[psutil.Process], None], stack: LiveStack, whole: list[list[int]]
) -> None:
    before = await back(stack, "prefill")
    streams = [Client() for _ in range(CLIENTS // 2)]
    decoding = asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(streams)))
    await until(lambda: all(len(client.tokens) > 3 for client in streams), 30, "no load")
    clients: list[Client] = []
    arriving = asyncio.create_task(arrive(stack, clients))
    await until(lambda: sum(len(client.tokens) > 0 for client in clients) > 3, 30, "no load")
    lost = stack.said().count("starting it over")

    lose(worker_of(stack, "prefill"))
    lost_s = time.monotonic()
    noticed = lambda: stack.said().count("starting it over") > lost  # noqa: E731  # one use
    await until(noticed, NOTICED_WITHIN_S, "a hang")
    noticed_s = time.monotonic()
    await asyncio.sleep(ARRIVING_S)
    arriving.cancel()
    await until(lambda: all(client.ended_s for client in clients), BACK_WITHIN_S, "a hang")
    await asyncio.wait_for(decoding, BACK_WITHIN_S)

    for number, client in enumerate(clients):
        right_or_told(client, whole[number % CLIENTS][:FEW_TOKENS], lost_s)
    assert [client.error for client in clients if client.began_s > noticed_s], "nobody came later"
    assert [client.error for client in streams] == [None] * len(streams)
    assert [client.tokens for client in streams] == whole[: len(streams)]
    assert (await back(stack, "prefill")).epoch > before.epoch


@pytest.mark.timeout(180)
async def test_a_rank_that_is_stopped_for_a_moment_costs_no_stream_a_token(
    stack: LiveStack, whole: list[list[int]]
) -> None:
    before = await back(stack)
    clients = [Client() for _ in range(CLIENTS)]
    load = asyncio.gather(*(client.run(stack, seed) for seed, client in enumerate(clients)))
    await until(lambda: all(len(client.tokens) > 3 for client in clients), 30, "no load")

    engines = sorted(worker_of(stack, "decode").children(), key=lambda child: child.create_time())
    os.kill(engines[1].pid, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    os.kill(engines[1].pid, signal.SIGCONT)
    seen = [len(client.tokens) for client in clients]
    went_on = lambda: [len(client.tokens) for client in clients] != seen  # noqa: E731  # one use
    await until(went_on, TOLD_WITHIN_S, "a hang")
    await asyncio.wait_for(load, BACK_WITHIN_S)

    assert [client.error for client in clients] == [None] * CLIENTS
    assert [client.tokens for client in clients] == whole
    assert (await described(stack)).epoch == before.epoch


async def back(stack: LiveStack, role: str = "decode") -> WorkerDescription:
    """A worker, once it is there again and the router knows."""
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while True:
        probe = Client()
        with contextlib.suppress(ServingError):
            found = await described(stack, role)
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
