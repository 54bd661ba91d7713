"""Walks through batch sizes: every order, ragged, and the bursts of a storm."""

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any  # a bench that is none

import pytest

from splitwave.certify.battery import sizes
from splitwave.certify.battery.verdict import CheckBroken
from splitwave.certify.battery.walks import (
    every_order,
    orders_missing,
    parts,
    ragged,
    raggedness,
    raggedness_seen,
    spread,
    storm,
    stretch,
)
from splitwave.core.envelope import Envelope, Traffic


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 33])
def test_every_size_follows_every_size_in_the_shortest_walk(count: int) -> None:
    sizes = [8 * place + 1 for place in range(count)]

    walk = every_order(sizes)

    assert orders_missing(sizes, walk) == set()
    assert len(walk) == count * count + 1


@pytest.mark.parametrize("steps_max", [2, 7, 10, 99])
def test_a_walk_in_parts_has_every_order_too(steps_max: int) -> None:
    walk = every_order([1, 2, 3])

    cut = parts([walk, walk], steps_max)

    pairs = [pair for part in cut for pair in itertools.pairwise(part[0])]
    assert sorted(pairs) == sorted(itertools.pairwise(walk))
    assert all(len(part) == 2 and part[0] == part[1] for part in cut)
    assert max(len(part[0]) for part in cut) == min(steps_max, len(walk))


def test_a_part_in_which_all_ranks_are_idle_is_no_walk() -> None:
    assert parts([[1, 0, 0, 2], [0, 0, 0, 3]], 2) == [[[1, 0], [0, 0]], [[0, 2], [0, 3]]]


class Walked:
    """Stands for the walk on a rig: notes the plans, and answers as if all of it had run."""

    def __init__(self) -> None:
        self.plans: list[list[list[int]]] = []

    async def __call__(self, bench: Any, plans: list[list[int]], wrong: None) -> dict[str, Any]:
        self.plans.append(plans)
        return {
            "executed": [[size for size in plan if size] for plan in plans],
            "raggedness": 1.0 if len(self.plans) == 1 else 0.0,
            "differences": [len(self.plans)],
        }


def bench(output_max_tokens: int) -> Any:
    traffic = Traffic(output_max_tokens=output_max_tokens)
    envelope = Envelope(
        ranks=2, step_max_tokens=4, seats_max=4, prompt_max_tokens=96,
        sequence_max_tokens=128, traffic=traffic,
    )  # fmt: skip
    return SimpleNamespace(subject=SimpleNamespace(envelope=envelope))


async def test_a_walk_that_is_longer_than_the_envelopes_outputs_goes_on_with_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked = Walked()
    monkeypatch.setattr(sizes, "walk", walked)
    plan = every_order([1, 2, 3, 4])

    seen = await sizes.walk_in_parts(bench(sizes.SPARE_TOKENS + 10), [plan, plan])

    assert [len(plans[0]) for plans in walked.plans] == [10, 8]
    assert orders_missing([1, 2, 3, 4], seen["executed"][1]) == set()
    assert seen["differences"] == [1, 2]
    assert seen["raggedness"] == pytest.approx(10 / 18)


async def test_an_envelope_whose_outputs_end_before_a_walk_begins_is_told() -> None:
    with pytest.raises(CheckBroken, match="requests of 50 tokens; the envelope has room for 49"):
        await sizes.walk_in_parts(bench(49), [[1], [1]])


def test_a_walk_that_lacks_an_order_is_told() -> None:
    walk = every_order([1, 2, 3])

    assert orders_missing([1, 2, 3], walk[:-1]) == {(walk[-2], walk[-1])}
    assert len(orders_missing([1, 2], [1, 1, 1])) == 3


def test_spread_keeps_both_ends() -> None:
    assert spread(range(1, 17), 4) == [1, 6, 11, 16]
    assert spread([3, 5], 4) == [3, 5]


def test_ranks_of_a_ragged_walk_differ_most_of_the_time_and_reach_every_size() -> None:
    sizes = [0, *range(1, 17)]

    plans = ragged(sizes, 3, 600, 1)

    assert raggedness(plans) > 0.9
    assert [set(plan) == set(sizes) for plan in plans] == [True] * 3
    assert plans == ragged(sizes, 3, 600, 1)
    assert plans != ragged(sizes, 3, 600, 2)


def test_lock_step_is_not_ragged() -> None:
    assert raggedness([[1, 2, 3], [1, 2, 3]]) == 0.0
    assert raggedness([[1, 2], [1, 3]]) == 0.5
    assert raggedness([[], []]) == 0.0


def run(plans: Sequence[Sequence[int]]) -> list[list[tuple[float, int]]]:
    """Logs of a lock-step on a busy machine: ranks end each step in any order."""
    source = random.Random(1)
    logs: list[list[tuple[float, int]]] = [[] for _ in plans]
    for number, of_ranks in enumerate(zip(*plans, strict=True)):
        for log, size in zip(logs, of_ranks, strict=True):
            if size:
                log.append((number + source.random() * 0.99, size))
    return logs


def test_raggedness_is_of_the_steps_that_ran_and_not_of_a_plan() -> None:
    sizes = [1, 2, 3, 4, 5, 6]
    plans = ragged(sizes, 3, 400, 7)

    assert raggedness_seen(run(plans)) == pytest.approx(raggedness(plans))
    assert raggedness_seen(run([plans[0]] * 3)) == 0.0
    assert raggedness_seen([[], []]) == 0.0


def test_a_rank_with_nothing_to_do_is_another_size_and_all_idle_is_none() -> None:
    assert raggedness_seen(run([[4, 4, 4], [4, 0, 0]])) == pytest.approx(2 / 3)
    assert raggedness_seen(run([[4, 0, 4], [4, 0, 4]])) == 0.0


def test_a_walk_is_found_among_a_ranks_steps() -> None:
    steps = [1, 2, 3, 2, 1, 4, 4, 4]

    assert steps[stretch([3, 0, 2, 0, 0, 1], steps)] == [3, 2, 1]
    assert steps[stretch([3, 1], steps)] == steps


def test_a_storm_has_bursts_on_all_ranks_and_gaps_in_which_a_group_pauses() -> None:
    planned = storm(200, 2, 1, pause_s=0.4)

    gaps_s = [gap_s for gap_s, _ in planned if gap_s]
    assert len(planned) == 200
    assert {rank for _, rank in planned} == {0, 1}
    assert sum(gap_s >= 0.4 for gap_s in gaps_s) > len(gaps_s) / 2
    assert len(gaps_s) < 200
