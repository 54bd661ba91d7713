"""A pull from a lease that has ended succeeds and reads other prompts' KV: the fence must hold.

Decode's engine is paused with its request accepted, longer than the lease; meanwhile other
prompts reuse the blocks on purpose. Then it goes on, and pulls what is there by then.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitwave.core.worker import LeaseCounts
from splitwave.demo_model import DemoModelOptions, Variant, build
from splitwave.wire.client import Answer, Ask, describe_worker, generate
from tests.e2e.adapter_cases import greedy, prompt
from tests.e2e.live_stack import LiveStack, running

LEASE_S = 3
POOL_BLOCKS = 40
FLAGS = (
    *("--decode-ranks", "1"),
    *("--prefill-setting", f"lease_ttl_s={LEASE_S}"),
    *("--prefill-setting", f"blocks_override={POOL_BLOCKS}"),
)
PROMPT = prompt(150, 31)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model") / "tiny"
    build(model, DemoModelOptions(variant=Variant.TINY))
    return model


@pytest.fixture(params=["fence", "no fence"])
def stack(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path
) -> Iterator[tuple[LiveStack, bool]]:
    fenced = request.param == "fence"
    environment = {"SPLITWAVE_FAULTS": "no_pulse" if fenced else "no_pulse,drop_fence"}
    with running(tiny_model, tmp_path, *FLAGS, environment=environment) as live:
        yield live, fenced


async def complete(stack: LiveStack, token_ids: list[int], max_tokens: int) -> list[Answer]:
    ask = Ask(prompt=token_ids, sampling=greedy(max_tokens))
    async with stack.channel("grpc") as channel:
        return [answer async for answer in generate(channel, ask, 60.0)]


def tokens_of(answers: list[Answer]) -> list[int]:
    return [token_id for answer in answers for token_id in answer.token_ids]


async def lease_counts(stack: LiveStack) -> LeaseCounts:
    async with stack.channel("prefill") as channel:
        return (await describe_worker(channel, 10.0)).leases


def decode_engines(stack: LiveStack) -> list[psutil.Process]:
    """Engine processes of the decode worker: all that the listener on its port has started."""
    for process in stack.family():
        listening = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
        if stack.ports["decode"] in listening and process.children():
            return process.children(recursive=True)
    raise AssertionError("no decode worker")


async def test_tokens_from_reused_blocks_are_never_shown(
    stack: tuple[LiveStack, bool],
) -> None:
    live, fenced = stack
    right = tokens_of(await complete(live, PROMPT, NEW_TOKENS))
    before = await lease_counts(live)

    for engine in decode_engines(live):
        engine.send_signal(signal.SIGSTOP)
    late = asyncio.create_task(complete(live, PROMPT, NEW_TOKENS))
    await asyncio.sleep(LEASE_S + 1)
    for number in range(3 * POOL_BLOCKS // 4):  # Three times round the pool, four blocks each.
        await complete(live, prompt(100 + number % 20, 40 + number), 1)
    for engine in decode_engines(live):
        engine.send_signal(signal.SIGCONT)
    answers = await late

    assert len(tokens_of(answers)) == NEW_TOKENS
    if fenced:
        assert tokens_of(answers) == right
        assert answers[-1].attempts == 2  # HANDOFF_EXPIRED, and a second prefill.
        counts = await lease_counts(live)
        assert (counts.expired - before.expired, counts.pulled - before.pulled) == (1, 1)
    else:
        assert tokens_of(answers) != right, "the positive control: stale KV makes other tokens"
