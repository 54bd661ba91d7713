"""In-memory workers that speak the ports of the router's `generate`. Shared by unit tests.

They keep the production tables (leases, grants), so what a test finds held is what a
worker would hold. `pause` stands at every await of theirs: a test cancels there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.router.generate import Finish, RoomNeed, Sink
from services.router.held import Held
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Completion, FinishReason, TokenLogprob
from splitwave.core.grant import GrantTable
from splitwave.core.handoff import Handoff, Lease, LeaseTable
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.session import Submit

Pause = Callable[[], Awaitable[None]]

BLOCK_SIZE_TOKENS = 4
RANKS = 2
LEASE_S = 600.0


async def no_pause() -> None:
    """Let others run."""
    await asyncio.sleep(0)


def now_s() -> float:
    """The loop's clock."""
    return asyncio.get_running_loop().time()


def blocks_of(tokens: int) -> int:
    """KV blocks of that many tokens."""
    return -(-tokens // BLOCK_SIZE_TOKENS)


def token_after(token_ids: Sequence[int]) -> int:
    """The fake model: it counts, so a resume from the wrong tokens shows."""
    return sum(token_ids) * 31 % 997


class FakeSink:
    """Takes tokens until `stop_after` of them; None: all."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.completion = Completion()
        self.stop_after = stop_after
        self.last_at_s = 0.0

    @property
    def token_ids(self) -> Sequence[int]:
        return self.completion.token_ids

    def write(
        self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> bool:
        self.completion.extend(offset, token_ids)
        return self.stop_after is not None and self.completion.offset >= self.stop_after

    def wants_prompt(self) -> int | None:
        return None  # No test of the path asks; over HTTP and gRPC they do.

    def prompt(self, rows: Sequence[TokenLogprob]) -> None:
        raise AssertionError("nobody asked for the prompt's log probabilities")


class FakePrefill:
    """One prefill worker. `failures` are raised by the next calls, before anything is held."""

    def __init__(self, pause: Pause = no_pause, *, kv_layout: str = "layout") -> None:
        self.leases = LeaseTable(ranks=1, blocks_per_rank=1000, memory_s=LEASE_S)
        self.failures: list[ServingError] = []
        self.epoch, self.starts_over = 1, True
        """Each failure ends an epoch, unless it does not start over."""
        self.prompt_max_tokens: int | None = None
        self.calls: list[PrefillCall] = []
        self.pulling: set[str] = set()
        self.released: list[str] = []
        self.finish: FinishReason | None = None
        self.lease_s = LEASE_S
        self.waves: tuple[str, ...] = ()
        self._kv_layout = kv_layout
        self._pause = pause

    async def prefill(self, call: PrefillCall, held: Held) -> PrefillResult:
        self.calls.append(call)
        await self._pause()  # The call is on the wire; nothing was asked yet.
        held.asked("p0", self.epoch)
        if self.failures:
            self.epoch += self.starts_over
            raise self.failures.pop(0)
        if self.prompt_max_tokens is not None and len(call.token_ids) > self.prompt_max_tokens:
            raise ServingError(Reason.OUTSIDE_ENVELOPE, "prefill: the prompt is too long")
        await self._pause()  # The prompt is computed.
        ends = call.keep_first_token and (call.sampling.max_tokens == 1 or self.finish is not None)
        handoff = None
        if not ends:
            blocks = blocks_of(len(call.token_ids))
            assert self.leases.hold(Lease(call.handoff_id, 0, blocks, now_s() + self.lease_s))
            handoff = self._handoff(call, blocks)
        await self._pause()  # The answer is on the wire; the caller may never see it.
        if handoff is None:
            held.nothing_held()
        return PrefillResult(
            handoff=handoff,
            token_id=token_after(call.token_ids) if call.keep_first_token else None,
            finish_reason=(self.finish or FinishReason.LENGTH) if ends else None,
            waves=self.waves,
        )

    def _handoff(self, call: PrefillCall, blocks: int) -> Handoff:
        return Handoff(
            handoff_id=call.handoff_id,
            prefill_worker_id="p0",
            prefill_address="p0:1",
            group_id="p",
            epoch=1,
            rank=0,
            prompt_tokens=len(call.token_ids),
            block_count=blocks,
            kv_layout=self._kv_layout,
            lease_remaining_s=self.lease_s,
            connector="fake",
            connector_params=b"",
        )

    async def release(self, handoff_id: str) -> None:
        await asyncio.sleep(0)
        assert handoff_id not in self.pulling, "I2: released while a peer was reading"
        self.released.append(handoff_id)
        self.leases.release(handoff_id, now_s())
        self.leases.check()

    async def pull(self, handoff_id: str) -> bool:
        """Read the blocks. A read that has begun runs to its end, whoever cancels."""
        self.pulling.add(handoff_id)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.pulling.discard(handoff_id)
        return self.leases.confirm(handoff_id, now_s()) is not None


class FakeDecode:
    """One decode worker. `refusals` answer the next submissions, `ends` end the next accepted ones.

    A `lossy` one has its session end with any submission that is cancelled unanswered.
    """

    def __init__(self, worker_id: str, prefill: FakePrefill, pause: Pause = no_pause) -> None:
        self.worker_id = worker_id
        self.table = GrantTable(ranks=RANKS, seats_per_rank=2, blocks_per_rank=100)
        self.refusals: list[ServingError] = []
        self.ends: list[tuple[int, ServingError]] = []
        """Each: tokens that an attempt gives before it fails, and how."""
        self.lossy = False
        self.waves: tuple[str, ...] = ()
        self.submits: list[Submit] = []
        self.grants: list[int] = []
        self.prefill = prefill
        self.tasks: set[asyncio.Task[None]] = set()
        self.pause = pause

    def serve(self, running: "FakeRunning") -> None:
        """Answer a submission and run it, whatever becomes of the caller."""
        task = asyncio.get_running_loop().create_task(self._serve(running))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, running: "FakeRunning") -> None:
        submit, held = running.submit, running.held
        await asyncio.sleep(0)  # The submission is on the wire.
        if self.lossy and running.cancelled:
            self.table.end_session("s")
            held.lost()
            return
        seat = self.table.spend("s", submit.grant_id, submit.attempt_id)
        if self.refusals or seat is None:
            unknown = ServingError(Reason.GRANT_UNKNOWN, "no such grant")
            error = self.refusals.pop(0) if self.refusals else unknown
            self.table.free(submit.attempt_id)
            held.returned()
            running.answered.set_result(error)
            return
        held.moved()
        running.answered.set_result(None)
        running.ended.set_result(await self._decode(running))
        self.table.free(submit.attempt_id)

    async def _decode(self, running: "FakeRunning") -> Finish | ServingError:
        submit = running.submit
        if not await self.prefill.pull(submit.handoff.handoff_id):
            return ServingError(Reason.HANDOFF_EXPIRED, "too late")
        running.handoff_bytes = len(submit.token_ids)
        tokens_max, failure = self.ends.pop(0) if self.ends else (submit.sampling.max_tokens, None)
        token_ids = list(submit.token_ids)
        for index in range(min(tokens_max, submit.sampling.max_tokens)):
            await asyncio.sleep(0)  # A step.
            if running.cancelled:
                return ServingError(Reason.CANCELLED, "the client left")
            token_ids.append(token_after(token_ids))
            if running.sink.write(submit.offset + index, token_ids[-1:], ()):
                return Finish(FinishReason.STOP)
        return failure or Finish(FinishReason.LENGTH, waves=self.waves)


class FakeRunning:
    """An attempt at a fake decode worker."""

    def __init__(self, decode: FakeDecode, submit: Submit, held: Held, sink: Sink) -> None:
        loop = asyncio.get_running_loop()
        self.decode, self.submit, self.held, self.sink = decode, submit, held, sink
        self.answered: asyncio.Future[ServingError | None] = loop.create_future()
        self.ended: asyncio.Future[ServingError | Finish] = loop.create_future()
        self.cancelled = False
        self.handoff_bytes, self.handoff_s = 0, 0.0

    async def accepted(self) -> None:
        try:
            await self.decode.pause()
            error = await asyncio.shield(self.answered)
        except BaseException:
            self.cancelled = True
            raise
        if error is not None:
            raise error

    async def finish(self) -> Finish:
        try:
            await self.decode.pause()
            end = await asyncio.shield(self.ended)
        finally:
            self.cancelled = True
        if isinstance(end, ServingError):
            raise end
        return end


class FakeRoom:
    """A taken grant of a fake decode worker."""

    def __init__(self, decode: FakeDecode, grant_id: str, kv_layout: str) -> None:
        self.decode, self.grant_id, self.kv_layout = decode, grant_id, kv_layout
        self.worker_id = decode.worker_id
        self.spent = False

    def __enter__(self) -> "FakeRoom":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.spent:
            self.spent = True
            self.decode.table.give_back("s", self.grant_id)

    async def submit(self, submit: Submit, held: Held, sink: Sink) -> FakeRunning:
        self.spent = True
        self.decode.submits.append(submit)
        running = FakeRunning(self.decode, submit, held, sink)
        held.offered()
        self.decode.serve(running)
        await running.accepted()
        return running


class FakeFleet:
    """One prefill worker and some decode workers, the roomiest taken first."""

    def __init__(self, prefill: FakePrefill, *decodes: FakeDecode, pause: Pause = no_pause) -> None:
        self.prefill_worker = prefill
        self.decodes = decodes
        self.resumes_left = 100
        self.needs: list[RoomNeed] = []
        self.releases: set[asyncio.Task[None]] = set()
        self._pause = pause

    async def decode_room(self, need: RoomNeed) -> FakeRoom:
        self.needs.append(need)
        await self._pause()  # An ask is on the wire; it is withdrawn if the caller leaves.
        fit = [d for d in self.decodes if d.worker_id not in need.avoid]
        for decode in sorted(fit, key=lambda x: -x.table.seats_free):
            grant = decode.table.grant("s", blocks_of(need.tokens), need.keep_until.at_s)
            if grant is not None:
                decode.grants.append(grant.blocks)
                return FakeRoom(decode, grant.grant_id, "layout")
        raise ServingError(Reason.OVERLOADED, "no room", retry_after_s=1.0)

    def hold(self, handoff_id: str) -> Held:
        return Held(handoff_id, self.release)

    def release(self, held: Held) -> None:
        """Start a release, as the production fleet does."""
        task = asyncio.get_running_loop().create_task(self.prefill_worker.release(held.handoff_id))
        self.releases.add(task)
        task.add_done_callback(self.releases.discard)

    async def prefill(
        self, call: PrefillCall, held: Held, deadline: Deadline, avoid: set[str]
    ) -> PrefillResult:
        return await self.prefill_worker.prefill(call, held)

    def spend_resume(self) -> None:
        if self.resumes_left == 0:
            raise ServingError(Reason.RESUME_BUDGET_EXHAUSTED, "spent")
        self.resumes_left -= 1

    async def settled(self) -> None:
        """Wait until workers and releases have nothing to do."""
        while tasks := [*self.releases, *(t for d in self.decodes for t in d.tasks)]:
            # Not gather: on Python 3.12 it returns at once if all have ended, and the callbacks
            # that take them off these lists would never run.
            await asyncio.wait(tasks)
            await asyncio.gather(*tasks)

    def held(self) -> dict[str, int]:
        """What is held anywhere, by what it is; all zero for an idle fleet."""
        self.prefill_worker.leases.check()
        for decode in self.decodes:
            decode.table.check()
        return {
            "leased blocks": sum(self.prefill_worker.leases.blocks_held),
            "decode blocks": sum(sum(d.table.blocks_used) for d in self.decodes),
            "decode seats": sum(sum(d.table.seats_used) for d in self.decodes),
        }
