"""When a call that is due after a while is made."""

import asyncio

import pytest

from services.router.later import Later
from tests.fakes import now_s
from tests.sim import virtual_loop


@pytest.mark.parametrize(
    ("asked", "at_s"),
    [
        ([3.0], [3.0]),
        ([3.0, 5.0], [3.0]),
        ([3.0, 1.0], [1.0]),
        ([3.0, 1.0, 2.0], [1.0]),
    ],
    ids=["once", "later again", "sooner", "sooner, then later again"],
)
def test_it_is_made_once_at_the_soonest_time_that_was_asked_for(
    asked: list[float], at_s: list[float]
) -> None:
    async def scenario() -> None:
        made_s: list[float] = []
        later = Later(lambda: made_s.append(now_s()))
        for delay_s in asked:
            later.within(delay_s)
        await asyncio.sleep(10.0)

        assert made_s == at_s
        later.within(1.0)
        await asyncio.sleep(2.0)
        assert made_s == [*at_s, 11.0], "it can be asked again"

    virtual_loop.run(scenario())


def test_it_is_not_made_when_it_was_cancelled() -> None:
    async def scenario() -> None:
        made_s: list[float] = []
        later = Later(lambda: made_s.append(now_s()))
        later.within(1.0)
        later.cancel()
        await asyncio.sleep(2.0)
        later.within(1.0)
        await asyncio.sleep(2.0)

        assert made_s == [3.0]

    virtual_loop.run(scenario())
