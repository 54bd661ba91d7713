"""Where requests go: two choices, prefill queues, the workers that a router serves."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwave.core.placement import (
    PrefillQueue,
    place_prefill,
    roomier,
    subset,
    two_choices,
)
from splitwave.core.session import GroupLoad

unit = st.floats(0, 1, exclude_max=True)


@given(st.integers(2, 1000), unit, unit)
def test_two_choices_are_two_workers_that_exist(count: int, a: float, b: float) -> None:
    first, second = two_choices(count, a, b)

    assert first != second
    assert {first, second} <= set(range(count))


def test_every_pair_is_chosen_equally_often() -> None:
    steps = [(i + 0.5) / 12 for i in range(12)]

    pairs = Counter(two_choices(4, a, b) for a in steps for b in steps)

    assert len(pairs) == 12
    assert set(pairs.values()) == {12}


def test_one_worker_is_both_choices() -> None:
    assert two_choices(1, 0.9, 0.9) == (0, 0)


ROOM = GroupLoad(seats_free=4, blocks_free=40, asks_waiting=0, draining=False)


@pytest.mark.parametrize(
    "worse",
    [
        dataclasses.replace(ROOM, draining=True, seats_free=99),
        dataclasses.replace(ROOM, asks_waiting=1, seats_free=99),
        dataclasses.replace(ROOM, seats_free=3, blocks_free=99),
        dataclasses.replace(ROOM, blocks_free=39),
    ],
    ids=["draining", "a queue of asks", "fewer seats", "fewer blocks"],
)
def test_a_roomier_worker_is_preferred(worse: GroupLoad) -> None:
    assert roomier(ROOM, worse)
    assert not roomier(worse, ROOM)


def test_a_draining_worker_is_the_last_choice_however_long_the_queues_are() -> None:
    drained = dataclasses.replace(ROOM, draining=True)

    assert not roomier(drained, dataclasses.replace(ROOM, asks_waiting=9, seats_free=0))


def queue(worker_id: str, *queued: int, draining: bool = False) -> PrefillQueue:
    return PrefillQueue(worker_id, list(queued), 100, draining)


def placed(queues: list[PrefillQueue], tokens: int) -> str | None:
    chosen = place_prefill(queues, tokens)
    return None if chosen is None else chosen.worker_id


def test_prefill_goes_where_the_fewest_tokens_wait() -> None:
    assert placed([queue("a", 50, 60), queue("b", 80, 10), queue("c", 60, 50)], 10) == "b"


def test_equal_queues_are_told_apart_by_their_least_loaded_rank() -> None:
    assert placed([queue("a", 50, 50), queue("b", 90, 10)], 10) == "b"


def test_a_prefix_that_a_worker_has_counts_as_work_done() -> None:
    queues = [queue("a", 0), queue("b", 30)]

    warm = place_prefill(queues, 100, affinity_tokens={"b": 80})

    assert warm is queues[1]


def test_own_placements_count_before_the_worker_reports_them_and_never_twice() -> None:
    ours = queue("a", 10)
    ours.placed = {"h1": 40, "h2": 30}

    assert ours.tokens() == 70
    ours.queued_by_rank = [75]
    assert ours.tokens() == 75


def test_draining_and_full_workers_get_nothing() -> None:
    assert placed([queue("a", 0, draining=True)], 1) is None
    assert placed([queue("a", 150)], 51) is None
    assert placed([queue("a", 150)], 50) == "a"


def test_an_idle_worker_takes_a_prompt_of_any_length() -> None:
    assert placed([queue("a", 0)], 10_000) == "a"


sizes = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20))


def workers(count: int) -> list[str]:
    return [f"w{i:03}" for i in range(count)]


@given(sizes)
def test_each_worker_serves_as_many_routers_as_any_other(sizes: tuple[int, int, int]) -> None:
    count, routers, size_max = sizes

    served = Counter(
        worker
        for router in range(routers)
        for worker in subset(workers(count), router, routers, size_max)
    )

    per_worker = [served[worker] for worker in workers(count)]
    assert max(per_worker) - min(per_worker) <= 1
    assert sum(per_worker) == routers * min(size_max, count)


@given(sizes, st.integers(0, 59))
def test_a_worker_that_goes_moves_few_pairs(sizes: tuple[int, int, int], gone: int) -> None:
    count, routers, size_max = sizes
    before = workers(count)
    after = [w for i, w in enumerate(before) if i != gone % count]

    for router in range(routers):
        was = set(subset(before, router, routers, size_max))
        now = set(subset(after, router, routers, size_max))
        assert len(now - was) <= 2


def test_a_small_fleet_is_served_whole() -> None:
    assert subset(["b", "a"], 3, 5, 16) == ["a", "b"]
