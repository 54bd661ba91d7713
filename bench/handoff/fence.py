"""What the fence costs: a prefill worker is asked, over gRPC, whether a lease still lives.

The worker is one of its own process, as it serves, with a simulated engine: it answers from its
table of leases, whatever computes behind it.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc.aio

from services.decode.peers import GrpcPeers
from splitwave.core.errors import ServingError
from splitwave.core.generation import Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall
from splitwave.core.worker import WorkerDescription
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.client import describe_worker
from splitwave.wire.prefill import prefill_call_to_proto, prefill_result_from_proto
from splitwave.wire.stubs import prefill_stub

ROOT = Path(__file__).parents[2]
READY_S = 60.0
CALL_S = 20.0
PROMPT = tuple(range(40, 60))
SAMPLING = Sampling(max_tokens=8, temperature=0.0)


def cost(confirmations: int, at_once: Sequence[int], log_dir: Path) -> list[dict[str, float]]:
    """Milliseconds from asking to the answer, by how many are asked at once."""
    with _worker(log_dir) as address:
        return asyncio.run(_cost(address, confirmations, at_once))


async def _cost(address: str, confirmations: int, at_once: Sequence[int]) -> list[dict[str, float]]:
    peers = GrpcPeers(confirm_timeout_s=CALL_S, release_timeout_s=CALL_S)
    rows = []
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        layout = (await _described(channel)).kv_layout
        for many in at_once:
            took_ms: list[float] = []
            for first in range(0, confirmations, many):
                names = [f"{many}-{n}" for n in range(first, first + many)]
                held = await asyncio.gather(*(_held(channel, name, layout) for name in names))
                took_ms += await asyncio.gather(*(_asked(peers, handoff) for handoff in held))
            took_ms.sort()
            rows.append(
                {
                    "at_once": many,
                    "confirmations": len(took_ms),
                    "p50_ms": took_ms[len(took_ms) // 2],
                    "p99_ms": took_ms[min(len(took_ms) - 1, len(took_ms) * 99 // 100)],
                }
            )
    await peers.close()
    return rows


async def _described(channel: grpc.aio.Channel) -> WorkerDescription:
    until_s = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(ServingError):
            return await describe_worker(channel, 5.0)
        if time.monotonic() > until_s:
            raise RuntimeError("the prefill worker does not come up")
        await asyncio.sleep(0.1)


async def _held(channel: grpc.aio.Channel, name: str, layout: str) -> Handoff:
    call = PrefillCall(
        request_id=name,
        handoff_id=name,
        token_ids=list(PROMPT),
        sampling=SAMPLING,
        keep_first_token=True,
        kv_layout=layout,
    )
    answer = await prefill_stub(channel).Prefill(prefill_call_to_proto(call), timeout=CALL_S)
    handoff = prefill_result_from_proto(answer).handoff
    assert handoff is not None, "a prompt whose generation goes on is held"
    return handoff


async def _asked(peers: GrpcPeers, handoff: Handoff) -> float:
    began_s = time.perf_counter()
    await peers.confirm(handoff)
    return (time.perf_counter() - began_s) * 1e3


@contextlib.contextmanager
def _worker(log_dir: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        *(sys.executable, "-m", "services.prefill", "--engine", "sim", "--listen", address),
        *("--allow-uncertified", "true", "--drain-unready-s", "0", "--drain-grace-s", "1"),
        *("--engine-settings", "step_fixed_s=0.0005"),
    ]
    with (log_dir / "fence.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"SPLITWAVE_FAULTS": ""}, stdout=log, stderr=log
        )
    try:
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
