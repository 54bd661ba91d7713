"""The accuracy check through a real gateway: agreement is seen, and so is routing that is shifted.

The items are asked by HTTP and not by the harness, whose environment is too large for each run;
`make clients-all` has the harness ask them, and `make certify-cpu` does all of it.
"""

import json
from pathlib import Path
from typing import Any  # JSON

import pytest

from services.cli.battery import as_workers_read_it, gateway
from services.cli.plan import Plan, read_experts
from tests.e2e.accuracy_driver import ITEMS
from tests.e2e.driven import RUN_LIMIT_S, drive
from tests.e2e.live_stack import free_ports

pytestmark = pytest.mark.timeout(RUN_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the driver once, with stacks as `splitwave certify` plans them."""
    out = tmp_path_factory.mktemp("accuracy")
    first = free_ports(10)
    plan = Plan(
        model_path=tiny_model,
        served_model=tiny_model.name,
        run_dir=out / "stack",
        experts=read_experts(tiny_model),
        grpc_port=first,
        http_port=first + 1,
        prefill_port=first + 2,
        decode_port=first + 3,
        metrics_port=first + 4,
        side_channel_port=first + 6,
    )
    stacks = gateway(as_workers_read_it(plan, {}), tiny_model, Path("no harness"), Path("none"))
    (out / "gateway.json").write_text(json.dumps(stacks))
    return drive("tests.e2e.accuracy_driver", tiny_model, out)


def test_every_item_is_answered_as_a_plain_engine_answers_it(report: dict[str, Any]) -> None:
    evidence = report["same"]["evidence"]

    assert report["same"]["problems"] == []
    assert evidence["passed"]
    assert evidence["figures"]["items"] == ITEMS
    assert evidence["figures"]["agreement"] == 1.0
    assert evidence["replays"] > ITEMS


def test_routing_that_is_shifted_by_one_expert_is_caught(report: dict[str, Any]) -> None:
    control = report["same"]["evidence"]["control"]

    assert control["was_caught"]
    assert control["figures"]["agreement"] < 0.9


def test_a_stack_that_is_not_the_certified_group_proves_nothing(report: dict[str, Any]) -> None:
    assert report["roles"] == ["decode", "prefill"]
    assert not report["others"]["evidence"]["passed"]
    (problem,) = report["others"]["problems"]
    assert "runs otherwise: version.torch" in problem
