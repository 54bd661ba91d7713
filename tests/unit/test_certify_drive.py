"""How long the battery waits for a request: as long as it grows, and not much longer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any  # an engine that is none

import pytest

from splitwave.certify.battery import drive
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.core.generation import FinishReason, Sampling
from splitwave.engine.port import EngineRequest, RequestOutput, StepOutputs

SILENCE_S = 0.2


class Engine:
    """Gives a token now and then, the last one with the end, or none any more."""

    def __init__(self, tokens: int, every_s: float, *, ends: bool) -> None:
        self._tokens, self._every_s, self._ends = tokens, every_s, ends

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Every request is the same one."""

    async def steps(self) -> AsyncIterator[Sequence[StepOutputs]]:
        for number in range(1, self._tokens + 1):
            await asyncio.sleep(self._every_s)
            last = self._ends and number == self._tokens
            output = RequestOutput(
                engine_request_id="a",
                token_ids=[number],
                finish=FinishReason.LENGTH if last else None,
            )
            yield [StepOutputs(rank=0, step=number, at_s=0.0, outputs=[output])]
        await asyncio.sleep(60.0)


async def ran(engine: Any) -> drive.Flight:
    group = drive.Group(engine)
    request = EngineRequest(
        engine_request_id="a", rank=0, token_ids=[1], sampling=Sampling(max_tokens=6)
    )
    return await group.run(request)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "ANSWER_TIMEOUT_S", SILENCE_S)


async def test_a_long_output_takes_as_long_as_it_takes() -> None:
    flight = await ran(Engine(6, 0.4 * SILENCE_S, ends=True))

    assert flight.token_ids == [1, 2, 3, 4, 5, 6]


async def test_a_request_that_falls_silent_is_not_waited_for() -> None:
    with pytest.raises(CheckBroken, match=r"a: nothing for 0\.2 s"):
        await ran(Engine(2, 0.01, ends=False))
