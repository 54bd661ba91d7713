"""Both workers behind real gRPC servers on localhost, on simulated engines, in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import grpc.aio

from services.decode.config import DecodeConfig
from services.decode.main import DecodeProgram
from services.decode.peers import GrpcPeers
from services.decode.worker import DecodeWorker
from services.prefill.config import PrefillConfig
from services.prefill.main import PrefillProgram
from services.prefill.worker import PrefillWorker
from splitwave.core.generation import Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role
from splitwave.engine.sim import SimEngine, SimSettings, start_sim_group
from splitwave.runtime.serve import serve
from splitwave.wire.channel import CHANNEL_OPTIONS
from splitwave.wire.prefill import (
    confirm_request,
    prefill_call_to_proto,
    prefill_result_from_proto,
    release_request,
)
from splitwave.wire.session import router_message_to_proto, worker_message_from_proto
from splitwave.wire.stubs import decode_stub, prefill_stub
from tests.unit.hand_router import HandRouter, Heard, submission, tokens_of
from tests.unit.traced import NO_TRACES, Traces

GREEDY = Sampling(max_tokens=8, temperature=0.0)
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", lease_ttl_s=10.0, ranks=2)
DECODE = SimSettings(role=Role.DECODE, group_id="d", ranks=2)
PREFILL_CONFIG = PrefillConfig(engine="sim", drain_unready_s=0.0, drain_grace_s=5.0)
DECODE_CONFIG = DecodeConfig(engine="sim", drain_unready_s=0.0, drain_grace_s=5.0)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Served:
    """One worker's server."""

    address: str
    stop: asyncio.Event
    task: "asyncio.Task[int]"
    channel: grpc.aio.Channel
    engine: SimEngine


@contextlib.asynccontextmanager
async def served(
    program: PrefillProgram | DecodeProgram, config: PrefillConfig | DecodeConfig, engine: SimEngine
) -> AsyncIterator[Served]:
    """Serve a program and connect to it; drain it at the end."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(program, config, stop))
    async with grpc.aio.insecure_channel(config.listen, options=CHANNEL_OPTIONS) as channel:
        ready = asyncio.ensure_future(channel.channel_ready())
        await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), "the server ended"
        try:
            yield Served(config.listen, stop, task, channel, engine)
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)


@dataclass(slots=True)
class Stack:
    """What a test has in its hands."""

    prefill: Served
    decode: Served
    prefill_worker: PrefillWorker
    decode_worker: DecodeWorker
    sessions: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def prefill_one(
        self,
        handoff_id: str,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        *,
        keep: bool = True,
        timeout_s: float | None = 10.0,
    ) -> PrefillResult:
        """Call Prefill."""
        call = PrefillCall(
            request_id=handoff_id,
            handoff_id=handoff_id,
            token_ids=prompt,
            sampling=sampling,
            keep_first_token=keep,
            kv_layout=self.decode_worker.group.kv_layout,
        )
        stub = prefill_stub(self.prefill.channel)
        answer = await stub.Prefill(prefill_call_to_proto(call), timeout=timeout_s)
        return prefill_result_from_proto(answer)

    async def release(self, handoff_id: str) -> bool:
        """Call ReleaseHandoff."""
        stub = prefill_stub(self.prefill.channel)
        answer = await stub.ReleaseHandoff(release_request(handoff_id), timeout=5.0)
        return answer.released

    async def confirm(self, handoff: Handoff) -> None:
        """Call ConfirmHandoff."""
        await prefill_stub(self.prefill.channel).ConfirmHandoff(
            confirm_request(handoff), timeout=5.0
        )

    def is_empty(self) -> bool:
        """True if neither pool holds anything for anyone, floats apart."""
        return not (self.prefill_worker.outstanding() or self.decode_worker.outstanding())

    def connect(self, router: HandRouter, *, reattach: bool = False) -> "asyncio.Task[None]":
        """Connect a router by a stream of its own; cancelling the task resets the stream."""
        router.welcomed.clear()
        session = asyncio.create_task(_session(self.decode.address, router, reattach))
        self.sessions.append(session)
        return session

    async def start_one(
        self,
        router: HandRouter,
        attempt_id: str,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        *,
        keep: bool = True,
    ) -> Heard:
        """Grant, prefill, submit."""
        blocks = -(
            -(len(prompt) + sampling.max_tokens) // self.decode_worker.group.block_size_tokens
        )
        granted = await router.grant(blocks)
        result = await self.prefill_one(attempt_id, prompt, sampling, keep=keep)
        assert result.handoff is not None
        first = tokens_of(result)
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(first))
        heard = router.submit(submission(attempt_id, granted, result.handoff, prompt + first, rest))
        heard.token_ids += first
        heard.offsets += range(len(first))
        return heard


async def eventually(holds: Callable[[], bool], within_s: float = 15.0) -> None:
    """Wait until something holds in one of the workers; it must within the time.

    That is long, since it bounds failures only and a machine may be shared.
    """
    until_s = asyncio.get_running_loop().time() + within_s
    for _ in range(10_000):
        if holds():
            return
        assert asyncio.get_running_loop().time() < until_s, "it does not come to hold"
        await asyncio.sleep(0.01)


async def _session(address: str, router: HandRouter, reattach: bool) -> None:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = decode_stub(channel).Session()

        async def say() -> None:
            async for number, message in router.messages(reattach=reattach):
                for request in router_message_to_proto(number, message):
                    await call.write(request)
            await call.done_writing()

        saying = asyncio.create_task(say())
        try:
            async for response in call:
                asked = lambda slot: router.slots.get(slot, "") in router.asked  # noqa: E731  # one use
                router.hear(response.number, worker_message_from_proto(response, asked))
        finally:
            call.cancel()
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


@contextlib.asynccontextmanager
async def stack(
    prefill: SimSettings = PREFILL,
    decode: SimSettings = DECODE,
    *,
    prefill_config: PrefillConfig = PREFILL_CONFIG,
    decode_config: DecodeConfig = DECODE_CONFIG,
    traces: Traces = NO_TRACES,
) -> AsyncIterator[Stack]:
    """Start both workers as processes of their own would be: their engines share no fabric."""
    prefill_config = replace(prefill_config, listen=f"127.0.0.1:{free_port()}")
    decode_config = replace(decode_config, listen=f"127.0.0.1:{free_port()}")
    prefill_engine = await start_sim_group(prefill)
    decode_engine = await start_sim_group(decode)
    clock = asyncio.get_running_loop().time
    prefill_worker = PrefillWorker(prefill_engine, prefill_config, clock, traces.prefill)
    peers = GrpcPeers(confirm_timeout_s=2.0, release_timeout_s=2.0)
    decode_worker = DecodeWorker(decode_engine, peers, decode_config, clock, traces.decode)
    async with (
        served(PrefillProgram(prefill_worker), prefill_config, prefill_engine) as first,
        served(DecodeProgram(decode_worker, peers), decode_config, decode_engine) as second,
    ):
        both = Stack(first, second, prefill_worker, decode_worker)
        try:
            yield both
        finally:
            for session in both.sessions:
                session.cancel()
            await asyncio.gather(*both.sessions, return_exceptions=True)
