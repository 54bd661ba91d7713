"""Decode modes beside each other: shapes and floors, modes, traffic, tokens, rows, results."""

import json
from pathlib import Path

import pytest

from bench.decode_modes import merge, page, plots
from bench.decode_modes.models import SHAPES, Shape, config, floor, kv_bytes, write
from bench.decode_modes.modes import MODES, capture_sizes, engine_arguments, overridden
from bench.decode_modes.phases import figures, intervals_ms, steps_between
from bench.decode_modes.result import row_result
from bench.decode_modes.rows import Results, Row, fits, reference, seconds_needed, wanted
from bench.decode_modes.spec import Spec, load
from bench.decode_modes.tokens import TokenFile, compare, digest_all, first_difference
from bench.decode_modes.traffic import LENGTHS, Walk, batch, prompt
from bench.decode_modes.tree import Outcome

QWEN = SHAPES["qwen3_30b_24l"]


def spec(**changed: object) -> Spec:
    fields: dict[str, object] = {
        "row": "small/graph_v2", "model_dir": "m", "arguments": {"a": 1}, "dtype": "bfloat16",
        "vocabulary": 100, "kv_token_bytes": 8, "out_dir": "o", "batches": [64], "warm": 20,
        "timed": 200, "ragged": [64, 47], "ragged_s": 5.0,
    }  # fmt: skip
    return Spec(**(fields | changed))  # type: ignore[arg-type]  # fields by name


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
    assert MODES["graph_v2"].env == {"SPLITWAVE_WORST_TOKEN": "v2"}


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
    lengths = [one.max_tokens for _ in range(400) for one in walk.joining(0)]

    assert min(lengths) == LENGTHS[0]
    assert max(lengths) == LENGTHS[1]


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


def test_a_spec_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    spec().save(tmp_path / "spec.json")

    assert load(tmp_path / "spec.json") == spec()


# Phases and results


def test_figures_of_steps() -> None:
    times = intervals_ms([0.0, 0.001, 0.003])

    assert times == pytest.approx([1.0, 2.0])
    assert figures([3.0, 1.0, 2.0])["median_ms"] == 2.0
    assert figures([float(n) for n in range(1, 201)])["p99_ms"] == 199.0


def test_steps_of_a_phase_are_those_since_it_began() -> None:
    before = {"steps_by_kind": {"full": 10, "eager": 1}, "dummy_steps": 2}
    after = {"steps_by_kind": {"full": 15, "eager": 1, "unseen": 1}, "dummy_steps": 3}

    told = steps_between(before, after)

    assert told == {"steps_by_kind": {"full": 5, "unseen": 1}, "dummy_steps": 1}


def report(phase: str, ms: float, kinds: dict[str, int]) -> dict[str, object]:
    return {
        "phase": phase, "sequences": 64, "steps": 200, "median_ms": ms, "p99_ms": ms, "max_ms": ms,
        "tokens_per_s": 1000.0, "steps_by_kind": kinds, "dummy_steps": 0,
    }  # fmt: skip


def outcome(status: str = "done") -> Outcome:
    booted = {"booted": True, "at_s": 50.0, "memory_gb": {"weights": 1.0}}
    done = {"done": True, "memory_gb": {"weights": 1.0}}
    ranks = [
        [booted, report("64", 2.0, {"full": 200}), report("walk", 3.0, {"full": 9}), done],
        [
            booted | {"at_s": 60.0}, report("64", 4.0, {"full": 199, "eager": 1}),
            report("walk", 3.0, {"full": 8, "unseen": 2}), done,
        ],
    ]  # fmt: skip
    return Outcome(status, 100.0, [0, 0], ranks)


def test_a_row_is_as_slow_as_its_slower_rank_and_counts_every_wrong_step() -> None:
    row = row_result(spec(), MODES["graph_v2"], SHAPES["small"], outcome(), 4.3)

    assert row["boot_s"] == 60.0
    assert row["phases"]["64"]["median_ms"] == 4.0
    assert row["phases"]["64"]["tokens_per_s"] == 2000.0
    assert row["phases"]["64"]["floor"]["ms"] == floor(SHAPES["small"], batch=64, ranks=2).floor_ms
    assert "floor" not in row["phases"]["walk"]
    assert row["steps_of_another_kind"] == 3


def test_a_row_that_was_cut_off_keeps_the_phases_that_both_ranks_finished() -> None:
    cut = outcome("late")
    cut.reports[1] = cut.reports[1][:2]

    row = row_result(spec(), MODES["graph_v2"], SHAPES["small"], cut, 4.3)

    assert list(row["phases"]) == ["64"]
    assert row["status"] == "late"


