"""Handoffs between real engines over NIXL: tokens, bytes, leases, releases, the guard's ends."""

import math
from pathlib import Path

import pytest

from tests.e2e.checks import BLOCK_SIZE_TOKENS, Report, run_module

CHECKS_LIMIT_S = 200
"""All checks together take about a minute on two idle cores."""
FREED_MAX_S = 1.0
LEASE_S = 600

pytestmark = pytest.mark.timeout(CHECKS_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    scratch = tmp_path_factory.mktemp("connector")
    return run_module("tests.e2e.connector_checks", tiny_model, scratch, CHECKS_LIMIT_S)


def ended(why: str, tokens: int = 0) -> list[object]:
    """One end by the guard after so many tokens."""
    return ["ABORT", f"guard:{why}", 1, tokens]


def finished(tokens: int) -> list[object]:
    return ["LENGTH", None, 1, tokens]


def test_prefills_token_and_decodes_tokens_are_those_of_one_engine(report: Report) -> None:
    rows = report.of("lengths")

    assert [row["length"] for row in rows if row["split"] != row["whole"]] == []
    assert len({tuple(row["whole"]) for row in rows}) == len(rows), "tells nothing apart"


def test_decode_alone_gives_the_tokens_of_one_engine(report: Report) -> None:
    rows = report.of("every_token_from_decode")

    assert [row["length"] for row in rows if row["split"] != row["whole"]] == []


def test_a_pull_moves_exactly_the_prompts_blocks(report: Report) -> None:
    for row in report.of("lengths") + report.of("every_token_from_decode"):
        blocks = math.ceil(row["length"] / BLOCK_SIZE_TOKENS)
        assert row["pulled"]["bytes"] == blocks * row["block_bytes"], row["length"]


def test_decode_begins_behind_what_prefill_computed(report: Report) -> None:
    for row in report.of("lengths"):
        assert row["pulled"]["first_position"] == row["length"]
        assert row["end"] == finished(7)
    for row in report.of("every_token_from_decode"):
        assert row["pulled"]["first_position"] == row["length"] - 1


def test_the_lease_is_told_on_our_clock_and_never_too_long(report: Report) -> None:
    for row in report.of("lengths"):
        assert LEASE_S - 1 < row["lease_left_s"] <= LEASE_S
    assert report.of("release_crossing_expiry")["ended_early_s"] == []


def test_a_release_frees_blocks_of_an_idle_engine_at_once_and_may_be_repeated(
    report: Report,
) -> None:
    seen = report.of("release_when_idle")

    assert seen["held"] == [4 * math.ceil(200 / BLOCK_SIZE_TOKENS), 4]
    assert seen["half"] == seen["held"][0] / 2
    assert seen["freed_s"] is not None
    assert seen["freed_s"] < FREED_MAX_S
    assert seen["after"] == finished(1)


def test_a_forgotten_release_is_seen(report: Report) -> None:
    assert report.of("release_forgotten")["blocks_used"] == math.ceil(40 / BLOCK_SIZE_TOKENS)


def test_a_release_aborts_a_running_request_silently(report: Report) -> None:
    seen = report.of("release_when_running")

    assert seen["ends"] == 0
    assert seen["freed_s"] < FREED_MAX_S


def test_a_release_may_cross_a_pull(report: Report) -> None:
    seen = report.of("release_crossing_a_pull")

    assert sum(seen["finishes"].values()) == 24
    assert seen["prefill_freed_s"] < FREED_MAX_S
    assert seen["decode_freed_s"] < FREED_MAX_S


def test_a_release_may_cross_the_leases_end(report: Report) -> None:
    seen = report.of("release_crossing_expiry")

    assert seen["freed_s"] < FREED_MAX_S
    assert seen["after"] == finished(1)


def test_a_pull_from_an_idle_prefill_engine_ends(report: Report) -> None:
    assert report.of("pull_from_an_idle_prefill") == finished(2)


@pytest.mark.parametrize(
    ("tried", "why"),
    [
        ("no handoff", "needs_prefill"),
        ("two tokens to compute", "needs_prefill"),
        ("position 0", "first_position"),
        ("too few blocks", "bad_handoff"),
        ("no host", "bad_handoff"),
        ("prompt shorter than the handoff", "bad_handoff"),
    ],
)
def test_the_guard_refuses_what_decode_cannot_do(report: Report, tried: str, why: str) -> None:
    assert report.of("guard_refusals")[tried] == ended(why)


def test_a_refusal_leaves_the_engine_and_the_handoff_as_they_were(report: Report) -> None:
    assert report.of("guard_refusals")["good"] == finished(4)


def test_a_failed_pull_ends_its_request_alone(report: Report) -> None:
    seen = report.of("failed_pull")

    assert seen["failed"] == ["ERROR", "guard:pull_failed", 1, 0]
    assert seen["good"] == finished(4)


def test_a_preempted_request_ends_once_and_resumes_with_the_same_tokens(report: Report) -> None:
    rows = report.of("preemption")
    preempted = [row for row in rows if row["end"][1] == "guard:preempted"]

    assert 0 < len(preempted) < len(rows)
    assert all(row["end"][0] == "ABORT" and row["end"][2] == 1 for row in preempted)
    assert all(row["split"] == row["whole"] for row in rows)


def test_an_abort_before_the_first_output_is_answered_once(report: Report) -> None:
    seen = report.of("abort_while_waiting")

    assert set(seen["pull_ends"]) == {1}
    assert seen["prefill_freed_s"] < FREED_MAX_S
    assert seen["decode_freed_s"] < FREED_MAX_S


def test_an_abort_during_a_pull_is_answered_when_the_pull_has_ended(report: Report) -> None:
    seen = report.of("abort_during_the_pull")

    assert seen["during"] == [math.ceil(60 / BLOCK_SIZE_TOKENS), 0], "freed while being written to"
    assert seen["freed_s"] < FREED_MAX_S
    assert (seen["pull_ends"], seen["outputs"]) == (1, 0)


def test_a_pull_that_moved_nothing_ends_its_request(report: Report) -> None:
    assert report.of("nothing_moved") == ended("no_bytes")


def test_decode_computed_no_prompt(report: Report) -> None:
    seen = report.of("counters")["decode"]

    assert seen["prefill_tokens_computed"] == 0
    assert set(seen["steps_by_kind"]) == {"eager"}
    assert seen["bytes_pulled"] > 0
    assert seen["blocks_used"] == 0
    assert seen["guard_refusals"]["needs_prefill"] == 2


def test_prefill_counts_what_it_computed(report: Report) -> None:
    warm, seen = report.of("warm")[0], report.of("counters")["prefill"]

    assert (warm["dummy_steps"], warm["steps_by_kind"]) == (1, {"eager": 1})
    assert seen["prefill_tokens_computed"] > sum(row["length"] for row in report.of("lengths"))
    assert (seen["leases_live"], seen["blocks_used"], seen["pulls"]) == (0, 0, 0)


def test_blocks_are_counted_without_the_placeholder(report: Report) -> None:
    assert report.of("counters")["facts"]["blocks"] == 23
