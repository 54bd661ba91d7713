"""Expert parallelism over two CPU ranks in lock-step gives the tokens of one engine."""

import math
from pathlib import Path

import pytest

from tests.e2e.checks import BLOCK_SIZE_TOKENS, Report, run_module

CHECKS_LIMIT_S = 300
"""All checks together take a minute and a half on two idle cores, compilation included."""

pytestmark = pytest.mark.timeout(CHECKS_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    scratch = tmp_path_factory.mktemp("cpu_ep")
    return run_module("tests.e2e.cpu_ep_checks", tiny_model, scratch, CHECKS_LIMIT_S)


def test_two_ranks_with_experts_apart_give_the_tokens_of_one_engine(report: Report) -> None:
    one_engine, two_ranks = report.of("aggregated")

    assert len(one_engine) == 24
    assert [i for i, tokens in enumerate(two_ranks) if tokens != one_engine[i]] == []
    assert len({tuple(tokens) for tokens in one_engine}) == 24, "tells nothing apart"


def test_compiled_decode_ranks_give_the_tokens_of_one_eager_engine(report: Report) -> None:
    one_engine, _ = report.of("aggregated")
    seen = report.of("compiled")

    assert [i for i, tokens in enumerate(seen["tokens"]) if tokens != one_engine[i]] == []
    assert [set(rank["steps_by_kind"]) for rank in seen["counters"]] == [{"compiled"}] * 2


def test_every_pair_of_ranks_hands_over_the_tokens_of_one_engine(report: Report) -> None:
    one_engine, _ = report.of("aggregated")
    split = report.of("handed_over")["tokens"]

    assert [i for i, tokens in enumerate(split) if tokens != one_engine[i]] == []


def test_each_rank_pulls_exactly_its_prompts_blocks(report: Report) -> None:
    seen = report.of("handed_over")

    block_bytes = set(seen["block_bytes"])
    assert len(block_bytes) == 1
    assert [pulled["bytes"] for pulled in seen["pulled"]] == [
        math.ceil(length / BLOCK_SIZE_TOKENS) * next(iter(block_bytes))
        for length in seen["lengths"]
    ]


def test_idle_ranks_take_one_step_together_when_all_are_asked(report: Report) -> None:
    for rank in report.of("warm"):
        assert (rank["steps_by_kind"], rank["dummy_steps"]) == ({"eager": 1}, 1)


def test_refusals_in_lock_step_are_said_once_and_clear_the_balancer(report: Report) -> None:
    seen = report.of("refused_in_lock_step")

    assert seen["refused"] == [["ABORT", "guard:needs_prefill", 1, 0]] * 8
    assert seen["beside_work"], "the other rank was idle: nothing was shown"
    assert seen["busy"] == ["LENGTH", None, 1, 200]
    assert seen["in_flight"] == 0


def test_a_release_frees_its_rank(report: Report) -> None:
    assert report.of("released") == [0, 0]


def test_ranks_step_together_and_decode_computes_no_prompt(report: Report) -> None:
    for group in report.of("counters").values():
        assert group[0]["steps_by_kind"] == group[1]["steps_by_kind"]
        assert all(rank["blocks_used"] == 0 for rank in group)
    decode = report.of("counters")["decode"]
    assert [rank["prefill_tokens_computed"] for rank in decode] == [0, 0]
    assert all(rank["dummy_steps"] > 0 for rank in decode)
