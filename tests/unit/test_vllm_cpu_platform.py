"""What Splitwave's CPU platform undoes of vLLM's choices."""

import os

import pytest

from splitwave.engine.vllm.cpu.platform import SplitwaveCpuPlatform
from splitwave.engine.vllm.switches import FORK


def pinned() -> bool:
    """True if vLLM's NIXL connector would pin the thread that makes it."""
    return any(SplitwaveCpuPlatform.discover_numa_topology())


def test_forked_engines_compute_in_the_thread_of_their_transfers_which_keeps_all_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FORK, "1")

    assert not pinned()


def test_a_worker_process_of_its_own_reserves_a_core_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not os.path.exists("/sys/devices/system/node/node0"):
        pytest.skip("this machine tells of no NUMA node, so vLLM reserves no core")
    monkeypatch.setenv(FORK, "0")

    assert pinned()
