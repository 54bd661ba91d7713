"""One cell: clients ask a system that is up, and its engines say which steps they made for it."""

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from bench.split.balance import Board
from bench.split.client import Spec
from bench.split.figures import Seen
from bench.split.programs import ROOT, tail
from bench.split.settings import Comparison, Load, Shape
from splitwave.core.mode import MODES
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker

READY_S = 60.0
"""A client only imports."""
BEGIN_AFTER_S = 0.2
LATE_S = 20.0
"""A client is ended when it is so late with what it saw."""
DESCRIBE_S = 10.0


class ClientFailed(Exception):
    """The measurement failed, not the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is asked."""

    addresses: tuple[str, ...]
    model: str
    folder: Path
    """For files between this process and its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How long a cell sends, and how long it waits for what it sent."""

    warm_s: float
    until_s: float
    end_s: float


def specs(
    comparison: Comparison, shape: Shape, load: Load, span: Span, target: Target
) -> list[Spec]:
    """What each client is told."""
    return [
        Spec(
            seed=comparison.seed,
            kind=load.kind,
            value=load.value,
            prompt_tokens=shape.prompt_tokens,
            completion_tokens=shape.completion_tokens,
            token_ids=comparison.token_ids,
            warm_s=span.warm_s,
            until_s=span.until_s,
            end_s=span.end_s,
            model=target.model,
            addresses=list(target.addresses),
            board=str(target.folder / "board"),
            client=client,
            clients=comparison.clients,
            out=str(target.folder / f"seen-{client}.npz"),
        )
        for client in range(comparison.clients)
    ]


async def ask(told: Sequence[Spec], folder: Path) -> Seen:
    """Let the clients ask, and read what they saw. Raises ClientFailed."""
    Board.make(folder / "board", len(told), len(told[0].addresses))
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(spec, folder)) for spec in told]
        for process in clients:
            assert process.stdout is not None
            async with asyncio.timeout(READY_S):
                if await process.stdout.readline() != b"ready\n":
                    raise ClientFailed(_logs(folder))
        begin_s = time.monotonic() + BEGIN_AFTER_S
        for process in clients:
            assert process.stdin is not None
            process.stdin.write(f"{begin_s!r}\n".encode())
            await process.stdin.drain()
        for process in clients:
            async with asyncio.timeout(told[0].end_s + LATE_S):
                if await process.wait() != 0:
                    raise ClientFailed(_logs(folder))
    return Seen.read([Path(spec.out) for spec in told])


@contextlib.asynccontextmanager
async def _client(spec: Spec, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    path = folder / f"client-{spec.client}.json"
    path.write_text(json.dumps({name: getattr(spec, name) for name in spec.__struct_fields__}))
    with (folder / f"client-{spec.client}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.split.client", str(path)),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _logs(folder: Path) -> str:
    return "a client failed:\n" + "\n".join(
        text for path in sorted(folder.glob("client-*.log")) if (text := tail(path))
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """What the ranks of a worker have counted, all together."""

    mode: str
    by_kind: Mapping[str, int]
    prefill_tokens: int
    bytes_pulled: int

    def since(self, before: "Steps") -> dict[str, object]:
        """What was added."""
        kinds = Counter(self.by_kind)
        kinds.subtract(before.by_kind)
        named = {kind.value for kind in MODES[self.mode].step_kinds}
        return {
            "mode": self.mode,
            "steps_by_kind": {kind: count for kind, count in kinds.items() if count},
            "out_of_mode": sum(count for kind, count in kinds.items() if kind not in named),
            "prefill_tokens": self.prefill_tokens - before.prefill_tokens,
            "bytes_pulled": self.bytes_pulled - before.bytes_pulled,
        }


async def steps(workers: Mapping[str, str]) -> dict[str, Steps]:
    """What each worker's engines have counted so far, by role; raises ServingError."""
    counted = {}
    for role, address in workers.items():
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            told = await describe_worker(channel, DESCRIBE_S, counters=True)
        kinds: Counter[str] = Counter()
        for rank in told.rank_counters:
            kinds.update(rank.steps_by_kind)
        counted[role] = Steps(
            told.mode,
            kinds,
            sum(rank.prefill_tokens_computed for rank in told.rank_counters),
            sum(rank.bytes_pulled for rank in told.rank_counters),
        )
    return counted
