"""What a simulated group tells of its waves: as a group with a coordinator does."""

from dataclasses import replace

import pytest

from splitwave.core.worker import RankCounters
from splitwave.engine.port import Role
from splitwave.engine.sim import SimSettings, start_sim_group
from splitwave.engine.sim.waves import SimWaves

COUNTED = RankCounters(
    rank=0, steps_by_kind={"eager": 4}, dummy_steps=1, prefill_tokens_computed=9, pulls=0,
    bytes_pulled=0, leases_live=0, blocks_used=0,
)  # fmt: skip


def test_a_group_s_waves_are_told_as_they_begin_and_end() -> None:
    waves, ranks = SimWaves(1), [(COUNTED, 3, 1), (replace(COUNTED, rank=1), 0, 0)]
    counted = [each for each, _, _ in ranks]

    before = waves.status(ranks)
    waves.begin(counted, 1.0)
    during = waves.status(ranks)
    waves.end(counted, 2.0)
    after = waves.status(ranks)

    assert [(x.state, x.wave, x.waves, x.why) for x in (before, during, after)] == [
        ("paused", 0, 0, ""), ("running", 0, 1, "first_request"), ("paused", 1, 1, "first_request"),
    ]  # fmt: skip
    assert [(x.rank, x.stepping, x.waiting, x.running) for x in during.ranks] == [
        (0, True, 1, 2), (1, True, 0, 0),
    ]  # fmt: skip
    assert during.ranks[0].work.steps_by_kind == {"eager": 4}
    assert not after.ranks[0].stepping


@pytest.mark.parametrize("lockstep", [True, False])
async def test_only_ranks_that_step_together_have_waves(lockstep: bool) -> None:
    engine = await start_sim_group(SimSettings(role=Role.DECODE, ranks=2, lockstep=lockstep))
    try:
        waves = engine.waves()
        assert (waves is not None) is lockstep
        assert waves is None or len(waves.ranks) == 2
    finally:
        await engine.close()
