"""Whether the n-th long prompt is as fast as the second, judged from times."""

import pytest

from bench.repeated import CROWDS, compared, evened, lengths, parser

QUIET = [100.0 + 0.1 * (n % 3) for n in range(20)]


def test_equal_times_are_no_drift() -> None:
    found = compared(QUIET, 1.05)

    assert found["ok"]
    assert found["ratio_value"] == pytest.approx(1.0, abs=0.005)


def test_a_first_request_that_pays_for_caches_is_not_counted() -> None:
    assert compared([5000.0, *QUIET[1:]], 1.05)["ok"]


def test_requests_that_become_slower_are_seen() -> None:
    late = [ms * (1.0 if at < 10 else 1.2) for at, ms in enumerate(QUIET)]

    found = compared(late, 1.05)

    assert not found["ok"]
    assert found["ratio_low"] > 1.1


def test_a_creeping_slowdown_is_seen() -> None:
    assert not compared([100.0 * 1.02**at for at in range(20)], 1.05)["ok"]


def test_what_differs_with_the_crowd_is_not_taken_for_drift() -> None:
    by_crowd = [100.0 + 40.0 * CROWDS[at % len(CROWDS)] for at in range(20)]

    assert set(evened(by_crowd)) == {1.0}
    assert compared(by_crowd, 1.05)["ok"]


def test_few_requests_prove_nothing() -> None:
    found = compared(QUIET[:8], 1.05)

    assert not found["ok"]
    assert "early" in found["why"]


def test_the_control_asks_longer_prompts_from_the_middle_on() -> None:
    words = ["--device", "cpu", "--out", "x", "--work-dir", "y", "--prompt-tokens", "100"]

    assert lengths(parser().parse_args(words)) == [100] * 20
    assert lengths(parser().parse_args([*words, "--control"])) == [100] * 10 + [140] * 10
