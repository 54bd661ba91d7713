"""The adapter on real engines: a prefill group, and a decode group of two ranks with EP."""

import json
from pathlib import Path
from typing import Any  # JSON

import pytest

from tests.e2e.adapter_cases import cases
from tests.e2e.driven import RUN_LIMIT_S, drive

NAMES = [case.name for case in cases()]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(scope="module")
def report(out: Path, tiny_model: Path) -> dict[str, Any]:
    """Run the driver once."""
    return drive("tests.e2e.adapter_driver", tiny_model, out)


@pytest.fixture(scope="module")
def aggregated(out: Path, report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "aggregated.json").read_text())
    return found


@pytest.mark.timeout(RUN_LIMIT_S + 30)
def test_both_groups_start_from_one_import(report: dict[str, Any]) -> None:
    print(json.dumps({k: report[k] for k in ("preload", "boot_s", "cpu_s", "wall_s", "speed")}))  # noqa: T201  # the figures, with -s
    assert report["preload"]["threads"] == 1
    assert report["progress"][-1] == "0: engine initialised"
    assert report["layouts"][0] == report["layouts"][1]


@pytest.mark.parametrize("when", ["one_by_one", "at_once"])
@pytest.mark.parametrize("name", NAMES)
def test_disaggregated_tokens_equal_aggregated_ones(
    report: dict[str, Any], aggregated: dict[str, Any], name: str, when: str
) -> None:
    ours, theirs = report["equality"][when][name], aggregated[name]

    assert ours["tokens"] == theirs["tokens"]
    assert ours["finish"] == theirs["finish"]
    assert ours["failure"] is None


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("logprobs")])
def test_log_probabilities_agree(
    report: dict[str, Any], aggregated: dict[str, Any], name: str
) -> None:
    ours, theirs = report["equality"]["one_by_one"][name], aggregated[name]
    wanted = next(case.sampling.logprobs for case in cases() if case.name == name)

    assert len(ours["logprobs"]) == len(theirs["logprobs"]) == len(ours["tokens"])
    for token, (chosen, logprob, rank, top), expected in zip(
        ours["tokens"], ours["logprobs"], theirs["logprobs"], strict=True
    ):
        assert chosen == token
        assert rank == 1
        assert len(top) == wanted
        assert logprob == pytest.approx(expected[str(chosen)], abs=1e-3)
        assert dict(top) == pytest.approx(
            {int(k): v for k, v in expected.items() if int(k) in dict(top)}, abs=1e-3
        )


@pytest.mark.parametrize(
    ("name", "token"),
    [("eos at the first token", 259), ("min_tokens holds a stop token back", 7)],
)
def test_the_token_that_ended_a_generation_is_named(
    report: dict[str, Any], name: str, token: int
) -> None:
    ours = report["equality"]["one_by_one"][name]

    assert ours["stop_token_id"] == token == ours["tokens"][-1]


def test_decode_computed_no_prompt_token(report: dict[str, Any]) -> None:
    assert [c["prefill_tokens_computed"] for c in report["counters"]] == [0, 0]
    assert {kind for c in report["counters"] for kind in c["steps_by_kind"]} == {"eager"}
    assert report["first_position_min"] >= 1


def test_bytes_pulled_are_those_of_the_blocks_handed_over(report: dict[str, Any]) -> None:
    pulled = sum(c["bytes_pulled"] for c in report["counters"])
    # The refused one-token request handed its block over for nothing; aborted pulls vary.
    expected = (report["blocks_handed_over"] - 1) * report["block_bytes"]
    assert pulled - report["aborts"]["bytes_pulled"] == expected


def test_nothing_follows_an_abort_and_nothing_stays_held(report: dict[str, Any]) -> None:
    found = report["aborts"]

    assert found["outputs_after_abort"] == 0
    assert found["decode_free"]
    assert found["pulls_free"]
    assert found["prefill_free"]


def test_the_end_of_each_aborted_pull_is_told_once(report: dict[str, Any]) -> None:
    found = report["aborts"]

    assert found["given_up_while_pulling"] >= 3
    assert found["pulls_ended_as_given_up"]


def test_a_cached_prompt_beginning_is_told(report: dict[str, Any]) -> None:
    assert report["cached_tokens_max"] > 0
    assert report["cached_tokens_max"] % 32 == 0


def test_a_release_works_at_any_time(report: dict[str, Any]) -> None:
    found = report["releases"]

    assert found["held_blocks"] == found["used_while_held"] == 7
    assert found["freed"]
    assert found["freed_after_s"] < 2
    assert found["early_tokens"] == 1
    assert not found["early_holds"]
    assert found["stopped"] == "stop"
    assert found["free_at_last"]


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("no token", "invalid_request"),
        ("too long", "invalid_request"),
        ("unknown token", "invalid_request"),
        ("temperature", "invalid_request"),
        ("logit bias", "invalid_request"),
        ("logprobs", "invalid_request"),
        ("rank", "internal"),
        ("no pull", "internal"),
        ("one token from decode", "internal"),
        ("used twice", "internal"),
    ],
)
def test_a_bad_request_ends_alone(report: dict[str, Any], why: str, reason: str) -> None:
    found = report["refusals"][why]

    assert found["failure"] == reason
    assert found["message"]
    assert found.get("outputs_after", 0) == 0


def test_the_engines_live_on_after_bad_requests(
    report: dict[str, Any], aggregated: dict[str, Any]
) -> None:
    assert report["refusals"]["afterwards"]["tokens"] == aggregated[NAMES[3]]["tokens"]


def test_a_killed_process_is_told_within_a_second(report: dict[str, Any]) -> None:
    found = report["deaths"]["rank"]

    assert found["told"].startswith("EngineDied rank=1 ")
    assert "was killed by SIGKILL" in found["told"]
    assert str(found["pid"]) in found["told"]
    assert not found["told"].endswith("log=0")
    assert found["after_s"] < 1


def test_a_dead_group_answers_no_call(report: dict[str, Any]) -> None:
    assert report["deaths"]["call after death"] == "1"


def test_a_start_is_bounded(report: dict[str, Any]) -> None:
    message, rank, _ = report["deaths"]["starts"]["late"]

    assert "rank 0 was not ready after 0.3 s" in message
    assert rank == 0


def test_a_failed_start_says_which_rank_and_why(report: dict[str, Any]) -> None:
    message, rank, log_tail = report["deaths"]["starts"]["broken weights"]

    assert "exited with status 1" in message
    assert rank in (0, 1)
    assert "safetensor" in log_tail.lower()


def test_a_model_that_vllm_does_not_know_is_refused_before_any_fork(
    report: dict[str, Any],
) -> None:
    message, _, _ = report["deaths"]["starts"]["unknown architecture"]

    assert message.startswith("settings: vLLM refuses them: ")
    assert "NoSuchModel" in message


def test_a_start_can_be_cancelled(report: dict[str, Any]) -> None:
    assert report["deaths"]["starts"]["cancelled"]


def test_close_leaves_no_process(report: dict[str, Any]) -> None:
    assert report["deaths"]["left"] == []
    assert report["close"]["told"] == "closed"
    assert report["close"]["left"] == []
    assert report["close"]["children"] == []
    # A tenth of the lease: far above what a busy machine needs to end processes.
    assert report["close"]["after_s"] < 60, "a lease that lives must not delay the end"
