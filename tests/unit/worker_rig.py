"""Both workers on simulated engines in one virtual-time loop, without a network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from services.decode.config import DecodeConfig
from services.decode.worker import DecodeWorker
from services.prefill.config import PrefillConfig
from services.prefill.worker import PrefillWorker
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.handoff import Handoff
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role
from splitwave.engine.port import EngineDied
from splitwave.engine.sim import SimEngine, SimFabric, SimModel, SimSettings, start_sim_group
from splitwave.runtime.tracing import WallClock
from tests.unit.hand_router import HandRouter, Heard, submission, tokens_of
from tests.unit.traced import NO_TRACES, Kept

GREEDY = Sampling(max_tokens=8, temperature=0.0)
PREFILL = SimSettings(role=Role.PREFILL, group_id="p", lease_ttl_s=10.0)
DECODE = SimSettings(role=Role.DECODE, group_id="d")
PREFILL_CONFIG = PrefillConfig(engine="sim", worker_id="p0")
DECODE_CONFIG = DecodeConfig(engine="sim", worker_id="d0")


def right_answer(prompt: list[int], sampling: Sampling) -> list[int]:
    """What an aggregated engine would generate."""
    return SimModel().complete(prompt, sampling).token_ids


class MemoryPeers:
    """Prefill workers called as functions. `delay_s` is the network's."""

    def __init__(self, prefill: PrefillWorker) -> None:
        self.prefill = prefill
        self.delay_s = 0.0
        self.confirmed: list[str] = []
        self.released: list[str] = []
        self.lost_calls = 0
        """Confirmations that do not get through."""

    async def confirm(self, handoff: Handoff, traceparent: str = "") -> float:
        """Ask the prefill worker."""
        await asyncio.sleep(self.delay_s)
        if self.lost_calls:
            self.lost_calls -= 1
            raise ServingError(Reason.WORKER_LOST, "the connection broke")
        self.confirmed.append(handoff.handoff_id)
        return self.prefill.confirm(handoff.handoff_id, handoff.epoch, traceparent)

    async def release(self, handoff: Handoff, traceparent: str = "") -> None:
        """Tell the prefill worker."""
        await asyncio.sleep(self.delay_s)
        self.released.append(handoff.handoff_id)
        self.prefill.release(handoff.handoff_id, traceparent)


@dataclass(slots=True)
class Rig:
    """What a test has in its hands."""

    prefill: PrefillWorker
    decode: DecodeWorker
    prefill_engine: SimEngine
    decode_engine: SimEngine
    peers: MemoryPeers
    decode_runs: "asyncio.Task[None]"
    sessions: "list[asyncio.Task[None]]" = field(default_factory=list)
    traceparent: str = ""
    """Of the router's span, in whatever is asked of the workers."""

    def now_s(self) -> float:
        """Virtual time."""
        return asyncio.get_running_loop().time()

    async def prefill_one(
        self, handoff_id: str, prompt: list[int], sampling: Sampling = GREEDY, *, keep: bool = True
    ) -> PrefillResult:
        """Prefill with 30 s."""
        call = PrefillCall(
            request_id=handoff_id,
            handoff_id=handoff_id,
            token_ids=prompt,
            sampling=sampling,
            keep_first_token=keep,
            kv_layout=self.decode.group.kv_layout,
            traceparent=self.traceparent,
        )
        return await self.prefill.prefill(call, Deadline(self.now_s() + 30.0))

    def connect(self, router: HandRouter, *, reattach: bool = False) -> "asyncio.Task[None]":
        """Connect a router to the decode worker; cancelling the task breaks the connection."""
        router.welcomed.clear()
        session = self.decode.session(router.messages(reattach=reattach), router.write)
        self.sessions.append(asyncio.create_task(session))
        return self.sessions[-1]

    async def start_one(
        self,
        router: HandRouter,
        attempt_id: str,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        *,
        keep: bool = True,
    ) -> Heard:
        """Grant, prefill, submit: what the router has heard so far, the kept token first."""
        blocks = -(-(len(prompt) + sampling.max_tokens) // self.decode.group.block_size_tokens)
        granted = await router.grant(blocks)
        result = await self.prefill_one(attempt_id, prompt, sampling, keep=keep)
        assert result.handoff is not None
        first = tokens_of(result)
        rest = replace(sampling, max_tokens=sampling.max_tokens - len(first))
        submit = submission(attempt_id, granted, result.handoff, prompt + first, rest)
        heard = router.submit(replace(submit, traceparent=self.traceparent))
        heard.token_ids += first
        heard.offsets += range(len(first))
        return heard

    def check(self) -> None:
        """Assert every invariant."""
        self.prefill.floor.check()
        self.decode.room.check()
        self.decode.holdings.check()
        self.prefill_engine.check()
        self.decode_engine.check()

    def is_empty(self) -> bool:
        """True if neither pool holds anything for anyone, floats apart."""
        return (
            self.prefill.outstanding() == 0
            and self.decode.outstanding() == 0
            and sum(self.decode.room.table.seats_held) == 0
        )


@contextlib.asynccontextmanager
async def rig(  # noqa: PLR0913  # each a setting, given by name
    prefill: SimSettings = PREFILL,
    decode: SimSettings = DECODE,
    *,
    prefill_config: PrefillConfig = PREFILL_CONFIG,
    decode_config: DecodeConfig = DECODE_CONFIG,
    decode_engine: type[SimEngine] = SimEngine,
    kept: Kept | None = None,
) -> AsyncIterator[Rig]:
    """Start both workers; stop them at the end. Their spans go to `kept`."""
    clock = asyncio.get_running_loop().time
    traces = NO_TRACES if kept is None else kept.traces(WallClock(clock))
    shared = SimFabric()
    prefilling = await start_sim_group(prefill, shared)
    decoding = decode_engine(decode, shared)
    decoding.start()
    prefill_worker = PrefillWorker(prefilling, prefill_config, clock, traces.prefill)
    peers = MemoryPeers(prefill_worker)
    decode_worker = DecodeWorker(decoding, peers, decode_config, clock, traces.decode)
    tasks = [
        asyncio.create_task(prefill_worker.run(), name="prefill worker"),
        asyncio.create_task(decode_worker.run(), name="decode worker"),
    ]
    both = Rig(prefill_worker, decode_worker, prefilling, decoding, peers, tasks[1])
    try:
        yield both
    finally:
        await decode_worker.close()
        await prefill_worker.close()
        await asyncio.gather(*both.sessions, return_exceptions=True)
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError | EngineDied):
                raise AssertionError("a worker ended by itself") from end
