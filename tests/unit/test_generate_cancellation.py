"""Cancel a request at each of its awaits in turn: nothing may stay held anywhere.

Method: a checkpoint at every await of the workers counts up and cancels the request
at the k-th one. k runs until a request finishes uncancelled, so a new await in
`generate` is covered without touching this test. Leases last 600 s: nothing here is
cleaned up by time.
"""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from services.router.attempts import Call, Trail
from services.router.generate import generate
from services.router.held import Held
from splitwave.core.deadline import Deadline
from splitwave.core.errors import Reason, ServingError
from splitwave.core.generation import Request, Sampling
from tests.fakes import FakeDecode, FakeFleet, FakePrefill, FakeSink, Pause, now_s

EMPTY = {"leased blocks": 0, "decode blocks": 0, "decode seats": 0}

Build = Callable[[Pause], FakeFleet]


def healthy(pause: Pause) -> FakeFleet:
    prefill = FakePrefill(pause)
    return FakeFleet(prefill, FakeDecode("d0", prefill, pause), pause=pause)


def refused_once(pause: Pause) -> FakeFleet:
    prefill = FakePrefill(pause)
    first, second = FakeDecode("d0", prefill, pause), FakeDecode("d1", prefill, pause)
    first.refusals = [ServingError(Reason.WORKER_DRAINING, "no")]
    return FakeFleet(prefill, first, second, pause=pause)


def preempted_once(pause: Pause) -> FakeFleet:
    fleet = healthy(pause)
    fleet.decodes[0].ends = [(1, ServingError(Reason.PREEMPTED, "no blocks"))]
    return fleet


def session_lost_at_hand_over(pause: Pause) -> FakeFleet:
    fleet = healthy(pause)
    fleet.decodes[0].lossy = True
    return fleet


class NeverReleasing(FakeFleet):
    """The mutant: a router that forgets to release."""

    def release(self, held: Held) -> None:
        pass


def mutant(pause: Pause) -> FakeFleet:
    prefill = FakePrefill(pause)
    return NeverReleasing(prefill, FakeDecode("d0", prefill, pause), pause=pause)


async def cancelled_at(k: int, build: Build) -> tuple[bool, FakeFleet]:
    count = 0

    async def pause() -> None:
        nonlocal count
        count += 1
        if count == k:
            task.cancel()
        await asyncio.sleep(0)

    fleet = build(pause)
    request = Request("r", (1, 2, 3), Sampling(max_tokens=5, temperature=0.0))
    call = Call(request=request, key="r#1", deadline=Deadline(now_s() + 600), stall_max_s=60)
    task = asyncio.create_task(generate(call, fleet, FakeSink(), Trail()))
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await fleet.settled()
    return task.cancelled(), fleet


async def awaits_that_leave_something_held(build: Build) -> tuple[int, list[int]]:
    """How many awaits there are, and those at which a cancel left something held."""
    held_after_cancel: list[int] = []
    for k in range(1, 100):
        was_cancelled, fleet = await cancelled_at(k, build)
        if fleet.held() != EMPTY:
            held_after_cancel.append(k)
        if not was_cancelled:
            return k - 1, held_after_cancel
    raise AssertionError("the request never finished")


@pytest.mark.parametrize("build", [healthy, refused_once, preempted_once])
async def test_a_cancelled_request_leaves_nothing_held(build: Build) -> None:
    awaits, held_after_cancel = await awaits_that_leave_something_held(build)

    assert awaits > 5
    assert held_after_cancel == []


async def test_only_a_session_lost_at_the_hand_over_relies_on_lease_expiry() -> None:
    _, held_after_cancel = await awaits_that_leave_something_held(session_lost_at_hand_over)

    assert len(held_after_cancel) == 1, f"blocks left held at awaits {held_after_cancel}"


async def test_a_router_that_never_releases_is_found_out() -> None:
    _, held_after_cancel = await awaits_that_leave_something_held(mutant)

    assert held_after_cancel
