"""How a router follows the standing of its groups, and what it demands of them and of requests."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from services.router.standings import Standings, WorkerLink
from splitwave.core.demands import Demands, RefusedGroup, RequestShape
from splitwave.core.envelope import Envelope, Traffic
from splitwave.core.errors import Reason, ServingError
from splitwave.core.evidence import Level
from splitwave.core.generation import FEATURES, Request, Sampling, features
from splitwave.core.mode_guard import Action, Standing, StepViolation
from splitwave.core.placement import floor_tier
from splitwave.core.session import AskGrant, GroupLoad
from splitwave.core.worker import Certification, Role, WorkerDescription
from tests.sim.virtual_loop import run
from tests.unit.test_router_grants import LOAD, Pool, need, waiting

ENVELOPE = Envelope(
    ranks=1, step_max_tokens=64, seats_max=10, prompt_max_tokens=40, sequence_max_tokens=100,
    traffic=Traffic(output_max_tokens=60, sampling=("temperature",)),
)  # fmt: skip
FULL = Certification(certificate_id="c" * 16, level="full", envelope=ENVELOPE)
SMOKE = replace(FULL, level="smoke")
UNHEARD = replace(FULL, level="of a later release")
NONE = Certification(refusal="none was given")
VIOLATION = StepViolation(rank=1, step=9, kind="eager", tokens=2)
DESCRIPTION = WorkerDescription(
    worker_id="d0", role=Role.DECODE, group_id="g", epoch=1, mode="decode_cpu_eager", model="m",
    ranks=1, block_size_tokens=16, blocks_per_rank=10, block_bytes=1, seats_per_rank=10,
    model_len_max_tokens=100, batch_max_tokens=64, kv_layout="k", certification=FULL,
)  # fmt: skip


@dataclass(slots=True)
class Worker:
    """One worker's side of the link."""

    described: WorkerDescription = DESCRIPTION
    says: "asyncio.Queue[tuple[int, Standing]]" = field(default_factory=asyncio.Queue)
    judged: list[tuple[int, Action]] = field(default_factory=list)
    deaf: int = 0
    """Judgements that do not reach it."""
    closed: bool = False

    async def describe(self, timeout_s: float) -> WorkerDescription:
        return self.described

    async def standings(self, router_id: str) -> AsyncIterator[tuple[int, Standing]]:
        yield self.described.epoch, Standing.CERTIFIED
        while True:
            yield await self.says.get()

    async def judge(self, epoch: int, action: Action, why: str) -> None:
        if self.deaf:
            self.deaf -= 1
            raise ServingError(Reason.WORKER_LOST, "the connection broke")
        self.judged.append((epoch, action))

    async def close(self) -> None:
        self.closed = True


class Router:
    """Standings over workers that the test plays."""

    def __init__(self, count: int = 2, **demands: object) -> None:
        self.workers = [Worker() for _ in range(count)]
        self.changes = 0
        made = Demands(**demands)  # type: ignore[arg-type]  # fields by name
        self.standings = Standings(made, "r", self._connect, self._changed)
        self.tasks = [
            asyncio.create_task(self.standings.follow(Role.DECODE, str(index)))
            for index in range(count)
        ]

    def _connect(self, address: str) -> WorkerLink:
        return cast("WorkerLink", self.workers[int(address)])

    def _changed(self) -> None:
        self.changes += 1

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_a_group_gets_work_once_it_has_said_how_it_stands_and_none_when_it_is_gone() -> None:
    async def main() -> None:
        router = Router(1)
        assert not router.standings.admits("0")
        await asyncio.sleep(0.1)
        assert router.standings.admits("0")
        assert router.standings.envelope("0") == ENVELOPE
        router.workers[0].says.put_nowait((1, Standing.CERTIFIED))  # A sign of life.
        await asyncio.sleep(0.1)
        assert router.changes == 1
        await router.close()
        assert not router.standings.admits("0")
        assert router.workers[0].closed

    run(main())


def test_a_judgement_that_does_not_arrive_is_made_again() -> None:
    async def main() -> None:
        router = Router(2)
        router.workers[0].deaf = 1
        await asyncio.sleep(0.1)
        router.workers[0].says.put_nowait((1, Standing.DECERTIFIED))
        await asyncio.sleep(0.1)
        assert router.workers[0].judged == []
        assert router.standings.pools[Role.DECODE].out == 0
        await asyncio.sleep(1.0)  # It connects anew, and the worker says it again.
        router.workers[0].says.put_nowait((1, Standing.DECERTIFIED))
        await asyncio.sleep(0.1)
        assert router.workers[0].judged == [(1, Action.DRAIN)]
        await router.close()

    run(main())


def test_a_decertified_group_is_asked_which_step_it_was_and_comes_back_in_a_new_epoch() -> None:
    async def main() -> None:
        router = Router(2)
        worker = router.workers[0]
        await asyncio.sleep(0.1)
        violated = replace(FULL, violations=(VIOLATION,), violating_steps=1)
        worker.described = replace(DESCRIPTION, certification=violated)
        worker.says.put_nowait((1, Standing.DECERTIFIED))
        await asyncio.sleep(0.1)
        assert not router.standings.admits("0")
        assert "rank 1 ran its step 9 as eager" in router.standings.why_not("0")
        worker.described = replace(DESCRIPTION, epoch=2)
        worker.says.put_nowait((2, Standing.CERTIFIED))
        await asyncio.sleep(1.0)
        assert router.standings.admits("0")
        assert router.standings.pools[Role.DECODE].out == 0
        await router.close()

    run(main())


