"""Settings of a vLLM group: what is refused, and what they become."""

import dataclasses
import json
from pathlib import Path
from typing import Any  # JSON and a test's keywords

import pytest

from splitwave.core.mode import MODES, Mode, lookup
from splitwave.engine.port import Role
from splitwave.engine.vllm.check import check
from splitwave.engine.vllm.config import (
    GUARD,
    GUARD_ASYNC,
    KV_BYTES_MIN,
    SettingsError,
    VllmGroupSettings,
    batch_grid,
    engine_arguments,
    environment,
    kv_cache_bytes,
    read_shape,
    transfer_arguments,
)

MODEL = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 2048,
    "num_local_experts": 4,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def settings(model: Path, **changes: Any) -> VllmGroupSettings:
    fields: dict[str, Any] = {
        "role": Role.DECODE,
        "mode": "decode_cpu_eager",
        "model_path": model,
        "served_model": "m",
        "group_id": "g",
        "epoch": 1,
        "log_dir": model,
        "ranks": 2,
        "expert_parallel": True,
    }
    return VllmGroupSettings(**fields | changes)


def test_settings_that_fit_give_their_mode(model: Path) -> None:
    assert check(settings(model), {}) is lookup("decode_cpu_eager")


@pytest.mark.parametrize(
    ("field", "changes", "words"),
    [
        ("mode", {"mode": "fast"}, "known modes are"),
        ("mode", {"mode": "prefill_cpu_eager"}, "this group's role is decode"),
        ("model_path", {"model_path": Path("/nowhere")}, "does not exist"),
        ("ranks", {"ranks": 0}, "at least 1"),
        ("ranks", {"ranks": 1}, "at least 2 ranks"),
        ("ranks", {"ranks": 3}, "does not divide the model's 4 experts"),
        ("tensor_parallel", {"tensor_parallel": 2}, "9 attention heads; use one of [1, 3, 9]"),
        ("tensor_parallel", {"tensor_parallel": 3}, "use 1 and scale with ranks"),
        ("dtype", {"dtype": "int8"}, "float32, bfloat16, float16"),
        ("block_size_tokens", {"block_size_tokens": 16}, "a multiple of 32"),
        ("model_len_max_tokens", {"model_len_max_tokens": 4096}, "ends at 2048"),
        ("batch_max_tokens", {"batch_max_tokens": 8}, "at least seats_max, 16"),
        ("blocks_override", {"blocks_override": 32}, "needs 33"),
        ("kv_cache_bytes", {"kv_cache_bytes": 2**20}, "give 48660480 or more"),
        ("lease_ttl_s", {"lease_ttl_s": 0}, "at least 1"),
        ("side_channel_port", {"side_channel_port": 65535}, "65535 to 65536"),
        ("side_channel_port", {"side_channel_port": 80}, "within 1024"),
        ("prefix_caching", {"prefix_caching": True}, "off in mode decode_cpu_eager"),
        ("expert_parallel", {"mode": "decode_graph_ag", "expert_parallel": False}, "must be on"),
        ("capture_sizes", {"mode": "decode_graph_ag", "capture_sizes": "8 12"}, "grid_is_aligned"),
        ("capture_sizes", {"mode": "decode_graph_ag", "capture_sizes": "16 8"}, "grid_ascends"),
        (
            "capture_sizes",
            {"mode": "decode_graph_ht_tbo", "capture_sizes": "64"},
            "rule grid_is_dense); add 32",
        ),
        (
            "seats_max",
            {"mode": "decode_graph_ag", "capture_sizes": "8"},
            "rule seats_fit_the_grid); set seats_max to 8 or less",
        ),
        ("capture_sizes", {"capture_sizes": "8 16"}, "rule eager_has_no_graphs"),
        (
            "capture_sizes",
            {"mode": "decode_cpu_compiled", "capture_sizes": "8 16"},
            "rule grid_is_dense",
        ),
        ("capture_sizes", {"mode": "decode_graph_ag", "capture_sizes": "8, x"}, "write whole"),
        ("devices", {"devices": "0 1"}, "is for GPUs"),
        ("gpu_memory_share", {"gpu_memory_share": 0.5}, "is for GPUs"),
        ("devices", {"mode": "decode_graph_ag", "devices": "0 x"}, "write whole numbers"),
        (
            "gpu_memory_share",
            {"mode": "decode_graph_ag", "devices": "0 0"},
            "2 ranks are on one device",
        ),
        (
            "gpu_memory_share",
            {"mode": "decode_graph_ag", "devices": "0 0", "gpu_memory_share": 0.6},
            "0.5 at most, for 2 ranks a device",
        ),
        (
            "gpu_memory_share",
            {
                "mode": "decode_graph_ag",
                "tensor_parallel": 3,
                "devices": "0 0 0 0 0 0",
                "gpu_memory_share": 0.167,
            },
            "0.166 at most, for 6 ranks a device",
        ),
        ("devices", {"mode": "decode_graph_ag", "devices": "0"}, "the group needs 2"),
        (
            "gpu_memory_share",
            {"mode": "decode_graph_ag", "gpu_memory_share": 1.5},
            "to 1 at most",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_field_and_fix(
    model: Path, field: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        check(settings(model, **changes), {})

    assert refused.value.field == field
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_TARGET_DEVICE"])
def test_a_variable_that_would_undo_a_setting_is_refused(model: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: .*unset it"):
        check(settings(model), {name: "1"})


def test_a_compiled_mode_refuses_the_variable_that_keeps_vllm_from_compiling(model: Path) -> None:
    assert check(settings(model), {"VLLM_CPU_CI_ENV": "1"}).name == "decode_cpu_eager"
    with pytest.raises(SettingsError, match=r"VLLM_CPU_CI_ENV: .*warms nothing up"):
        check(settings(model, mode="decode_cpu_compiled"), {"VLLM_CPU_CI_ENV": "1"})


def test_no_batch_of_a_compiled_mode_is_larger_than_what_it_warms_up(model: Path) -> None:
    asked = settings(model, mode="decode_cpu_compiled", seats_max=5)

    assert engine_arguments(asked, lookup(asked.mode))["max_num_batched_tokens"] == 5


@pytest.mark.parametrize("name", ["decode_graph_ag", "decode_graph_ht", "decode_graph_ht_tbo"])
def test_a_graph_mode_refuses_graphs_that_break(model: Path, name: str) -> None:
    asked = settings(model, mode=name, seats_max=32)

    assert check(asked, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}).name == name
    with pytest.raises(SettingsError, match=r"rule no_breakable_graphs.*unset VLLM_USE_BREAKABLE"):
        check(asked, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})


@pytest.mark.parametrize("text", ["8 16", "8,16", "[8, 16]"])
def test_capture_sizes_are_those_that_were_asked_for(model: Path, text: str) -> None:
    mode = lookup("decode_graph_ag")
    asked = settings(model, mode=mode.name, capture_sizes=text)

    assert batch_grid(asked, check(asked, {})) == (8, 16)
    compilation = engine_arguments(asked, mode)["compilation_config"]
    assert isinstance(compilation, dict)
    assert compilation["cudagraph_capture_sizes"] == [8, 16]


def test_a_dense_model_has_no_experts_to_spread(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | {"num_local_experts": None}))

    with pytest.raises(SettingsError, match="expert_parallel: the model is dense"):
        check(settings(model), {})


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_broken_model_configuration_is_named(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)

    with pytest.raises(SettingsError, match=r"model_path: .*config\.json"):
        check(settings(model), {})


def test_the_kv_cache_holds_a_quarter_of_the_seats_at_full_length(model: Path) -> None:
    asked = settings(model, seats_max=16, model_len_max_tokens=1024)
    token_bytes = 2 * 30 * 3 * 64 * 4

    assert kv_cache_bytes(asked, read_shape(model)) == 4 * 33 * 32 * token_bytes
    small = dataclasses.replace(asked, seats_max=1, model_len_max_tokens=64)
    assert kv_cache_bytes(small, read_shape(model)) == KV_BYTES_MIN


def test_every_execution_argument_is_the_modes_own(model: Path) -> None:
    for mode in MODES.values():
        asked = settings(model, role=Role(mode.role), mode=mode.name)

        arguments = engine_arguments(asked, mode)

        compilation = arguments.pop("compilation_config", {})
        assert isinstance(compilation, dict)
        rest = {k: v for k, v in mode.vllm_args.items() if k != "compilation_config"}
        assert rest.items() <= arguments.items()
        assert mode.vllm_args.get("compilation_config", {}) == {
            k: v for k, v in compilation.items() if k != "cudagraph_capture_sizes"
        }


def test_a_graph_mode_schedules_a_token_a_seat_and_reads_our_tuned_tiles(model: Path) -> None:
    asked = settings(model, seats_max=48, batch_max_tokens=4096)
    mode = lookup("decode_graph_ht")

    assert engine_arguments(asked, mode)["max_num_batched_tokens"] == 48
    folder = Path(environment(asked, mode)["VLLM_TUNED_CONFIG_FOLDER"])
    assert (folder / "E=64,N=768,device_name=NVIDIA_H200.json").is_file()
    assert "VLLM_TUNED_CONFIG_FOLDER" not in environment(asked, lookup("decode_cpu_eager"))


def test_a_graph_mode_captures_a_size_for_every_batch(model: Path) -> None:
    mode = lookup("decode_graph_ht_tbo")

    assert batch_grid(settings(model, seats_max=100), mode) == (32, 64, 96, 128)


def test_the_guard_matches_the_scheduler(model: Path) -> None:
    cpu = engine_arguments(settings(model), lookup("decode_cpu_eager"))
    gpu = engine_arguments(settings(model), lookup("decode_graph_ag"))

    assert (cpu["scheduler_cls"], gpu["scheduler_cls"]) == (GUARD, GUARD_ASYNC)


def test_prefill_has_no_guard_and_serves_by_priority(model: Path) -> None:
    asked = settings(model, role=Role.PREFILL, mode="prefill_cpu_eager")

    arguments = engine_arguments(asked, lookup(asked.mode))

    assert "scheduler_cls" not in arguments
    assert arguments["scheduling_policy"] == "priority"


def test_a_failed_pull_never_becomes_a_prefill(model: Path) -> None:
    assert (
        transfer_arguments(settings(model), lookup("decode_cpu_eager"))["kv_load_failure_policy"]
        == "fail"
    )


def test_engine_processes_get_the_modes_environment_and_their_ports(model: Path) -> None:
    found = environment(settings(model, side_channel_port=5900), lookup("decode_cpu_eager"))

    assert found["SPLITWAVE_FORK"] == "1"
    assert found["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5900"
    assert found["OMP_NUM_THREADS"] == "1"


GPU = {"mode": "decode_graph_ag", "devices": "2 3", "gpu_memory_share": 0.4}


def test_groups_share_gpus_by_device_and_by_memory(model: Path) -> None:
    shared, mode = settings(model, **GPU), lookup("decode_graph_ag")

    assert check(shared, {}) is mode
    assert environment(shared, mode)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(shared, mode)["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on", (
        "not through the host"
    )
    assert engine_arguments(shared, mode)["gpu_memory_utilization"] == 0.4
    assert "CUDA_VISIBLE_DEVICES" not in environment(settings(model), mode), "all that are visible"
    assert "gpu_memory_utilization" not in engine_arguments(settings(model), mode), "vLLM's share"


def test_ranks_may_share_a_gpu(model: Path) -> None:
    mode = lookup("decode_graph_ag")
    shared = settings(model, **GPU | {"devices": "3 3"})

    assert check(shared, {}) is mode
    found = environment(shared, mode)
    assert found["CUDA_VISIBLE_DEVICES"] == "3", "CUDA stops at a number that it has seen"
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in environment(settings(model, **GPU), mode)


def test_kv_goes_from_cache_to_cache(model: Path) -> None:
    for name, device in (("decode_graph_ag", "cuda"), ("decode_cpu_eager", "cpu")):
        found = transfer_arguments(settings(model), lookup(name))

        assert found["kv_buffer_device"] == device


@pytest.mark.parametrize("mode", [m for m in MODES.values() if m.device == "gpu"])
def test_a_rank_on_a_gpu_is_one_process_unless_it_is_split_itself(mode: Mode, model: Path) -> None:
    role = Role(mode.role)

    one = engine_arguments(settings(model, mode=mode.name, role=role), mode)
    several = engine_arguments(settings(model, mode=mode.name, role=role, tensor_parallel=3), mode)

    assert one["distributed_executor_backend"] == "uni"
    assert "distributed_executor_backend" not in several
