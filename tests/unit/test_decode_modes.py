"""Decode modes beside each other: shapes and floors, modes, traffic, tokens, rows."""

import json
from pathlib import Path

import pytest

from bench.decode_modes.models import SHAPES, Shape, config, floor, kv_bytes, write
from bench.decode_modes.modes import MODES, capture_sizes, engine_arguments, overridden
from bench.decode_modes.rows import Results, Row, fits, seconds_needed, wanted
from bench.decode_modes.tokens import TokenFile, compare, digest_all, first_difference
from bench.decode_modes.traffic import JOIN_EVERY, LENGTHS, Walk, batch, prompt
from splitwave.core.mode import MODES as SERVED

QWEN = SHAPES["qwen3_30b_24l"]


# Shapes and floors


def test_the_floor_of_the_24_layer_model_is_what_its_experts_weigh() -> None:
    least = floor(QWEN, batch=64, ranks=2)

    assert least.experts_hit == pytest.approx(64, abs=0.03)
    assert least.expert_bytes == pytest.approx(24 * 64 * 3 * 2048 * 768 * 2, rel=1e-3)
    assert least.attention_bytes == 24 * 2 * (2048 * 4096 * 2 + 2 * 2048 * 512)
    assert least.head_bytes == 151936 * 2048 * 2
    assert least.total_bytes == pytest.approx(16.04e9, rel=0.01)
    assert least.floor_ms == pytest.approx(least.total_bytes / 4.3e9, rel=1e-6)


def test_a_single_sequence_hits_top_k_experts_of_the_group() -> None:
    least = floor(QWEN, batch=1, ranks=1)

    assert least.experts_hit == pytest.approx(8)


def test_a_latent_layer_reads_its_own_projections() -> None:
    lite = SHAPES["deepseek_v2_lite"].attention

    query, down = 2048 * 16 * 192, 2048 * 576
    up, out = 512 * 16 * 256, 16 * 128 * 2048
    assert lite.weights(2048) == query + down + up + out
    assert kv_bytes(SHAPES["deepseek_v2_lite"], batch=1, length_tokens=1) == 27 * 576 * 2


def test_fp8_experts_weigh_a_byte_a_weight_and_their_scales() -> None:
    shape = SHAPES["deepseek_v3_4l"]
    least = floor(shape, batch=512, ranks=2)

    one = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert least.expert_bytes == pytest.approx(4 * 128 * one, rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_every_shape_has_a_config_that_can_be_written(shape: Shape, tmp_path: Path) -> None:
    told = json.loads((write(shape, tmp_path) / "config.json").read_text())

    assert told == json.loads(json.dumps(config(shape)))
    assert told["num_hidden_layers"] == shape.layers
    assert ("quantization_config" in told) == shape.fp8


# Modes


def test_captured_sizes_hold_every_batch_and_several_below() -> None:
    assert capture_sizes([64, 100], 8) == [8, 16, 32, 64, 104]
    assert capture_sizes([64, 100], 32) == [32, 64, 128]


def test_graph_modes_are_told_what_to_capture_and_eager_ones_are_not() -> None:
    graph = engine_arguments(MODES["graph_v2"], [64])["compilation_config"]

    assert graph == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [8, 16, 32, 64],
    }
    assert "compilation_config" not in engine_arguments(MODES["eager_ht"], [64])
    assert engine_arguments(MODES["graph_v2"], [64], [48, 64])["compilation_config"] == {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [48, 64],
    }  # fmt: skip


def test_vllms_own_mode_runs_without_our_plugin() -> None:
    assert MODES["stock_v2"].env["VLLM_PLUGINS"] == ""
    assert "SPLITWAVE_WORST_TOKEN" not in MODES["stock_v2"].env
    assert MODES["graph_v2"].env["SPLITWAVE_WORST_TOKEN"] == "v2"
    assert MODES["stock_v2"].arguments == MODES["graph_v2"].arguments


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("graph_v2", "decode_graph_ht"),
        ("graph_legacy", "decode_graph_ht_legacy"),
        ("graph_ag", "decode_graph_ag"),
        ("graph_ll", "decode_graph_ll"),
        ("graph_tbo_v2", "decode_graph_ht_tbo"),
        ("cpu_eager", "decode_cpu_eager"),
        ("cpu_compiled", "decode_cpu_compiled"),
    ],
)
def test_what_is_measured_is_what_pools_run(name: str, served: str) -> None:
    assert MODES[name].arguments == SERVED[served].vllm_args
    assert MODES[name].env == SERVED[served].env
    assert MODES[name].kinds == SERVED[served].step_kinds


def test_a_compiled_graph_differs_by_the_compilation_alone() -> None:
    graph, compiled = (
        engine_arguments(MODES[name], [64]) for name in ("graph_v2", "graph_v2_compiled")
    )

    assert graph.pop("compilation_config") != compiled.pop("compilation_config")
    assert graph == compiled


