"""Ratios with their intervals: planted slow-downs are seen, noise is not."""

import random

import pytest

from splitwave.certify.battery.statistics import (
    StepSample,
    TooFewSamples,
    at_equal_size,
    drift,
    growth,
    median_by_size,
    medians_in_parts,
)


def steps(count: int, *, slower: float = 1.0, from_share: float = 0.9) -> list[StepSample]:
    """A soak of three batch sizes whose steps cost 10 ms and 1 ms a token, 20% noise on top."""
    source = random.Random(1)
    return [
        StepSample(
            size := source.choice((1, 4, 8)),
            (0.01 + 0.001 * size)
            * (1.0 + 0.2 * source.random())
            * (slower if place >= from_share * count else 1.0),
        )
        for place in range(count)
    ]


def test_a_steady_soak_has_a_ratio_of_about_one() -> None:
    found = drift(steps(2000))

    assert 0.95 < found.value < 1.05
    assert found.low <= found.value <= found.high
    assert found.high < 1.1


@pytest.mark.parametrize("slower", [1.3, 2.0])
def test_a_planted_slow_down_is_measured(slower: float) -> None:
    found = drift(steps(2000, slower=slower))

    assert found.value == pytest.approx(slower, rel=0.05)
    assert found.high > 1.25


def test_more_of_the_large_batches_at_the_end_is_no_slow_down() -> None:
    early = [StepSample(1, 0.01)] * 90 + [StepSample(8, 0.08)] * 10
    late = [StepSample(1, 0.01)] * 10 + [StepSample(8, 0.08)] * 90
    middle = [StepSample(4, 0.04)] * 800

    assert drift(early + middle + late).value == pytest.approx(1.0)


def test_neighbouring_steps_that_are_slow_together_widen_the_interval() -> None:
    source = random.Random(2)
    alone = [StepSample(4, 0.01 * (2.0 if source.random() < 0.4 else 1.0)) for _ in range(1600)]
    together = [
        StepSample(4, 0.01 * (2.0 if place // 40 % 5 < 2 else 1.0)) for place in range(1600)
    ]

    narrow, wide = drift(alone), drift(together)

    assert wide.high - wide.low >= narrow.high - narrow.low


def test_the_interval_is_the_same_each_time() -> None:
    assert drift(steps(500), seed=3) == drift(steps(500), seed=3)


def test_too_few_steps_are_no_verdict() -> None:
    with pytest.raises(TooFewSamples, match="no batch size has 8 steps"):
        drift(steps(60))
    with pytest.raises(TooFewSamples):
        at_equal_size([StepSample(1, 0.1)] * 9, [StepSample(2, 0.1)] * 9)


def test_dummy_steps_are_no_steps() -> None:
    assert median_by_size([StepSample(0, 9.0), StepSample(2, 0.5)]) == {2: 0.5}


def test_parts_follow_the_commonest_size() -> None:
    rows = [StepSample(2, 0.1)] * 10 + [StepSample(1, 9.0)] * 5 + [StepSample(2, 0.3)] * 5

    assert medians_in_parts(rows, 4) == [0.1, 0.1, None, 0.3]
    assert medians_in_parts([], 2) == [None, None]


def test_growth_leaves_the_warm_up_out() -> None:
    flat = [50.0] * 10 + [100.0] * 90
    leaking = [100.0 + place for place in range(100)]

    assert growth(flat) == 0.0
    assert growth(leaking) == pytest.approx(194.5 / 114.5 - 1.0)
    with pytest.raises(TooFewSamples):
        growth([1.0] * 9)


def test_a_short_soak_compares_more_of_itself() -> None:
    late = steps(140, slower=2.0, from_share=0.8)

    with pytest.raises(TooFewSamples):
        drift(late)
    found = drift(late, share=0.2)

    assert found.value == pytest.approx(2.0, rel=0.1)
    assert drift(steps(140), share=0.2).high < 1.25