def test_a_group_that_a_readiness_gate_takes_off_the_list_is_still_out() -> None:
    async def main() -> None:
        router = Router(3)
        await asyncio.sleep(0.1)
        router.workers[0].says.put_nowait((1, Standing.DECERTIFIED))
        await asyncio.sleep(0.1)
        assert router.workers[0].judged == [(1, Action.DRAIN)]
        router.tasks[0].cancel()  # No longer listed.
        await asyncio.sleep(60.0)
        router.workers[1].says.put_nowait((1, Standing.DECERTIFIED))
        await asyncio.sleep(0.1)
        assert router.workers[1].judged == [(1, Action.SERVE_ON)]
        router.workers[0] = Worker(replace(DESCRIPTION, epoch=2))
        router.tasks.append(asyncio.create_task(router.standings.follow(Role.DECODE, "0")))
        await asyncio.sleep(0.1)
        assert router.standings.pools[Role.DECODE].out == 0
        await router.close()

    run(main())


@pytest.mark.parametrize(
    ("certification", "standing", "demands", "refused"),
    [
        (FULL, Standing.CERTIFIED, Demands(), None),
        (SMOKE, Standing.CERTIFIED, Demands(), RefusedGroup.LEVEL),
        (SMOKE, Standing.CERTIFIED, Demands(level=Level.SMOKE), None),
        (UNHEARD, Standing.CERTIFIED, Demands(level=Level.SMOKE), RefusedGroup.LEVEL),
        (UNHEARD, Standing.CERTIFIED, Demands(allow_uncertified=True), None),
        (NONE, Standing.UNCERTIFIED, Demands(level=Level.SMOKE), RefusedGroup.UNCERTIFIED),
        (NONE, Standing.UNCERTIFIED, Demands(allow_uncertified=True), None),
        (FULL, Standing.DECERTIFIED, Demands(), RefusedGroup.DECERTIFIED),
        (NONE, Standing.DECERTIFIED, Demands(allow_uncertified=True), RefusedGroup.DECERTIFIED),
        (FULL, Standing.DEGRADED, Demands(), None),
        (SMOKE, Standing.DEGRADED, Demands(), RefusedGroup.LEVEL),
    ],
)
def test_what_a_router_demands_of_a_group(
    certification: Certification, standing: Standing, demands: Demands, refused: RefusedGroup | None
) -> None:
    found = demands.refuse(certification, standing)

    assert (None if found is None else found[0]) is refused


def test_a_group_of_an_unheard_level_gets_no_work_and_harms_no_other() -> None:
    async def main() -> None:
        router = Router(2)
        router.workers[0].described = replace(DESCRIPTION, certification=UNHEARD)
        await asyncio.sleep(0.1)
        assert not router.standings.admits("0")
        assert "level of a later release; full is demanded" in router.standings.why_not("0")
        assert router.standings.admits("1")
        await router.close()

    run(main())


def test_every_feature_beyond_greedy_sampling_has_its_name() -> None:
    plain = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True, eos_token_ids=(2,))
    everything = Sampling(
        max_tokens=5, min_tokens=1, temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=1,
        presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={1: 1.0},
        stop_token_ids=(3,), logprobs=0,
    )  # fmt: skip

    assert features(plain) == ()
    assert features(everything) == FEATURES


def test_a_request_is_outside_all_groups_only_if_none_may_serve_it() -> None:
    request = Request("r", [1] * 30, Sampling(max_tokens=61, temperature=0.0))
    shape = RequestShape.of(request)
    wide = replace(ENVELOPE, traffic=Traffic(output_max_tokens=70))

    outside = shape.outside_all([ENVELOPE])
    assert outside is not None
    assert outside.limit == "output_length"
    assert shape.outside_all([ENVELOPE, wide]) is None
    assert shape.outside_all([ENVELOPE, None]) is None, "a group without an envelope has no limit"
    assert shape.outside_all([]) is None
    assert shape.in_prefill.outside_all([ENVELOPE]) is None, "prefill makes one token of it"


@pytest.mark.parametrize(
    ("used", "floor", "tier"), [(0, 0, 1), (5, 0, 1), (0, 4, 2), (3, 4, 0), (4, 4, 1), (9, 4, 1)]
)
def test_a_group_below_the_floor_comes_first_and_an_idle_one_last(
    used: int, floor: int, tier: int
) -> None:
    assert floor_tier(used, floor) == tier


async def test_a_group_that_has_begun_is_filled_to_its_floor_before_an_idle_one_begins() -> None:
    begun = GroupLoad(seats_free=8, blocks_free=100, asks_waiting=0, draining=False)
    for floor, asked in ((0, 0), (4, 1)):
        pool = Pool(LOAD, begun)
        for session in pool.sessions:
            session.envelope = replace(ENVELOPE, step_min_tokens=floor)
        task = await waiting(pool.rooms.take(need()))
        assert isinstance(pool.sent(asked)[0], AskGrant), f"floor {floor}"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_room_is_taken_only_in_groups_that_are_certified_for_the_request() -> None:
    pool = Pool(LOAD, LOAD)
    for session, prompt_max in zip(pool.sessions, (10, 40), strict=True):
        session.envelope = replace(ENVELOPE, prompt_max_tokens=prompt_max)
    task = await waiting(pool.rooms.take(need(shape=RequestShape(30, 20))))
    assert pool.sent(0) == []
    assert isinstance(pool.sent(1)[0], AskGrant)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
