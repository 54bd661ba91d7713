"""Queues of prompt tokens: placement, bound, and how long a refused prompt should wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.queue import RankQueues


def test_a_prompt_goes_where_the_fewest_tokens_wait() -> None:
    queues = RankQueues(ranks=3, batch_max_tokens=100, batches=2)
    ranks = [queues.add(f"c{n}", tokens, 0.0) for n, tokens in enumerate((50, 20, 30, 10, 5))]

    assert [queued.rank for queued in ranks if queued] == [0, 1, 2, 1, 1]


def test_the_bound_holds_but_for_a_prompt_on_an_empty_rank() -> None:
    queues = RankQueues(ranks=1, batch_max_tokens=100, batches=2)
    assert queues.add("big", 900, 0.0) is not None
    assert queues.add("small", 1, 0.0) is None
    queues.remove("big", 0, 1.0, computed=True)
    assert queues.add("a", 150, 1.0) is not None
    assert queues.add("b", 51, 1.0) is None
    assert queues.add("c", 50, 1.0) is not None
    queues.check()


def test_the_retry_time_is_the_surplus_at_the_pace_seen() -> None:
    queues = RankQueues(ranks=1, batch_max_tokens=100, batches=2)
    queues.add("a", 100, 10.0)
    queues.remove("a", 0, 11.0, computed=True)  # 100 tokens a second.
    queues.add("b", 150, 20.0)

    assert queues.add("c", 100, 20.0) is None
    assert queues.retry_after_s(100) == pytest.approx(0.5)


def test_a_prompt_starts_when_it_comes_within_the_next_batch() -> None:
    queues = RankQueues(ranks=1, batch_max_tokens=100, batches=3)
    first = queues.add("a", 60, 0.0)
    second = queues.add("b", 60, 0.0)
    third = queues.add("c", 60, 0.0)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.started_s, second.started_s, third.started_s) == (0.0, 0.0, None)
    queues.remove("a", 0, 2.0, computed=True)
    assert third.started_s == 2.0


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.booleans()), max_size=60),
    st.integers(1, 4),
)
def test_the_queues_keep_their_invariants(moves: list[tuple[bool, int, bool]], ranks: int) -> None:
    queues = RankQueues(ranks=ranks, batch_max_tokens=100, batches=2)
    live: dict[str, int] = {}
    for now, (adds, number, computed) in enumerate(moves):
        if adds or not live:
            queued = queues.add(f"c{now}", number, float(now))
            if queued is not None:
                live[f"c{now}"] = queued.rank
        else:
            name = sorted(live)[number % len(live)]
            queues.remove(name, live.pop(name), float(now), computed=computed)
        queues.check()
        assert queues.retry_after_s(number) > 0
    for name, rank in live.items():
        queues.remove(name, rank, 1e6, computed=False)
    assert queues.tokens == [0] * ranks
