"""How a request gets room in a decode group: floats, asks, waiting, and giving back."""

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace

import pytest

from services.router.generate import RoomNeed
from services.router.grant_float import GrantFloat
from services.router.grants import POOL_WAIT_S, Rooms, TakenRoom
from services.router.held import Held, Owner
from services.router.session import SUBMITS_KEPT_MAX, Session
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Sampling
from splitwave.core.session import (
    AskGrant,
    CancelAsk,
    Granted,
    Grants,
    GroupLoad,
    ReturnGrants,
    TakeGrant,
    WorkerMessage,
)
from tests.fakes import FakeSink, now_s
from tests.sim import virtual_loop
from tests.unit.hand_router import submission
from tests.unit.test_router_session import HANDOFF, WELCOME

LOAD = GroupLoad(seats_free=10, blocks_free=100, asks_waiting=0, draining=False)


class Pool:
    """Rooms over sessions whose workers the test plays."""

    def __init__(self, *loads: GroupLoad) -> None:
        self.sessions: list[Session] = []
        self.rooms = Rooms(lambda: self.sessions, lambda: 0.0)
        self._numbers: dict[str, int] = {}
        for index, load in enumerate(loads):
            session = Session(f"s{index}", self.rooms)
            self.sessions.append(session)
            session.attach(replace(WELCOME, worker_id=f"d{index}", kv_layout=f"layout{index}"))
            self.say(index, Grants((), (), load))

    def say(self, index: int, message: WorkerMessage) -> None:
        session = self.sessions[index]
        number = self._numbers.get(session.session_id, 0) + 1
        self._numbers[session.session_id] = number
        session.receive(number, lambda asked: message)

    def grant(self, index: int, blocks: int, *, grant_id: str = "g", ask_id: str = "") -> None:
        granted = Granted(grant_id, 0, blocks, 2.0, ask_id)
        self.say(index, Grants((granted,), (), LOAD))

    def refuse(self, index: int, ask_id: str, retry_after_s: float) -> None:
        error = ServingError(Reason.OVERLOADED, f"d{index} is full", retry_after_s=retry_after_s)
        self.say(index, Grants((), ((ask_id, error),), LOAD))

    def sent(self, index: int) -> list[object]:
        """What went to a worker since it was last looked at, acknowledgements apart."""
        session = self.sessions[index]
        messages: list[object] = [message for number, message in session.outbox if number]
        session.outbox.clear()
        return messages

    def asked(self, index: int) -> AskGrant:
        """The one ask that went to a worker."""
        (ask,) = self.sent(index)
        assert isinstance(ask, AskGrant)
        return ask


