"""Each client that docs/clients.md names does what the page says, by the page's own commands."""

import re

import pytest

from tests.clients.conftest import smg_in_front
from tests.clients.documented import PAGE, Target, blocks, run
from tests.clients.environments import version

SMALL = ("openai", "buf", "smg", "vllm-bench")
"""Run from here, and against the demo stack; the larger ones there only, and by name."""
LARGE = ("lm-eval", "aiperf")


def test_every_documented_block_is_run_somewhere() -> None:
    assert {name for kind, name in blocks() if kind == "run"} == {*SMALL, *LARGE}
    assert {name for kind, name in blocks() if kind == "serve"} == {"smg"}


@pytest.mark.parametrize("name", ["openai", "buf", "smg", "lm-eval", "aiperf"])
def test_the_documented_version_is_the_pinned_one(name: str) -> None:
    row = re.search(rf"^\| \[{name}\]\(.*?\) \| ([\w.]+) \|", PAGE.read_text(), re.M)

    assert row is not None
    assert row[1] == version(name)


def test_openai(target: Target) -> None:
    said = run("openai", target).splitlines()

    assert said[-1] == "model_not_found model"
    assert said[-2] == "8"  # The stream's usage.


def test_buf_curl_by_reflection(target: Target) -> None:
    said = run("buf", target)

    assert "splitwave.v1alpha1.GenerateService\nvllm.grpc.engine.VllmEngine\n" in said
    assert f'"name": "{target.model}"' in said
    assert '"status": "SERVING"' in said
    assert '"finishReason": "FINISH_REASON_LENGTH"' in said
    (ids,) = re.findall(r'"outputIds": \[(.*?)\]', said, re.S)
    assert len(ids.split(",")) == 4


def test_smg_in_front(target: Target) -> None:
    with smg_in_front(target) as front:
        said = run("smg", front)

    assert '"completion_tokens":8' in said
    assert '"finish_reason":"length"' in said


@pytest.mark.timeout(600)
def test_vllm_bench_serve(target: Target) -> None:
    said = run("vllm-bench", target, 540.0)  # It imports vLLM twice.

    assert re.findall(r"Successful requests:\s+(\d+)", said) == ["8", "8"]
    assert re.findall(r"Failed requests:\s+(\d+)", said) == ["0", "0"]
    assert re.findall(r"Total generated tokens:\s+(\d+)", said) == [str(8 * 8)] * 2
