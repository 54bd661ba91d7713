"""The plain engine that tokens are compared with: how it is started beside a group."""

# ruff: noqa: SLF001  # the parts of a call that starts a real engine

import asyncio
import json
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from splitwave.core.generation import Sampling
from splitwave.engine.vllm import aggregated
from splitwave.engine.vllm.aggregated import PlainSettings, Question

CONFIG = {
    "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> PlainSettings:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return PlainSettings(
        model_path=tmp_path, dtype="bfloat16", block_size_tokens=32, length_max_tokens=256
    )


@pytest.mark.parametrize(("is_cpu", "method"), [(True, "fork"), (False, "spawn")])
def test_on_gpus_nothing_of_the_process_that_asks_is_inherited(
    monkeypatch: pytest.MonkeyPatch, settings: PlainSettings, is_cpu: bool, method: str
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _self: is_cpu)

    assert aggregated._context().get_start_method() == method

    told = settings, [Question((1, 2), Sampling(max_tokens=3))]
    assert pickle.loads(pickle.dumps(told)) == told  # as a spawned process is told


def test_on_gpus_it_takes_no_more_than_its_cache(settings: PlainSettings) -> None:
    here, there = (aggregated._arguments(settings, is_cpu=is_cpu) for is_cpu in (True, False))

    assert "gpu_memory_utilization" not in here
    assert EngineArgs(**there).gpu_memory_utilization < 0.1
    assert there["kv_cache_memory_bytes"] == here["kv_cache_memory_bytes"] >= 64 * 2**20


def test_a_groups_variables_do_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, settings: PlainSettings
) -> None:
    of_a_group = {
        "SPLITWAVE_WORST_TOKEN": "v2", "SPLITWAVE_HANDOVERS": "1", "SPLITWAVE_PROBE": "1",
        "SPLITWAVE_MODE": "decode_graph_ht", "SPLITWAVE_FAULTS": "poison_padding",
    }  # fmt: skip
    for name, value in of_a_group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    seen: list[set[str]] = []

    def made(_arguments: object) -> None:
        seen.append(of_a_group.keys() & os.environ.keys())
        raise LookupError

    monkeypatch.setattr(LLMEngine, "from_engine_args", made)
    with pytest.raises(LookupError):
        aggregated._answer_all(settings, [])
    assert seen == [set()]


def test_a_plain_engine_ends_with_a_battery_that_is_killed(
    monkeypatch: pytest.MonkeyPatch, settings: PlainSettings
) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def answer_all(*_: object) -> NoReturn:
        theirs.send(os.getpid())
        time.sleep(60)
        raise AssertionError

    monkeypatch.setattr(aggregated, "_answer_all", answer_all)
    battery = fork.Process(target=lambda: asyncio.run(aggregated.answer(settings, [])))
    battery.start()
    plain = psutil.Process(ours.recv())

    battery.kill()

    _, left = psutil.wait_procs([plain], timeout=10.0)
    for process in left:
        process.kill()
    battery.join()
    assert not left
