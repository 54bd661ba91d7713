"""Kernels that were chosen by timing them count by what was chosen."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.config  # noqa: F401  # here, since it takes longer than a test may

from splitwave.engine.vllm.kernels import autotuned

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What vLLM's resolver needs of a model runner, in a process that has timed kernels."""
    from vllm.config import VllmConfig

    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", SimpleNamespace())
    return SimpleNamespace(vllm_config=VllmConfig())


def folder_of(runner: SimpleNamespace) -> Path:
    from vllm.model_executor.warmup import flashinfer_autotune_cache as cache

    found: Path = cache.resolve_flashinfer_autotune_file(runner).parent
    return found


def test_every_ranks_choices_count_by_content(runner: SimpleNamespace) -> None:
    assert autotuned(runner) == {}, "nothing was timed"
    folder = folder_of(runner)
    for rank in (0, 1):
        (folder / f"autotune_configs_dp{rank}_rank0.json").write_text('{"a": 1}')
    (folder / ".autotune_configs_dp1_rank0.json.x.tmp").write_text("{")

    before = autotuned(runner)
    (folder / "autotune_configs_dp1_rank0.json").write_text('{"a": 2}')
    after = autotuned(runner)

    assert list(before) == [
        "kernel.autotuned.autotune_configs_dp0_rank0.json",
        "kernel.autotuned.autotune_configs_dp1_rank0.json",
    ]
    assert [name for name in before if before[name] != after[name]] == [list(before)[1]]


def test_choices_for_other_configurations_do_not_count(
    runner: SimpleNamespace, tmp_path: Path
) -> None:
    assert folder_of(runner).parent == tmp_path
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "autotune_configs_dp0_rank0.json").write_text("{}")

    assert autotuned(runner) == {}


def test_a_process_that_has_no_tuner_asks_for_no_folder(
    runner: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer.autotuner")

    assert autotuned(runner) == {}
    assert list(tmp_path.iterdir()) == []
