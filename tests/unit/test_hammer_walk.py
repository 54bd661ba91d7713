"""The walk of the hammer: complete, ragged, skewed within its budget, the same everywhere."""

import dataclasses
import math

import pytest

from splitwave.certify.hammer.walk import (
    WalkSettings,
    pair_counts,
    pair_minimum,
    plan,
    skew_figures,
)

SIZES = (64, 128, 192, 256)
SETTINGS = WalkSettings(sizes=SIZES, replays=3000, seed=7, skew_budget_s=2.0)


def test_every_ordered_pair_of_sizes_follows_one_another_fifty_times() -> None:
    for seed in range(20):
        steps = plan(dataclasses.replace(SETTINGS, seed=seed))

        assert len(steps) == 3000
        assert pair_minimum(steps, SIZES) >= 50
        assert set(pair_counts(steps)) == {(a, b) for a in SIZES for b in SIZES}


def test_the_pairs_come_first_so_that_a_run_cut_short_has_them() -> None:
    steps = plan(SETTINGS)[: 50 * 16 + 1]

    assert set(pair_counts(steps).values()) == {50}


@pytest.mark.parametrize(("replays", "rounds"), [(1, 0), (16, 0), (17, 1), (100, 6), (801, 50)])
def test_a_short_walk_has_as_many_of_each_pair_as_fit(replays: int, rounds: int) -> None:
    steps = plan(dataclasses.replace(SETTINGS, replays=replays))

    assert len(steps) == replays
    assert pair_minimum(steps, SIZES) == rounds


def test_a_single_size_follows_itself() -> None:
    steps = plan(dataclasses.replace(SETTINGS, sizes=(8,), replays=60))

    assert pair_counts(steps) == {(8, 8): 59}


def test_equal_settings_make_equal_walks_and_another_seed_another() -> None:
    assert plan(SETTINGS) == plan(dataclasses.replace(SETTINGS))
    assert plan(SETTINGS) != plan(dataclasses.replace(SETTINGS, seed=8))


def test_real_tokens_differ_between_ranks_and_reach_both_ends() -> None:
    steps = plan(SETTINGS)

    assert all(0 <= n <= step.size for step in steps for n in step.tokens)
    assert all(max(step.tokens) > 0 for step in steps)
    assert sum(step.tokens[0] != step.tokens[1] for step in steps) > 0.8 * len(steps)
    for size in SIZES:
        seen = {n for step in steps if step.size == size for n in step.tokens}
        assert {0, 1, size - 1, size} <= seen


def test_one_rank_is_idle_now_and_then_and_never_if_not_asked() -> None:
    idle = sum(min(step.tokens) == 0 for step in plan(SETTINGS))
    never = plan(dataclasses.replace(SETTINGS, idle_share=0.0))

    assert 0.01 < idle / SETTINGS.replays < 0.03
    assert min(min(step.tokens) for step in never) == 1


def test_skews_stay_within_their_budget_and_use_it() -> None:
    figures = skew_figures(plan(SETTINGS))

    assert 1000 * SETTINGS.skew_budget_s * 0.8 < figures["total_ms"] <= 2000
    assert 18 < figures["max_ms"] <= 20


def test_a_budget_for_more_than_every_replay_skews_every_replay() -> None:
    steps = plan(dataclasses.replace(SETTINGS, skew_budget_s=1e6))

    assert skew_figures(steps)["count"] == 3000
    assert {step.skew.rank for step in steps if step.skew} == {0, 1}
    assert {step.skew.late for step in steps if step.skew} == {"host", "gpu", "both"}


def test_no_skew_at_all_can_be_asked_for() -> None:
    still = dataclasses.replace(SETTINGS, skew_ms_max=0.0)
    broke = dataclasses.replace(SETTINGS, skew_budget_s=0.0)

    assert [skew_figures(plan(silent))["count"] for silent in (still, broke)] == [0, 0]


def test_factors_are_signed_powers_of_two() -> None:
    factors = {step.factor for step in plan(SETTINGS)}

    assert {math.frexp(abs(factor))[0] for factor in factors} == {0.5}
    assert len(factors) == 26


def test_eager_dispatches_come_as_often_as_asked() -> None:
    share = 0.125
    steps = plan(dataclasses.replace(SETTINGS, eager_share=share))

    assert 0.1 < sum(step.eager for step in steps) / len(steps) < 0.15
    assert not any(step.eager for step in plan(SETTINGS))


def test_fifty_thousand_replays_fit_their_time() -> None:
    steps = plan(WalkSettings(sizes=SIZES, replays=50_000, seed=1, skew_budget_s=72.0))

    assert pair_minimum(steps, SIZES) > 2500
    assert skew_figures(steps)["total_ms"] <= 72_000
    assert skew_figures(steps)["count"] > 6000


def test_the_group_agrees_on_each_graph_unless_told_otherwise() -> None:
    agreed = plan(SETTINGS)
    astray = plan(dataclasses.replace(SETTINGS, astray_share=0.5))

    assert all(step.size_of(rank) == step.size for step in agreed for rank in (0, 1))
    strays = [step for step in astray if step.size_of(0) != step.size_of(1)]
    assert 0.3 < len(strays) / len(astray) < 0.45
    assert all(n <= step.size_of(rank) for step in astray for rank, n in enumerate(step.tokens))


def test_a_synchronised_dispatch_sends_fewer_tokens_than_the_replay_before_it() -> None:
    for step in plan(SETTINGS):
        assert min(step.eager_tokens) >= 1
        assert sum(step.eager_tokens) < sum(step.tokens) or sum(step.tokens) <= 2
