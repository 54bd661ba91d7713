"""What a mode needs of this machine and of vLLM is asked for by name, before anything starts."""

from types import SimpleNamespace

import pytest
import vllm.platforms  # noqa: F401  # here, since it takes longer than a test may
from vllm.config import CompilationMode, CUDAGraphMode

from splitwave.core.mode import lookup
from splitwave.core.mode_rules import breaches
from splitwave.engine.port import Role
from splitwave.engine.vllm import launch
from splitwave.engine.vllm.combination import made
from splitwave.engine.vllm.config import SettingsError
from splitwave.engine.vllm.launch import check_build

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


class Platform:
    """Stands for vLLM's platform of either build; only Splitwave's own may run CPU modes."""

    def __init__(self, *, is_cpu: bool) -> None:
        self.is_cpu = lambda: is_cpu


@pytest.mark.parametrize(
    ("mode", "is_cpu", "has_deep_ep", "lacks"),
    [
        ("decode_graph_ht", True, True, "vLLM's CUDA build (the extra `gpu`), one NVIDIA GPU of"),
        ("decode_cpu_eager", False, True, "vLLM's CPU build (the extra `cpu`)"),
        ("decode_graph_ht", False, False, "the deep_ep package (sgl-deep-ep)"),
        ("decode_graph_ht", False, True, ""),
        ("decode_graph_ag", False, False, ""),
        ("decode_cpu_eager", True, False, ""),
    ],
)
def test_a_mode_that_cannot_run_here_is_refused_with_what_is_missing(
    mode: str, is_cpu: bool, has_deep_ep: bool, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = object() if has_deep_ep else None
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(is_cpu=is_cpu))
    monkeypatch.setattr(launch, "find_spec", lambda name: found)
    monkeypatch.setattr(Platform, "__module__", "splitwave.engine.vllm.cpu.platform")

    if not lacks:
        check_build(lookup(mode))
        return
    with pytest.raises(SettingsError) as refused:
        check_build(lookup(mode))
    assert f"mode: {mode} needs {lacks}" in str(refused.value)


@pytest.mark.parametrize(
    ("compilation", "broken"),
    [(CompilationMode.NONE, []), (CompilationMode.VLLM_COMPILE, ["compilation_config.mode"])],
)
def test_graphs_that_vllm_compiles_behind_the_mode_are_refused(
    compilation: CompilationMode, broken: list[str]
) -> None:
    mode = lookup("decode_graph_ag")
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=2, enable_expert_parallel=True, enable_dbo=False, enable_eplb=False,
            pipeline_parallel_size=1, all2all_backend="allgather_reducescatter",
            dbo_prefill_token_threshold=512, distributed_executor_backend="uni",
            dp_sync_interval=16,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=16, max_num_batched_tokens=16, async_scheduling=True
        ),
        compilation_config=SimpleNamespace(
            mode=compilation, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
            cudagraph_capture_sizes=[8, 16],
        ),
        model_config=SimpleNamespace(enforce_eager=False),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        speculative_config=None,
        lora_config=None,
    )  # fmt: skip

    found = breaches(mode, made(Role.DECODE, mode, config, {}))

    assert [breach.setting for breach in found] == broken