def need(tokens: int = 20, **changes: object) -> RoomNeed:
    made = RoomNeed(
        tokens=tokens, waits_until=Deadline(now_s() + 10), keep_until=Deadline(now_s() + 60)
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # named fields


async def waiting(take: Coroutine[None, None, TakenRoom]) -> "asyncio.Task[TakenRoom]":
    """Start to take room, up to the first wait."""
    task = asyncio.ensure_future(take)
    await asyncio.sleep(0)
    return task


async def failure(task: "asyncio.Task[TakenRoom]") -> ServingError:
    with pytest.raises(ServingError) as failed:
        await task
    return failed.value


def test_the_smallest_grant_that_fits_is_taken() -> None:
    grants = GrantFloat()
    for blocks in (9, 4, 6, 2):
        grants.add(Granted(f"g{blocks}", 0, blocks, 2.0), now_s=0.0)

    taken = [grants.take(3, now_s=1.0) for _ in range(4)]

    assert [grant and grant.blocks for grant in taken] == [4, 6, 9, None]


def test_a_grant_is_not_handed_out_when_its_take_would_come_too_late() -> None:
    grants = GrantFloat()
    grants.add(Granted("g", 0, 4, ttl_s=2.0), now_s=0.0)

    assert grants.take(1, now_s=1.6) is None
    assert len(grants) == 0


def test_grants_that_nobody_takes_do_not_pile_up() -> None:
    grants = GrantFloat()
    for number in range(1000):  # A worker gives new ones for those whose time was up, all night.
        grants.add(Granted(f"g{number}", 0, 4, ttl_s=2.0), now_s=0.5 * number)

    assert len(grants) <= 4


async def test_a_float_is_spent_without_asking() -> None:
    pool = Pool(LOAD)
    pool.grant(0, 4)

    room = await pool.rooms.take(need(tokens=33))

    assert (room.worker_id, room.grant_id) == ("d0", "g")
    (take,) = pool.sent(0)
    assert isinstance(take, TakeGrant)
    assert (take.grant_id, take.blocks) == ("g", 3)
    assert 59 < take.keep_s <= 60


async def test_without_a_float_the_roomier_of_two_is_asked() -> None:
    pool = Pool(replace(LOAD, seats_free=3), replace(LOAD, seats_free=5))

    task = await waiting(pool.rooms.take(need(tokens=33)))

    ask = pool.asked(1)
    assert (ask.blocks, pool.sent(0)) == (3, [])
    pool.grant(1, 3, ask_id=ask.ask_id)
    assert (await task).worker_id == "d1"
    assert [type(message) for message in pool.sent(1)] == [TakeGrant]
    assert pool.rooms.waiting == 0


async def test_a_refused_ask_goes_to_the_next_worker_until_all_have_refused() -> None:
    pool = Pool(LOAD, LOAD)
    task = await waiting(pool.rooms.take(need()))

    pool.refuse(0, pool.asked(0).ask_id, retry_after_s=9.0)
    pool.refuse(1, pool.asked(1).ask_id, retry_after_s=3.0)

    error = await failure(task)
    assert (error.reason, error.message, error.retry_after_s) == (
        Reason.OVERLOADED,
        "d1 is full",
        3.0,
    )


async def test_a_grant_that_comes_unasked_serves_the_oldest_it_fits_and_withdraws_its_ask() -> None:
    pool = Pool(LOAD)
    large = await waiting(pool.rooms.take(need(tokens=900)))
    small = await waiting(pool.rooms.take(need(tokens=20)))
    asks = pool.sent(0)

    pool.grant(0, 4)

    assert (await small).grant_id == "g"
    assert not large.done()
    cancelled = [m.ask_id for m in pool.sent(0) if isinstance(m, CancelAsk)]
    assert cancelled == [asks[1].ask_id]  # type: ignore[attr-defined]  # these are asks
    large.cancel()


async def test_a_cancelled_waiter_withdraws_its_ask() -> None:
    pool = Pool(LOAD)
    task = await waiting(pool.rooms.take(need()))
    ask = pool.asked(0)

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert pool.sent(0) == [CancelAsk(ask.ask_id)]
    assert pool.rooms.waiting == 0


async def test_room_that_comes_in_the_moment_of_a_cancel_goes_back() -> None:
    pool = Pool(LOAD)
    task = await waiting(pool.rooms.take(need()))

    pool.grant(0, 4, ask_id=pool.asked(0).ask_id)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert task.cancelled()
    assert pool.sent(0)[-1] == ReturnGrants(("g",))


async def test_a_grant_for_a_withdrawn_ask_is_left_to_its_worker() -> None:
    pool = Pool(LOAD)
    task = await waiting(pool.rooms.take(need()))
    ask = pool.asked(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    pool.sent(0)

    pool.grant(0, 4, ask_id=ask.ask_id)

    assert len(pool.sessions[0].float) == 0


@pytest.mark.parametrize("ended", [True, False])
async def test_an_ask_at_a_lost_worker_is_made_elsewhere(ended: bool) -> None:
    pool = Pool(LOAD, LOAD)
    task = await waiting(pool.rooms.take(need()))
    pool.asked(0)

    if ended:
        pool.sessions[0].end(ServingError(Reason.WORKER_LOST, "gone"))
    else:
        pool.sessions[0].detach()

    pool.grant(1, 4, ask_id=pool.asked(1).ask_id)
    assert (await task).worker_id == "d1"


@pytest.mark.parametrize(
    "unusable",
    [
        {"avoid": frozenset({"d0"})},
        {"kv_layout": "layout1"},
    ],
)
async def test_only_workers_that_may_serve_it_are_asked(unusable: dict[str, object]) -> None:
    pool = Pool(LOAD, LOAD)
    pool.grant(0, 40)

    task = await waiting(pool.rooms.take(need(20, **unusable)))

    pool.asked(1)
    task.cancel()


async def test_a_draining_worker_is_not_asked() -> None:
    pool = Pool(LOAD, replace(LOAD, draining=True))
    pool.say(1, Grants((Granted("g", 0, 40, 2.0),), (), replace(LOAD, draining=True)))

    task = await waiting(pool.rooms.take(need()))

    pool.asked(0)
    task.cancel()


async def test_unspent_room_goes_back_once() -> None:
    pool = Pool(LOAD)
    pool.grant(0, 4)

    with await pool.rooms.take(need()) as room:
        room.give_back()

    assert pool.sent(0)[1:] == [ReturnGrants(("g",))]


def test_a_worker_that_comes_in_time_is_asked() -> None:
    async def scenario() -> None:
        pool = Pool(LOAD)
        pool.sessions[0].detach()
        task = await waiting(pool.rooms.take(need()))
        await asyncio.sleep(POOL_WAIT_S - 0.5)

        pool.sessions[0].attach(replace(WELCOME, reattached=True))
        await asyncio.sleep(2.0)

        pool.grant(0, 4, ask_id=pool.asked(0).ask_id)
        assert (await task).grant_id == "g"

    virtual_loop.run(scenario())


def test_without_any_worker_it_is_said_soon() -> None:
    async def scenario() -> None:
        task = await waiting(Pool().rooms.take(need()))
        error = await failure(task)
        assert (error.reason, now_s()) == (Reason.POOL_UNAVAILABLE, POOL_WAIT_S)

    virtual_loop.run(scenario())


@pytest.mark.parametrize(
    ("set_s", "asked_s", "waits_s"), [(7.0, math.inf, 7.0), (0.0, math.inf, 0.0), (7.0, 0.5, 0.5)]
)
def test_a_setting_says_how_long_a_worker_is_waited_for_unless_less_is_asked(
    set_s: float, asked_s: float, waits_s: float
) -> None:
    async def scenario() -> None:
        rooms = Rooms(list, lambda: 0.0, set_s)
        error = await failure(await waiting(rooms.take(need(pool_wait_s=asked_s))))
        assert (error.reason, now_s()) == (Reason.POOL_UNAVAILABLE, waits_s)

    virtual_loop.run(scenario())


def test_who_is_in_a_hurry_is_told_sooner_that_there_is_no_worker() -> None:
    async def scenario() -> None:
        task = await waiting(Pool().rooms.take(need(pool_wait_s=0.5)))
        error = await failure(task)
        assert (error.reason, now_s()) == (Reason.POOL_UNAVAILABLE, 0.5)

    virtual_loop.run(scenario())


def test_where_another_worker_is_full_who_is_in_a_hurry_waits_as_long_as_others() -> None:
    async def scenario() -> None:
        pool = Pool(LOAD)
        task = await waiting(pool.rooms.take(need(pool_wait_s=0.5)))
        await asyncio.sleep(8.0)
        pool.grant(0, 4, ask_id=pool.asked(0).ask_id)
        assert (await task).grant_id == "g"

    virtual_loop.run(scenario())


def test_a_worker_that_never_answers_an_ask_ends_it_as_overloaded() -> None:
    async def scenario() -> None:
        pool = Pool(LOAD)
        task = await waiting(pool.rooms.take(need()))
        error = await failure(task)
        assert error.reason is Reason.OVERLOADED
        assert 10.0 < now_s() < 12.0
        assert isinstance(pool.sent(0)[-1], CancelAsk)

    virtual_loop.run(scenario())


async def test_a_submission_that_cannot_be_sent_gives_its_room_back() -> None:
    pool = Pool(LOAD)
    pool.grant(0, 4)
    room = await pool.rooms.take(need())
    for _ in range(SUBMITS_KEPT_MAX):  # The worker acknowledges nothing.
        pool.sessions[0].post(ReturnGrants(()))
    pool.sent(0)
    held = Held("h", lambda held: None)
    held.asked("p0")
    granted = Granted(room.grant_id, 0, 4, 2.0)
    submit = submission("a", granted, HANDOFF, [1, 2, 3], Sampling(max_tokens=9))

    with pytest.raises(ServingError, match="too slowly"):
        await room.submit(submit, held, FakeSink())

    assert pool.sent(0) == [ReturnGrants(("g",))], "the worker would keep it for the whole request"
    assert held.owner is Owner.ROUTER


def test_a_wait_for_lost_workers_is_short_however_long_it_was_asked_for() -> None:
    async def scenario() -> None:
        pool = Pool(LOAD)
        take = await waiting(pool.rooms.take(need(waits_until=Deadline(now_s() + 100))))
        await asyncio.sleep(20.1)

        lost_at_s = now_s()
        pool.sessions[0].detach()
        error = await failure(take)

        assert error.reason is Reason.POOL_UNAVAILABLE
        assert now_s() - lost_at_s == pytest.approx(POOL_WAIT_S)

    virtual_loop.run(scenario())


def test_a_session_that_is_back_soon_costs_no_waiter_its_turn() -> None:
    async def scenario() -> None:
        pool = Pool()
        take = await waiting(pool.rooms.take(need(waits_until=Deadline(now_s() + 100))))
        session = Session("s0", pool.rooms)
        pool.sessions.append(session)
        await asyncio.sleep(POOL_WAIT_S - 0.2)
        session.attach(WELCOME)
        pool.say(0, Grants((), (), LOAD))
        session.detach()

        await asyncio.sleep(0.5)  # Longer than any worker may be awaited since the beginning.
        session.attach(replace(WELCOME, reattached=True))
        (ask,) = [x for x in pool.sent(0) if isinstance(x, AskGrant)][-1:]
        pool.grant(0, 4, ask_id=ask.ask_id)

        assert (await take).grant_id == "g"

    virtual_loop.run(scenario())
