"""Clients against the demo stack as it is: its model, real engines, prefill and decode apart.

What they print is looked at for what the model says, where that is the same on every machine.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitwave.demo_model import DemoModelOptions, Variant, build
from tests.clients.conftest import smg_in_front, stack
from tests.clients.documented import Target, run
from tests.clients.environments import ROOT
from tests.clients.sessions import check_texts, openai_session
from tests.conftest import ALL_CLIENTS
from tests.e2e.live_stack import READY_TIMEOUT_S

SLOW_S = 540.0
pytestmark = pytest.mark.timeout(SLOW_S + READY_TIMEOUT_S + 60.0)
FEW = 8
"""Streams at once: the demo's model is slow."""
MODEL_DIR = os.environ.get("SPLITWAVE_TESTS_DEMO_MODEL", "")
"""Where the model is built already; empty: it is built."""
large = pytest.mark.skipif(not ALL_CLIENTS, reason="NOT RUN: `make clients-all` runs it")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    model = Path(MODEL_DIR) if MODEL_DIR else tmp_path_factory.mktemp("model") / "identical"
    build(model, DemoModelOptions(variant=Variant.IDENTICAL), lambda line: None)
    with stack(model, tmp_path_factory.mktemp("demo")) as started:
        yield started


def test_the_openai_package(demo: Target) -> None:
    said = run("openai", demo)

    assert "The capital of France is Paris" in said.replace("\n", "")
    usage, refusal = said.splitlines()[-2:]
    assert 0 < int(usage) <= 8
    assert refusal == "model_not_found model"
    check_texts(openai_session(demo.http, demo.model, FEW), demo.model)


def test_buf_curl_by_reflection(demo: Target) -> None:
    said = run("buf", demo)

    assert "splitwave.v1alpha1.GenerateService\nvllm.grpc.engine.VllmEngine\n" in said
    assert f'"name": "{demo.model}"' in said
    assert '"status": "SERVING"' in said
    assert '"finishReason": "FINISH_REASON_LENGTH"' in said
    (ids,) = re.findall(r'"outputIds": \[(.*?)\]', said, re.S)
    assert len(ids.split(",")) == 4


def test_smg_in_front(demo: Target) -> None:
    with smg_in_front(demo) as front:
        said = run("smg", front)

    assert '"completion_tokens":8' in said
    assert '"finish_reason":"length"' in said


def test_vllm_bench_serve(demo: Target) -> None:
    said = run("vllm-bench", demo, SLOW_S)  # It imports vLLM twice.

    assert re.findall(r"Successful requests:\s+(\d+)", said) == ["8", "8"]
    assert re.findall(r"Failed requests:\s+(\d+)", said) == ["0", "0"]
    assert re.findall(r"Total generated tokens:\s+(\d+)", said) == [str(8 * 8)] * 2


@large
def test_lm_eval_generates_and_compares_likelihoods(demo: Target) -> None:
    said = run("lm-eval", demo, SLOW_S)

    rows = dict(re.findall(r"^\|(\w+)\s*\|Yaml.*?\|↑\s*\|\s*([\d.]+)\|", said, re.M))
    assert rows.keys() == {"capitals", "colours"}
    assert float(rows["colours"]) == 1.0, "the model knows that much"


@large
def test_aiperf(demo: Target) -> None:
    export = ROOT / "build/aiperf/profile_export_aiperf.json"
    export.unlink(missing_ok=True)  # An earlier run's proves nothing.

    run("aiperf", demo, SLOW_S)

    told = json.loads(export.read_text())
    assert told["request_count"]["avg"] == 8
    assert 0 < told["output_sequence_length"]["avg"] <= 8, "the model may end by itself"
    assert told["time_to_first_token"]["avg"] > 0
