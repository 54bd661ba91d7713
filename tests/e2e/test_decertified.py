"""A step outside the mode on real vLLM: the group drains, its requests go on elsewhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any  # JSON

import pytest

ROOT = Path(__file__).parents[2]
RUN_LIMIT_S = 560
STREAMS, TOKENS = 12, 900

pytestmark = pytest.mark.timeout(RUN_LIMIT_S + 40)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("decertified")
    command = [sys.executable, "-m", "tests.e2e.decertified_driver", str(tiny_model), str(out)]
    done = subprocess.run(
        command, cwd=ROOT, timeout=RUN_LIMIT_S, capture_output=True, text=True, check=False
    )
    logs = [path.read_text(errors="replace")[-3000:] for path in sorted(out.glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stderr[-3000:], *logs])
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def test_every_request_is_finished_though_its_group_was_decertified(report: dict[str, Any]) -> None:
    answers = report["answers"]

    assert [answer.get("error") for answer in answers] == [None] * STREAMS
    assert {len(answer["tokens"]) for answer in answers} == {TOKENS}
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    assert max(answer["attempts"] for answer in answers) > 1, "none went on elsewhere"


def test_one_step_decertifies_the_group_and_the_record_says_which(report: dict[str, Any]) -> None:
    (violation,) = report["violations"]

    assert violation["splitwave.step.kind"] == "eager"
    assert violation["splitwave.mode"] == "decode_cpu_compiled"
    assert violation["splitwave.standing"] == "decertified"
    requests, lengths = violation["splitwave.step.requests"], violation["splitwave.step.lengths"]
    assert 1 <= len(requests) == len(lengths) == violation["splitwave.step.tokens"] <= 4
    assert all(40 < int(length) <= 40 + TOKENS for length in lengths)


def test_the_group_starts_over_in_a_new_epoch_and_its_neighbour_stays(
    report: dict[str, Any],
) -> None:
    (odd_before, other_before), (odd_after, other_after) = report["epochs"]

    assert odd_after > odd_before
    assert other_after == other_before
    assert report["standing"] == ["uncertified", "uncertified"]
    # A busy router may see the end of the worker's process before it reads the reason.
    assert set(report["attempt_errors"]) & {"group_decertified", "worker_lost"}


def test_the_group_that_started_over_runs_its_mode_alone(report: dict[str, Any]) -> None:
    assert {len(answer["tokens"]) for answer in report["again"]} == {20}
    ((compiled,), (eager,)) = report["kinds"]
    assert (set(compiled), set(eager)) == ({"compiled"}, {"eager"})
    assert compiled["compiled"] > 10
    assert report["violating_steps"] == [0, 0]


def test_all_programs_end_well(report: dict[str, Any]) -> None:
    assert report["codes"] == {"prefill": 0, "decode0": 0, "decode1": 0, "router": 0}
