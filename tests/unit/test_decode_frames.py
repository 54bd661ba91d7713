"""When a frame is complete, and what may be in it."""

import asyncio
from dataclasses import replace

import pytest

from services.decode.frames import LockStep
from splitwave.core.session import Cancel
from splitwave.engine.sim import SimFaults
from tests.sim.virtual_loop import VirtualLoop, run
from tests.unit.hand_router import HandRouter, Heard
from tests.unit.worker_rig import DECODE, DECODE_CONFIG, GREEDY, PREFILL, rig, right_answer

APART = replace(
    DECODE,
    ranks=3,
    lockstep=False,
    faults=SimFaults(slow_step_rate=0.3, slow_step_factor=7.0),
)
"""Ranks that come at different times, as outputs of a real lock-step do."""


def test_a_lock_step_is_complete_when_all_stepping_ranks_are_in() -> None:
    step = LockStep()
    assert step.arrived(0, 5)  # Nobody else is known to step.
    step.flushed()
    assert not step.arrived(1, 5)  # Rank 0 stepped last time, so it is awaited.
    assert step.arrived(0, 5)
    step.flushed()

    assert not step.arrived(0, 0)  # It is in, and runs nothing any more.
    assert step.arrived(1, 5)
    step.flushed()
    assert step.arrived(1, 5)


def test_a_rank_that_comes_again_begins_the_next_lock_step() -> None:
    step = LockStep()
    step.arrived(0, 5)
    step.flushed()
    assert not step.arrived(1, None)
    assert step.begins_anew(1)
    assert not step.begins_anew(0)


def test_a_rank_that_did_not_come_is_not_awaited_again() -> None:
    step = LockStep()
    step.arrived(0, 5)
    step.arrived(1, 5)
    step.flushed()
    assert not step.arrived(0, 5)
    step.flushed()  # The wait was over.
    assert step.arrived(0, 5)


@pytest.mark.parametrize("wait_s", [0.001, 0.02])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_apart_and_cancels_at_any_time_never_mix_up_slots(seed: int, wait_s: float) -> None:
    async def main() -> None:
        config = replace(DECODE_CONFIG, frame_wait_s=wait_s)
        async with rig(PREFILL, APART, decode_config=config) as r:
            router = HandRouter()
            r.connect(router)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            heard: dict[str, Heard] = {}
            cancelled: set[str] = set()
            sampling = replace(GREEDY, max_tokens=40)
            for n in range(60):
                name = f"a{n}/0/1"
                heard[name] = await r.start_one(router, name, [n + 1] * 20, sampling)
                await asyncio.sleep(loop.rng.random() * 0.02)
                victim = f"a{loop.rng.randrange(n + 1)}/0/1"
                if loop.rng.random() < 0.5 and victim not in cancelled:
                    cancelled.add(victim)
                    router.send(Cancel((victim,)))
            await asyncio.sleep(3.0)

            for n, (name, each) in enumerate(heard.items()):
                right = right_answer([n + 1] * 20, sampling)
                assert each.offsets == list(range(len(each.token_ids)))
                assert each.token_ids == right[: len(each.token_ids)]
                assert name in cancelled or each.ended is not None
            r.check()
            assert r.is_empty()

    run(main(), seed=seed)
