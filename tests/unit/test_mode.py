"""The table of execution modes."""

import pytest

from splitwave.core.mode import (
    CPU_BUILD,
    DEEP_EP,
    GPU_BUILD,
    GPU_PER_RANK,
    MODES,
    NVLINK,
    Device,
    Mode,
    StepKind,
    UnknownModeError,
    lookup,
    missing_needs,
)
from splitwave.engine.vllm.worst_token.gate import BACKENDS

DESIGNED = {
    "prefill_eager_ht": {StepKind.EAGER},
    "prefill_eager_ht_dbo": {StepKind.EAGER_UBATCHED, StepKind.EAGER},
    "decode_graph_ht": {StepKind.FULL},
    "decode_graph_ht_legacy": {StepKind.FULL},
    "decode_graph_ht_tbo": {StepKind.UBATCHED_FULL, StepKind.FULL},
    "decode_graph_ag": {StepKind.FULL},
    "decode_graph_ll": {StepKind.FULL},
    "prefill_cpu_eager": {StepKind.EAGER},
    "decode_cpu_eager": {StepKind.EAGER},
    "decode_cpu_compiled": {StepKind.COMPILED},
}


def test_the_table_names_each_mode_with_its_step_kinds() -> None:
    assert {name: set(mode.step_kinds) for name, mode in MODES.items()} == DESIGNED


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_a_mode_is_whole(mode: Mode) -> None:
    row = lookup(mode.name)

    assert row.name.startswith(f"{row.role}_")
    assert row.role in ("prefill", "decode")
    assert row.needs
    assert isinstance(row.vllm_args["enforce_eager"], bool)
    assert row.captures_graphs == (StepKind.FULL in row.step_kinds)


@pytest.mark.parametrize("mode", [m for m in MODES.values() if m.captures_graphs])
def test_a_graph_mode_never_runs_eagerly(mode: Mode) -> None:
    row = lookup(mode.name)

    assert row.vllm_args["enforce_eager"] is False
    assert row.vllm_args["compilation_config"] == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
    }
    assert "breakable_graphs" in row.excludes
    assert row.device is Device.GPU


@pytest.mark.parametrize(
    ("name", "transport", "microbatched"),
    [
        ("decode_graph_ht", "v2", False),
        ("decode_graph_ht_legacy", "legacy", False),
        ("decode_graph_ht_tbo", "v2", True),
    ],
)
def test_a_worst_token_mode_names_its_transport_and_the_backend_that_the_gate_wants(
    name: str, transport: str, microbatched: bool
) -> None:
    row = lookup(name)

    assert row.env["SPLITWAVE_WORST_TOKEN"] == transport
    assert row.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert row.vllm_args["all2all_backend"] == BACKENDS[transport, microbatched]
    assert row.vllm_args.get("enable_dbo", False) is microbatched


def test_prefill_with_microbatches_is_prefill_without_and_what_splits_its_steps() -> None:
    whole, split = lookup("prefill_eager_ht"), lookup("prefill_eager_ht_dbo")

    assert dict(split.vllm_args) == dict(whole.vllm_args) | {
        "enable_dbo": True,
        "dbo_prefill_token_threshold": 512,
    }
    assert dict(split.env) == dict(whole.env) | {
        "SPLITWAVE_HANDOVERS": "1",
        "VLLM_DBO_COMM_SMS": "20",
    }
    assert whole.env["VLLM_USE_V2_MODEL_RUNNER"] == "1", "both on the same runner"
    assert split.needs == whole.needs


@pytest.mark.parametrize("mode", [m for m in MODES.values() if m.role == "decode"])
def test_decode_excludes_the_prefix_cache(mode: Mode) -> None:
    assert "prefix_caching" in lookup(mode.name).excludes


def test_an_unknown_mode_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownModeError, match=r"decode_fast.*decode_cpu_eager.*prefill_eager_ht"):
        lookup("decode_fast")


def test_missing_needs_are_said_in_words() -> None:
    met = {GPU_BUILD.name, GPU_PER_RANK.name}

    assert missing_needs(lookup("prefill_eager_ht"), met) == [NVLINK.words, DEEP_EP.words]


def test_a_machine_with_all_needs_lacks_nothing() -> None:
    assert missing_needs(lookup("decode_cpu_eager"), {CPU_BUILD.name}) == []


def test_a_gpu_mode_is_unusable_on_the_cpu_build() -> None:
    for mode in MODES.values():
        missing = missing_needs(mode, {CPU_BUILD.name})

        assert bool(missing) is (mode.device is Device.GPU)


@pytest.mark.parametrize(
    ("name", "seats", "grid"),
    [
        ("decode_cpu_eager", 16, ()),
        ("prefill_eager_ht", 16, ()),
        ("decode_cpu_compiled", 3, (1, 2, 3)),
        ("decode_graph_ag", 16, (8, 16)),
        ("decode_graph_ag", 17, (8, 16, 24)),
        ("decode_graph_ht_tbo", 1, (32,)),
    ],
)
def test_the_dense_grid_holds_every_seat(name: str, seats: int, grid: tuple[int, ...]) -> None:
    assert lookup(name).dense_grid(seats) == grid
