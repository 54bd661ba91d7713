"""Which rank of a group meets what in a storm of aborts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any  # A bench, down to what a storm reads of it.

import pytest

from splitwave.certify.battery import storms
from splitwave.certify.battery.scale import scale_for
from splitwave.core.evidence import Level
from splitwave.core.mode import Device
from tests.unit.test_certify_judges import SUBJECT

HEAVY_BYTES = 2**30


class Met:
    """Stages that requests of each rank were given up in, and the ranks that were broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stages: dict[int, list[str]] = {}
        self.broken: list[int] = []
        monkeypatch.setattr(storms, "_live", self._live)

    async def _live(self, _rig: object, _case: object, fate: Any, rank: int) -> tuple[int, int]:
        self.stages.setdefault(rank, []).append(fate.stage)
        return 0, 0

    def bench(self, ranks: int, requests: int) -> Any:
        """A bench on a group that answers at once."""
        smoke = scale_for(Level.SMOKE, Device.CPU, weights_bytes=HEAVY_BYTES)
        group = SimpleNamespace(counters=_none)
        rig = SimpleNamespace(
            ranks=lambda: range(ranks), settled=_settled, prefill=group, decode=group
        )
        return SimpleNamespace(
            scale=replace(smoke, abort_requests=requests), subject=SUBJECT, rig=rig,
            broken=self._broken,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _broken(self, _what: object, rank: int) -> AsyncIterator[None]:
        self.broken.append(rank)
        yield


async def _none() -> list[object]:
    return []


async def _settled() -> bool:
    return True


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    return Met(monkeypatch)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
def test_the_rank_that_keeps_blocks_has_a_request_that_is_not_given_up(
    met: Met, ranks: int
) -> None:
    fewest = scale_for(Level.SMOKE, Device.CPU, weights_bytes=HEAVY_BYTES).abort_requests

    asyncio.run(storms.AbortStorm().observe_broken(met.bench(ranks, fewest)))

    (rank,) = met.broken
    assert "never" in met.stages[rank]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_rank_meets_every_stage(met: Met, ranks: int) -> None:
    asyncio.run(storms.AbortStorm().observe(met.bench(ranks, 64)))

    assert {rank: set(stages) for rank, stages in met.stages.items()} == {
        rank: set(storms.STAGES) for rank in range(ranks)
    }