def part(path: Path, rows: dict[str, str], tokens: dict[str, list[int]]) -> Path:
    """A results file with these rows and statuses, and its tokens."""
    results = Results(path)
    results.data["runs"] = [
        {"command": "c", "git_sha": "a" * 40, "git_dirty": False, "python": "3", "cpu": "x",
         "cores": 2, "gpus": [], "packages": {}, "began": "2026-01-01 00:00:00 UTC"}
    ]  # fmt: skip
    for name, status in rows.items():
        model, mode = name.split("/")
        made = row_result(spec(), MODES[mode], SHAPES[model], outcome(status), 4.3)
        made["log_tails"] = ["x" * 9000]
        results.add(Row(model, mode), made | {"model": model, "mode": mode})
    for name, ids in tokens.items():
        TokenFile(path.with_suffix(".tokens.zip")).add(name, {"64": {"s": ids}})
    return path


def test_parts_are_compared_once_they_are_together(tmp_path: Path) -> None:
    eager = part(tmp_path / "a.json", {"small/eager_ht": "done"}, {"small/eager_ht": [1, 2]})
    graph = part(tmp_path / "b.json", {"small/graph_v2": "done"}, {"small/graph_v2": [1, 3]})

    result = merge.merged([eager, graph])

    equality = result["rows"]["small/graph_v2"]["equality"]["64"]
    assert (equality["sequences"], equality["equal"], equality["first_differing_min"]) == (1, 0, 1)
    assert "equality" not in result["rows"]["small/eager_ht"]
    assert {"command", "git_sha", "git_dirty", "python", "cpu"} <= result.keys()


def test_a_finished_row_is_not_replaced_by_one_that_failed(tmp_path: Path) -> None:
    first = part(tmp_path / "a.json", {"small/graph_v2": "done"}, {})
    second = part(tmp_path / "b.json", {"small/graph_v2": "late"}, {})

    assert merge.merged([first, second])["rows"]["small/graph_v2"]["status"] == "done"
    late = merge.merged([second])["rows"]["small/graph_v2"]
    assert len(late["log_tails"][0]) == merge.LOG_CHARACTERS_KEPT
    assert "log_tails" not in merge.merged([first])["rows"]["small/graph_v2"]


# The page


def test_the_page_says_when_there_is_nothing() -> None:
    assert page.text(None) == page.NOTHING
    assert page.plots(None) == {}


def test_the_page_tells_every_row_and_what_did_not_end(tmp_path: Path) -> None:
    rows = {"small/eager_ht": "done", "small/graph_v2": "done", "small/graph_ll": "late"}
    result = merge.merged([part(tmp_path / "a.json", rows, {})])

    told = page.text(result)

    assert "| 64, `graph_v2` | 4.00 | 4.00 | 2000 | 1.0 |" in told
    assert f"64, {page.FLOOR}: " in told
    assert "`small/graph_ll` hit its time limit after 100 s; phases it finished: 64, walk" in told
    assert "full 416, eager 1, unseen 2 | 3 |" in told
    assert list(page.plots(result)) == ["decode_modes_small.svg"]
    assert "plots/decode_modes_small.svg" in told


def test_a_forced_wedge_is_told_in_a_line(tmp_path: Path) -> None:
    path = part(tmp_path / "a.json", {"small/graph_v2": "done"}, {})
    data = json.loads(path.read_text())
    stopped = {"ended_by_itself": True, "seconds": 21.04, "bound_s": 60.0, "text": "why"}
    data["rows"]["small/graph_v2"]["stopped"] = stopped
    path.write_text(json.dumps(data))

    told = page.text(merge.merged([path]))

    assert "one rank stopped; the other ended by itself after 21.0 s." in told


def test_a_plot_names_each_line_and_labels_do_not_touch() -> None:
    lines = {
        "a": [(64.0, 5.0), (128.0, 6.0)],
        "b": [(64.0, 5.1), (128.0, 6.01)],
        "floor": [(64.0, 1.0)],
    }

    svg = plots.plot("title <&>", "x", "y", lines, "floor")

    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "title &lt;&amp;&gt;" in svg
    assert svg.count("stroke-dasharray") == 1
    places = sorted(plots.spaced({"a": 10.0, "b": 10.5, "c": 200.0}).values())
    assert places[1] - places[0] >= plots.LABEL_GAP


def test_modes_are_compared_with_the_eager_one_of_their_device() -> None:
    assert reference("graph_v2") == "eager_ht"
    assert reference("cpu_compiled") == "cpu_eager"
    assert {"eager_ht", "cpu_eager"} <= MODES.keys()
