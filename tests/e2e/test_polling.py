"""A pull from a prefill engine that is away in a long step, without NIXL's progress thread."""

from pathlib import Path
from typing import Any  # JSON

import pytest

from splitwave.engine.vllm.long_steps import STEP_S
from tests.e2e.driven import RUN_LIMIT_S, drive

pytestmark = pytest.mark.timeout(RUN_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the driver once."""
    return drive("tests.e2e.polling_driver", tiny_model, tmp_path_factory.mktemp("polling"))


@pytest.mark.parametrize("group", ["polled", "not polled"])
def test_decode_was_asked_while_the_step_ran(report: dict[str, Any], group: str) -> None:
    assert 0 < report[group]["asked_s_before_the_steps_end"] < STEP_S


def test_a_pull_does_not_wait_for_the_end_of_a_long_step(report: dict[str, Any]) -> None:
    assert report["polled"]["decoded_s_before_the_steps_end"] > STEP_S / 4


def test_without_the_polls_it_does(report: dict[str, Any]) -> None:
    assert report["not polled"]["decoded_s_before_the_steps_end"] < 0.5


@pytest.mark.parametrize("group", ["polled", "not polled"])
def test_decode_goes_on_from_what_it_pulled(report: dict[str, Any], group: str) -> None:
    assert report[group]["tokens"] == [4, True]
