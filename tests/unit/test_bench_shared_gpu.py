"""Ranks that share a GPU in benchmarks."""

import pytest

from bench.shared_gpu import VARIABLE, device, devices
from bench.split_gpu_stack import GPU_GROUP, gpu_group


def test_each_rank_has_its_device() -> None:
    assert devices({}) == []
    assert devices({VARIABLE: "0 0"}) == [0, 0]
    assert [device(rank, {VARIABLE: "2 0"}) for rank in (0, 1)] == [2, 0]
    assert [device(rank, {}) for rank in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match="write a number a rank"):
        devices({VARIABLE: "0,0"})


def test_both_groups_fit_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert gpu_group() == GPU_GROUP

    monkeypatch.setenv(VARIABLE, "0 0")
    shared = gpu_group()
    assert shared["devices"] == "0 0"
    assert 4 * float(shared["gpu_memory_share"]) <= 0.8, "four ranks"
