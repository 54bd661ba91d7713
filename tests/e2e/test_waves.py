"""Waves of real engines: nothing that is lost, stopped or killed makes a group hang."""

import statistics
from pathlib import Path

import pytest

from splitwave.core.wave_message import WaveSettings
from tests.e2e.checks import Report, run_module
from tests.e2e.wave_checks import IDLE_S

CHECKS_LIMIT_S = 280
"""All checks together take a minute on two cores that others use too."""
STEP_S = 0.25
"""More than a step of these groups takes, with a pull before it, on a busy machine."""
EDGE_S = 0.02
"""More than passes from the first word of work to its broadcast; a patience is six times that."""
VOTE_INTERVAL = 4
"""Steps between two votes of vLLM's ranks."""

pytestmark = pytest.mark.timeout(CHECKS_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    scratch = tmp_path_factory.mktemp("waves")
    return run_module("tests.e2e.wave_checks", tiny_model, scratch, CHECKS_LIMIT_S)


def test_vllms_own_coordinator_loses_a_wake_and_the_group_hangs(report: Report) -> None:
    tries = report.of("stock_race")

    assert None in tries, f"no try hung, so the tests below show nothing: {tries}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_same_race_hangs_no_group_of_two_ranks(report: Report, role: str) -> None:
    waits_s = report.of("races")[role]

    assert [wait_s for wait_s in waits_s if wait_s is None or wait_s > 0.25 + STEP_S] == []


def test_the_same_race_hangs_no_group_of_four_ranks(report: Report) -> None:
    wait_s = report.of("four")["race"]

    assert wait_s is not None
    # Four ranks step by turns on the two cores of a small machine.
    assert wait_s <= 0.25 + 4 * STEP_S


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_every_wake_dropped_the_watchdog_wakes_the_group_in_time(
    report: Report, role: str
) -> None:
    seen = report.of("dropped_wakes")[role]
    patience_s = WaveSettings().patience_s

    assert None not in seen["waits_s"]
    assert max(seen["waits_s"]) <= WaveSettings().watchdog_s + STEP_S
    assert min(seen["waits_s"]) >= patience_s, "nothing was dropped"
    assert min(seen["usual_s"]) < patience_s


def test_64_requests_at_once_start_one_wave_with_one_broadcast(report: Report) -> None:
    bursts, alone_s = report.of("burst")["bursts"], report.of("burst")["alone_s"]

    assert [(seen["waves"], seen["starts"]) for seen in bursts] == [(1, 1)] * len(bursts)
    assert statistics.median(seen["first_s"] for seen in bursts) <= max(alone_s) + STEP_S


def test_the_one_broadcast_leaves_as_soon_as_anything_is_heard_of_work(report: Report) -> None:
    seen, patience_s = report.of("burst"), WaveSettings().patience_s

    # Whatever else runs on the machine takes the processor away in one of them, not in all.
    assert 0.0 <= min(burst["edge_s"] for burst in seen["bursts"]) <= EDGE_S
    assert seen["late"]["edge_s"] >= patience_s, "a late broadcast would not be seen"


def test_a_wave_is_accounted_for_in_a_segment(report: Report) -> None:
    (segment,) = report.of("burst")["bursts"][0]["segments"]

    # The rank that was given the request may speak before the client's notice arrives.
    assert segment["why"] in ("first_request", "report")
    assert segment["end"] == "pause"
    assert segment["tokens"] == 64 * (40 + 1), "the prompts, and the second token of each"
    assert segment["steps"] > 2
    assert 1 <= segment["wake"] <= 2


def test_an_idle_group_makes_no_step_and_sends_one_message_a_second_and_rank(
    report: Report,
) -> None:
    seen = report.of("idle")

    assert seen["steps"] == [0, 0]
    assert 0 < seen["messages"] <= 2 * (IDLE_S + 1)


def test_a_last_request_keeps_ranks_stepping_no_longer_than_the_vote_interval(
    report: Report,
) -> None:
    for tokens, steps in report.of("after_the_last").items():
        assert max(steps) <= VOTE_INTERVAL, f"{steps} steps behind a request of {tokens} tokens"


def test_after_64_aborts_nothing_is_reported_any_more(report: Report) -> None:
    seen = report.of("abort_storm")

    assert sum(map(sum, seen["busy"])) == 64
    assert seen["free"]
    assert seen["loads"] == [[0, 0], [0, 0]]


def test_what_a_skewed_batch_costs_is_counted(report: Report) -> None:
    seen = report.of("skew")
    many, few = (padded - tokens for tokens, padded in zip(*seen.values(), strict=True))

    assert seen["tokens"] == [6 * 20, 20]
    assert few >= many + 4 * 15, "the rank of one request steps as wide as that of six"


def test_a_rank_that_is_stopped_for_a_while_goes_on(report: Report) -> None:
    assert report.of("four")["went_on_after_s"] <= 2.0


def test_a_rank_that_stays_stopped_ends_the_epoch_with_that_reason(report: Report) -> None:
    seen = report.of("stopped_for_good")

    assert seen["told"].startswith("EngineDied rank=1 rank 1 (pid ")
    assert "has been stopped by a signal for" in seen["told"]
    assert seen["after_s"] <= 2.0
    assert seen["state"] == "ENDED"


def test_a_killed_rank_ends_the_epoch_with_that_reason(report: Report) -> None:
    seen = report.of("four")["killed"]

    assert seen["told"].startswith("EngineDied rank=3 rank 3 (pid ")
    assert "was killed by SIGKILL" in seen["told"]
    assert seen["after_s"] <= 2.0
    assert seen["state"] == "ENDED"


def test_a_killed_rank_of_a_prefill_group_ends_the_epoch_with_that_reason(report: Report) -> None:
    seen = report.of("prefill_killed")

    assert seen["told"].startswith("EngineDied rank=1 rank 1 (pid ")
    assert "was killed by SIGKILL" in seen["told"]
    assert seen["after_s"] <= 2.0
    assert seen["state"] == "ENDED"


def test_no_process_is_left(report: Report) -> None:
    assert report.of("end") == []
