"""Engines are started with the folder that their group looks into."""

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # vLLM's launch is untyped here

import pytest
import vllm.v1.engine.utils
import vllm.v1.executor  # `fork` does, and it takes long

from splitwave.engine.vllm.launch import Processes
from splitwave.engine.vllm.switches import FAULTS, WEDGE_DIR
from tests.unit.test_adapter_wedge import settings


async def test_engines_learn_where_their_group_looks_for_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_with: list[str | None] = []

    @contextmanager
    def launched(*_: Any) -> Any:
        started_with.append(os.environ.get(WEDGE_DIR))
        engines = SimpleNamespace(processes=[], shutdown=lambda timeout: None)
        yield SimpleNamespace(engine_manager=engines, coordinator=None)

    monkeypatch.setenv(WEDGE_DIR, "elsewhere")
    monkeypatch.setenv(FAULTS, "stock_coordinator")
    addresses = SimpleNamespace(inputs=["in"], outputs=["out"])
    utils = vllm.v1.engine.utils
    monkeypatch.setattr(utils, "get_engine_zmq_bind_addresses", lambda _config: addresses)
    monkeypatch.setattr(utils, "launch_core_engines", launched)
    monkeypatch.setattr(vllm.v1.executor.Executor, "get_class", lambda _config: None)
    processes = Processes(settings(tmp_path), None)

    processes.fork()

    assert started_with == [str(processes.logs.wedge_dir)]
    await processes.close()
