"""n choices of a request: room for all or none, seeds of their own, one end for all."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from services.router.attempts import Call, Trail
from services.router.choices import Choice, Turns, sampling_of_choice, serve_choices
from services.router.generate import Finish, RoomNeed
from services.router.grants import Rooms
from services.router.sink import TextSink
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import FinishReason, Request, Sampling
from splitwave.core.sampling_limits import SEED_MAX, SEED_MIN
from splitwave.engine.sim import write_vocabulary
from splitwave.text import TextOptions, TextStream, Tokenizer
from tests.fakes import (
    FakeDecode,
    FakeFleet,
    FakePrefill,
    FakeRoom,
    Pause,
    no_pause,
    now_s,
    token_after,
)
from tests.sim import virtual_loop

EMPTY = {"leased blocks": 0, "decode blocks": 0, "decode seats": 0}
PROMPT = (1, 2, 3)
GREEDY = Sampling(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    write_vocabulary(directory)
    return Tokenizer.load(directory)


class Served:
    """A request of some choices at one fake decode worker."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        count: int,
        *,
        sampling: Sampling = GREEDY,
        pause: Pause = no_pause,
        timeout_s: float = 600.0,
    ) -> None:
        self.prefill = FakePrefill(pause)
        self.decode = FakeDecode("d0", self.prefill, pause)
        self.fleet = FakeFleet(self.prefill, self.decode, pause=pause)
        self.ends: list[tuple[int, FinishReason]] = []
        self.choices = [
            Choice(
                Call(
                    request=Request("r", PROMPT, sampling_of_choice(sampling, i)),
                    key="r#1",
                    deadline=Deadline(now_s() + timeout_s),
                    stall_max_s=60,
                    choice=i,
                ),
                TextSink(TextStream(tokenizer, TextOptions(), PROMPT), lambda part: None),
                Trail(),
            )
            for i in range(count)
        ]

    async def run(self) -> None:
        try:
            await serve_choices(self.choices, self.fleet, self.finished, Turns(lambda: 0.5))
        finally:
            await self.fleet.settled()

    def finished(self, choice: Choice, finish: Finish) -> None:
        self.ends.append((choice.call.choice, finish.finish_reason))


def seats(served: Served, count: int) -> None:
    """Leave so many seats free."""
    table = served.decode.table
    while table.seats_free > count:
        assert table.grant("other", 1, 1e9) is not None


async def test_each_choice_has_its_own_attempt_and_its_own_end(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 3)

    await served.run()

    ids = {call.handoff_id for call in served.prefill.calls}
    assert ids == {"r#1/0/1", "r#1/1/1", "r#1/2/1"}
    assert sorted(served.ends) == [(i, FinishReason.LENGTH) for i in range(3)]
    right = list(PROMPT)
    for _ in range(5):
        right.append(token_after(right))
    assert [list(choice.sink.token_ids) for choice in served.choices] == [right[3:]] * 3
    assert served.fleet.held() == EMPTY


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (SEED_MAX - 1, [SEED_MAX - 1, SEED_MAX, SEED_MIN]), (None, [None] * 3)],
)
def test_a_choice_has_the_seed_plus_its_index_in_64_bits(
    seed: int | None, seeds: list[int | None]
) -> None:
    sampling = replace(GREEDY, seed=seed)

    assert [sampling_of_choice(sampling, i).seed for i in range(3)] == seeds


async def test_no_prefill_starts_unless_all_have_room(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 3, timeout_s=0.2)
    seats(served, 2)
    others = served.fleet.held()

    with pytest.raises(ServingError) as refused:
        await served.run()

    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.message.startswith("n: no room for 3 completions at once")
    assert served.prefill.calls == []
    assert served.fleet.held() == others, "what was taken is given back"


async def test_room_whose_choice_never_gets_to_it_is_given_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tokenizer, 3)

    async def stillborn(*_: object) -> Finish:
        raise ServingError(Reason.INTERNAL, "it did not begin")

    monkeypatch.setattr("services.router.choices.generate", stillborn)
    with pytest.raises(ServingError):
        await served.run()

    assert served.fleet.held() == EMPTY


class PatientFleet(FakeFleet):
    """The first ask is refused, the others wait."""

    waiting = 0

    async def decode_room(self, need: RoomNeed) -> FakeRoom:
        if not self.needs:
            self.needs.append(need)
            await asyncio.sleep(0)
            raise ServingError(Reason.KV_CAPACITY_EXHAUSTED, "no")
        self.waiting += 1
        never: asyncio.Future[FakeRoom] = asyncio.get_running_loop().create_future()
        try:
            return await never
        finally:
            self.waiting -= 1


async def test_no_ask_outlives_a_request_that_gets_no_room(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 3)
    fleet = served.fleet = PatientFleet(served.prefill, served.decode)

    with pytest.raises(ServingError):
        await served.run()
    await asyncio.sleep(0)

    assert fleet.waiting == 0


async def test_a_request_that_needs_no_decode_takes_no_room(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 3, sampling=replace(GREEDY, max_tokens=1))
    seats(served, 0)

    await served.run()

    assert sorted(served.ends) == [(i, FinishReason.LENGTH) for i in range(3)]
    assert served.fleet.needs == []


async def test_one_choice_that_fails_ends_the_others(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 3)
    served.decode.ends = [(1, ServingError(Reason.STALLED, "no token came"))]

    with pytest.raises(ServingError) as failed:
        await served.run()

    assert failed.value.reason is Reason.STALLED
    assert len(served.ends) < 3
    assert served.fleet.held() == EMPTY


@pytest.mark.parametrize("pool_wait_s", [0.0, 1.5, 4.0])
def test_several_choices_wait_no_longer_for_a_worker_to_come_than_one(
    tokenizer: Tokenizer, pool_wait_s: float
) -> None:
    async def scenario() -> None:
        served = Served(tokenizer, 2)
        rooms = Rooms(list, lambda: 0.5, pool_wait_s)
        served.fleet.decode_room = rooms.take  # type: ignore[method-assign,assignment]  # none is there
        with pytest.raises(ServingError) as refused:
            await Turns(rooms.chance, rooms.pool_wait_s).rooms(served.choices, served.fleet)
        assert (refused.value.reason, now_s()) == (Reason.POOL_UNAVAILABLE, pool_wait_s)

    virtual_loop.run(scenario())


async def test_a_bug_in_one_choice_is_raised_as_it_is(tokenizer: Tokenizer) -> None:
    served = Served(tokenizer, 2)

    def finished(choice: Choice, finish: Finish) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await serve_choices(served.choices, served.fleet, finished, Turns(lambda: 0.5))
    await served.fleet.settled()

    assert served.fleet.held() == EMPTY


async def cancelled_at(k: int, tokenizer: Tokenizer) -> tuple[bool, Served]:
    count = 0

    async def pause() -> None:
        nonlocal count
        count += 1
        if count == k:
            task.cancel()
        await asyncio.sleep(0)

    served = Served(tokenizer, 3, pause=pause)
    task = asyncio.create_task(
        serve_choices(served.choices, served.fleet, served.finished, Turns(lambda: 0.5))
    )
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await served.fleet.settled()
    return task.cancelled(), served


async def test_choices_cancelled_at_any_await_leave_nothing_held(tokenizer: Tokenizer) -> None:
    held_after_cancel = []
    for k in range(1, 300):
        was_cancelled, served = await cancelled_at(k, tokenizer)
        if served.fleet.held() != EMPTY:
            held_after_cancel.append(k)
        if not was_cancelled:
            break

    assert k > 15
    assert held_after_cancel == []
