"""Where a prompt is prefilled, when it waits, and what a failed call means."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from services.router.attempts import NoAnswer
from services.router.grants import POOL_WAIT_LOST_S, POOL_WAIT_S
from services.router.held import Held, Owner
from services.router.prefill_client import PrefillPeer, PrefillPool
from splitwave.core.deadline import Deadline
from splitwave.core.envelope import Envelope
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Sampling
from splitwave.core.prefill import PrefillCall, PrefillResult
from splitwave.core.worker import Role, WorkerDescription, WorkerLoad
from tests.fakes import now_s
from tests.sim import virtual_loop
from tests.unit.certificates import ENVELOPE
from tests.unit.test_router_session import HANDOFF


def description(worker_id: str, *, epoch: int = 1, role: Role = Role.PREFILL) -> WorkerDescription:
    return WorkerDescription(
        worker_id=worker_id,
        role=role,
        group_id=worker_id,
        epoch=epoch,
        mode="prefill_cpu_eager",
        model="m",
        ranks=2,
        block_size_tokens=16,
        blocks_per_rank=100,
        block_bytes=1,
        seats_per_rank=8,
        model_len_max_tokens=1000,
        batch_max_tokens=100,
        kv_layout="layout",
    )


class Worker:
    """A transport to a worker that the test plays."""

    def __init__(self, worker_id: str) -> None:
        self.description = description(worker_id)
        self.calls: list[PrefillCall] = []
        self.answers: list[PrefillResult | ServingError] = []
        self.loads: asyncio.Queue[tuple[int, WorkerLoad] | None] = asyncio.Queue()
        self.hang = False

    async def describe(self, timeout_s: float) -> WorkerDescription:
        return self.description

    async def watch(self, router_id: str) -> AsyncIterator[tuple[int, WorkerLoad]]:
        while (load := await self.loads.get()) is not None:
            yield load
        raise ServingError(Reason.WORKER_LOST, "gone")

    async def prefill(self, call: PrefillCall, timeout_s: float) -> PrefillResult:
        self.calls.append(call)
        await asyncio.sleep(1e9 if self.hang else 0)
        answer = self.answers.pop(0) if self.answers else PrefillResult(handoff=HANDOFF)
        if isinstance(answer, ServingError):
            raise answer
        return answer

    async def release(self, handoff_id: str, timeout_s: float) -> None: ...
    async def close(self) -> None: ...


class Certified:
    """Every group may get work unless it is kept out, each within its envelope."""

    def __init__(self) -> None:
        self.prompt_max_tokens: dict[str, int] = {}
        """By address; a group that is not named has no limit."""
        self.kept_out: dict[str, str] = {}
        """Why, by address."""

    def admits(self, address: str) -> bool:
        return address not in self.kept_out

    def why_not(self, address: str) -> str:
        return self.kept_out.get(address, "")

    def envelope(self, address: str) -> Envelope | None:
        tokens = self.prompt_max_tokens.get(address)
        if tokens is None:
            return None
        return replace(ENVELOPE, prompt_max_tokens=tokens, sequence_max_tokens=1000)


class Pool:
    """A pool over workers that are followed."""

    def __init__(self, count: int) -> None:
        self.certified = Certified()
        self.workers = [Worker(f"p{i}") for i in range(count)]
        self.peers = [PrefillPeer(f"p{i}:1", worker) for i, worker in enumerate(self.workers)]
        self.pool = PrefillPool(lambda: self.peers, self.certified)
        self.tasks = [asyncio.ensure_future(peer.watch("r", self.pool)) for peer in self.peers]
        self.released: list[str] = []

    async def report(self, *queued: int, draining: bool = False, epoch: int = 1) -> None:
        for worker, tokens in zip(self.workers, queued, strict=True):
            load = WorkerLoad(queued_tokens=(tokens, 0), draining=draining, ready=True)
            worker.loads.put_nowait((epoch, load))
        for _ in range(5):
            await asyncio.sleep(0)

    def start(
        self,
        handoff_id: str = "h",
        *,
        tokens: int = 50,
        kv_layout: str = "layout",
        avoid: frozenset[str] = frozenset(),
        priority: int = 0,
    ) -> "asyncio.Task[PrefillResult]":
        call = PrefillCall(
            request_id="r",
            handoff_id=handoff_id,
            token_ids=[1] * tokens,
            sampling=Sampling(max_tokens=4, temperature=0.0),
            keep_first_token=True,
            kv_layout=kv_layout,
            priority=priority,
        )
        self.held = Held(handoff_id, lambda held: self.released.append(held.handoff_id))
        self.lost, deadline = set(avoid), Deadline(now_s() + 60.0)
        return asyncio.ensure_future(self.pool.prefill(call, self.held, deadline, self.lost))

    def called(self) -> list[int]:
        return [len(worker.calls) for worker in self.workers]


def play(count: int, scenario: Callable[[Pool], Awaitable[None]]) -> None:
    """Run a scenario over a pool in virtual time."""

    async def main() -> None:
        pool = Pool(count)
        try:
            await scenario(pool)
        finally:
            for task in pool.tasks:
                task.cancel()
            await asyncio.gather(*pool.tasks, return_exceptions=True)

    virtual_loop.run(main())


def test_the_worker_with_the_fewest_queued_tokens_computes() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(90, 10)
        await pool.start()
        assert pool.called() == [0, 1]
        assert pool.held.owner is Owner.ROUTER

    play(2, scenario)


def test_own_placements_count_before_the_worker_reports_them() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 0)
        for worker in pool.workers:
            worker.hang = True
        tasks = [pool.start(f"h{i}") for i in range(4)]
        await asyncio.sleep(0.1)
        assert pool.called() == [2, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [peer.queue and peer.queue.placed for peer in pool.peers] == [{}, {}]

    play(2, scenario)


@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.WORKER_DRAINING])
def test_a_worker_that_takes_no_more_is_passed_over(reason: Reason) -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 50)
        pool.workers[0].answers = [ServingError(reason, "no")]
        await pool.start()
        assert pool.called() == [1, 1]
        assert pool.held.worker_id == "p1"

    play(2, scenario)


def test_when_all_refuse_the_soonest_time_to_wait_is_told() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0, 0)
        for worker, wait_s in zip(pool.workers, (9.0, 3.0), strict=True):
            worker.answers = [ServingError(Reason.OVERLOADED, "no", retry_after_s=wait_s)]
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert refused.value.retry_after_s == 3.0
        assert pool.held.owner is Owner.NOBODY

    play(2, scenario)


def test_a_prompt_waits_while_queues_are_full_and_in_order() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(390)
        first, second = pool.start("h1", tokens=50), pool.start("h2", tokens=5)
        await asyncio.sleep(1.0)
        assert pool.called() == [0]

        await pool.report(0)
        await asyncio.gather(first, second)
        assert [call.handoff_id for call in pool.workers[0].calls] == ["h1", "h2"]

    play(1, scenario)


def test_queues_that_stay_full_end_as_overloaded() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(390)
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert (refused.value.reason, now_s()) == (Reason.OVERLOADED, 30.0)

    play(1, scenario)


def test_a_cancelled_wait_leaves_the_queue_to_others() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(390)
        first, second = pool.start("h1"), pool.start("h2")
        await asyncio.sleep(1.0)
        first.cancel()
        await pool.report(0)
        await second
        assert [call.handoff_id for call in pool.workers[0].calls] == ["h2"]

    play(1, scenario)


def test_who_waited_only_behind_a_cancelled_one_is_placed_without_news_of_the_queue() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(330)
        first, second = pool.start("h1", tokens=80), pool.start("h2", tokens=5)
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.sleep(0.01)
        assert second.done()

    play(1, scenario)


def test_without_any_worker_it_is_said_soon() -> None:
    async def scenario(pool: Pool) -> None:
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert (refused.value.reason, now_s()) == (Reason.POOL_UNAVAILABLE, POOL_WAIT_S)

    play(1, scenario)


@pytest.mark.parametrize(
    ("set_s", "lost", "waits_s"),
    [(30.0, False, 30.0), (0.0, False, 0.0), (30.0, True, POOL_WAIT_LOST_S), (0.1, True, 0.1)],
)
def test_a_setting_says_how_long_a_worker_is_waited_for_but_not_behind_a_lost_one(
    set_s: float, lost: bool, waits_s: float
) -> None:
    async def scenario(pool: Pool) -> None:
        pool.pool = PrefillPool(lambda: pool.peers, pool.certified, set_s)
        with pytest.raises(ServingError) as refused:
            await pool.start(avoid=frozenset(["p0"] if lost else []))
        assert (refused.value.reason, now_s()) == (Reason.POOL_UNAVAILABLE, waits_s)

    play(1, scenario)


def test_groups_of_another_layout_are_not_paired() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0)
        with pytest.raises(ServingError) as refused:
            await pool.start(kv_layout="other")
        assert refused.value.reason is Reason.KV_LAYOUT_MISMATCH
        await pool.start(kv_layout="")
        assert pool.called() == [1]

    play(1, scenario)


def test_a_call_that_outlasts_its_share_is_no_death() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0)
        pool.workers[0].answers = [ServingError(Reason.DEADLINE_EXCEEDED, "late")]
        with pytest.raises(NoAnswer):
            await pool.start()
        assert pool.held.owner is Owner.ROUTER

    play(1, scenario)


def test_a_generation_that_ended_holds_nothing() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0)
        pool.workers[0].answers = [PrefillResult(token_id=1, finish_reason=FinishReason.STOP)]
        await pool.start()
        assert pool.held.owner is Owner.NOBODY

    play(1, scenario)


def test_a_new_life_of_a_worker_is_described_anew() -> None:
    async def scenario(pool: Pool) -> None:
        await pool.report(0)
        pool.workers[0].description = description("p0-again", epoch=2)
        await pool.report(0, epoch=2)
        await asyncio.sleep(0.1)
        await pool.report(0, epoch=2)
        await pool.start()
        assert pool.held.worker_id == "p0-again"

    play(1, scenario)


def test_a_worker_of_the_other_role_is_never_used() -> None:
    async def scenario(pool: Pool) -> None:
        pool.workers[0].description = description("p0", role=Role.DECODE)
        await pool.report(0)
        with pytest.raises(ServingError) as refused:
            await pool.start()
        assert refused.value.reason is Reason.POOL_UNAVAILABLE

    play(1, scenario)