def test_a_mode_can_be_changed_from_the_command_line() -> None:
    changed = overridden(MODES, ["graph_v2:a=[1]", "graph_v2:env:X=a=b"])["graph_v2"]

    assert changed.arguments["a"] == [1]
    assert changed.env["X"] == "a=b"
    assert "a" not in MODES["graph_v2"].arguments
    with pytest.raises(ValueError, match="known mode"):
        overridden(MODES, ["nothing:a=1"])


# Traffic


def test_no_two_sequences_of_a_batch_begin_alike() -> None:
    both = [one for rank in (0, 1) for one in batch("64", rank, 64, 10, 512)]

    assert len({one.prompt for one in both}) == len({one.name for one in both}) == 128
    assert {len(one.prompt) for one in both} == {32}
    assert max(prompt(512, 9999)) < 512


def walked(rank: int, iterations: int) -> tuple[list[int], list[str]]:
    """How many run at each iteration, and what joined, with every request as long as it says."""
    walk = Walk(rank=rank, running_max=40, vocabulary=512, seed=3)
    left: dict[str, int] = {}
    counts, names = [], []
    for _ in range(iterations):
        for one in walk.joining(len(left)):
            left[one.name] = one.max_tokens
            names.append(f"{one.name} {one.max_tokens} {one.prompt[-1]}")
        counts.append(len(left))
        left = {name: more - 1 for name, more in left.items() if more > 1}
    return counts, names


def test_a_walk_is_the_same_again_and_another_on_the_other_rank() -> None:
    counts, names = walked(0, 1500)

    assert walked(0, 1500) == (counts, names)
    assert walked(0, 700)[1] == names[: len(walked(0, 700)[1])]
    assert walked(1, 1500)[0] != counts
    assert max(counts) <= 40
    assert min(counts[50:]) < 10
    assert max(counts) > 30


def test_walking_requests_are_as_long_as_they_may_be() -> None:
    walk = Walk(rank=0, running_max=40, vocabulary=512, seed=3)
    joining = [[one.max_tokens for one in walk.joining(0)] for _ in range(400)]
    lengths = [length for some in joining for length in some]

    assert min(lengths) == LENGTHS[0]
    assert max(lengths) == LENGTHS[1]
    assert {at % JOIN_EVERY for at, some in enumerate(joining) if some} == {0}


# Tokens


def test_equality_counts_sequences_and_where_others_part() -> None:
    ours = {"a": [1, 2, 3], "b": [1, 9, 3], "c": [7], "ours only": [1]}
    eager = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [8], "eager only": [1]}

    told = compare(ours, eager)

    assert (told.sequences, told.equal, told.first_differing) == (3, 1, (0, 1))
    assert told.tokens_compared == 3 + 2 + 1
    assert told.report()["fraction"] == pytest.approx(1 / 3)
    assert told.report()["differences_a_token"] == pytest.approx(2 / 6)


def test_a_sequence_that_ends_early_differs_where_it_ends() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_a_digest_tells_sequences_and_names_apart() -> None:
    assert digest_all({"a": [1], "b": [2]}) == digest_all({"b": [2], "a": [1]})
    assert digest_all({"a": [1], "b": [2]}) != digest_all({"a": [2], "b": [1]})


def test_a_rows_last_tokens_count(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "t.zip")
    assert file.read("m/a") == {}
    file.add("m/a", {"64": {"x": [1]}})
    file.add("m/a", {"64": {"x": [2]}})
    file.add("m/ab", {"64": {"x": [3]}})

    assert file.read("m/a") == {"64": {"x": [2]}}
    assert file.read("m/none") == {}


# Rows


def test_rows_run_model_by_model_in_the_order_of_modes() -> None:
    names = [row.name for row in wanted(["m", "n"], ["b", "a"], [])]

    assert names == ["m/b", "m/a", "n/b", "n/a"]
    assert [row.name for row in wanted(["m"], ["a", "b"], ["m/b"])] == ["m/b"]
    assert [row.name for row in wanted(["m"], ["a"], ["m/a"], "wedge")] == ["m/a/wedge"]


def test_a_row_starts_only_if_it_fits() -> None:
    row = Row("small", "graph_v2")

    assert seconds_needed(row, 20.0, {}) == 80 + 30 + 20
    known = {row.name: {"status": "done", "wall_s": 60.0}}
    assert seconds_needed(row, 20.0, known) == pytest.approx(69.0)
    assert seconds_needed(row, 20.0, {row.name: {"status": "late", "wall_s": 9.0}}) == 130
    assert fits(130.0, None)
    assert fits(130.0, 130.0)
    assert not fits(130.0, 129.0)


def test_results_outlive_a_run_and_failed_rows_are_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Results(path).add(Row("m", "a"), {"status": "done", "wall_s": 1.0})
    Results(path).add(Row("m", "b"), {"status": "late", "wall_s": 1.0})

    again = Results(path)

    assert again.is_done(Row("m", "a"))
    assert not again.is_done(Row("m", "b"))
    assert not again.is_done(Row("m", "c"))
    assert sorted(again.rows) == ["m/a", "m/b"]
