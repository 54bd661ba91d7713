"""From what ranks report to a result, and from results to the page."""

import json
from pathlib import Path

import pytest

from bench.decode_modes import merge, page, plots
from bench.decode_modes.models import SHAPES, floor
from bench.decode_modes.modes import MODES
from bench.decode_modes.phases import figures, intervals_ms, quiet, steps_between
from bench.decode_modes.rank import Kept
from bench.decode_modes.result import across_batches, row_result, token_facts, tokens_of
from bench.decode_modes.rows import Results, Row, kind_of, peer, reference
from bench.decode_modes.spec import Spec, load
from bench.decode_modes.tokens import TokenFile
from bench.decode_modes.tree import Outcome
from bench.provenance import ROOT


def spec(**changed: object) -> Spec:
    fields: dict[str, object] = {
        "row": "small/graph_v2", "model_dir": "m", "arguments": {"a": 1}, "dtype": "bfloat16",
        "vocabulary": 100, "kv_token_bytes": 8, "out_dir": "o", "batches": [64], "warm": 20,
        "timed": 200, "ragged": [64, 47], "ragged_s": 5.0,
    }  # fmt: skip
    return Spec(**(fields | changed))  # type: ignore[arg-type]  # fields by name


def test_a_spec_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    spec().save(tmp_path / "spec.json")

    assert load(tmp_path / "spec.json") == spec()


def test_figures_of_steps() -> None:
    times = intervals_ms([0.0, 0.001, 0.003])

    assert times == pytest.approx([1.0, 2.0])
    assert figures([3.0, 1.0, 2.0])["median_ms"] == 2.0
    assert figures([float(n) for n in range(1, 201)])["p99_ms"] == 199.0


def test_quiet_steps_are_those_well_after_a_request_joined() -> None:
    joined = [True, False, False, False, True, False]

    assert quiet([9.0, 9.0, 1.0, 9.0, 9.0], joined) == {"quiet_steps": 1, "quiet_median_ms": 1.0}
    assert quiet([9.0], [True, True]) == {}


def test_rounding_is_told_by_the_same_sequences_in_two_batches() -> None:
    ours = {
        "256": {"256/0/0": [1, 3], "256/1/0": [5, 6], "256/0/9": [0]},
        "64": {"64/0/0": [1, 2], "64/1/0": [5, 6]},
        "walk": {"walk8/0/0": [1]},
    }

    told = across_batches(ours)

    assert told is not None
    assert (told["batches"], told["sequences"], told["equal"]) == ([64, 256], 2, 1)
    assert across_batches({"64": {}, "walk": {}}) is None


def test_a_graph_row_is_compared_with_another_transports_too() -> None:
    tokens = {"eager_ht": {"walk": {"a": [1]}}, "graph_ag": {"walk": {"a": [2]}}}

    told = token_facts("graph_v2", {"walk": {"a": [2]}}, lambda mode: tokens[mode])

    assert told["equality"]["walk"]["equal"] == 0
    assert told["equality_to_peer"]["walk"]["equal"] == 1
    assert peer("graph_ag") is None
    assert peer("graph_v2_compiled") is None
    assert peer("eager_ht") is None
    assert peer("stock_v2") == "graph_ag"


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


def test_tokens_of_a_cut_off_row_are_those_of_the_phases_that_both_ranks_ended(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        keep = Kept(tmp_path / f"tokens{rank}.json")
        keep("64", {f"64/{rank}/0": [rank]})
        if rank == 0:
            keep("128", {"128/0/0": [5]})

    assert tokens_of(tmp_path) == {"64": {"64/0/0": [0], "64/1/0": [1]}}
    assert tokens_of(tmp_path / "none") == {}


def part(path: Path, rows: dict[str, str], tokens: dict[str, list[int]]) -> Path:
    """A results file with these rows and statuses, and its tokens."""
    results = Results(path)
    results.data["runs"] = [
        {"command": "c", "git_sha": "a" * 40, "git_dirty": False, "python": "3", "cpu": "x",
         "cores": 2, "gpus": [], "packages": {}, "began": "2026-01-01 00:00:00 UTC"}
    ]  # fmt: skip
    for name, status in rows.items():
        model, mode, *_ = name.split("/")
        made = row_result(spec(), MODES[mode], SHAPES[model], outcome(status), 4.3)
        made["log_tails"] = ["x" * 9000]
        results.add(Row(model, mode, kind_of(name)), made | {"model": model, "mode": mode})
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


def test_rows_of_another_gain_are_compared_among_themselves(tmp_path: Path) -> None:
    names = ["small/eager_ht", "small/graph_v2"]
    plain = part(tmp_path / "a.json", dict.fromkeys(names, "done"), {name: [1] for name in names})
    gains = dict.fromkeys([f"{name}/gain0.1" for name in names], "done")
    tokens = {"small/eager_ht/gain0.1": [2], "small/graph_v2/gain0.1": [2]}
    result = merge.merged([plain, part(tmp_path / "b.json", gains, tokens)])

    assert result["rows"]["small/graph_v2/gain0.1"]["equality"]["64"]["equal"] == 1
    assert "| 64, `graph_v2` | 0.1 | 1 of 1 | 0.0000 |  |" in page.text(result)
    assert kind_of("small/graph_v2") == "steps"


def test_a_profile_is_told_by_kernel_and_counts_no_kernel_twice(tmp_path: Path) -> None:
    path = part(tmp_path / "a.json", {"small/graph_v2": "done"}, {})
    data = json.loads(path.read_text())
    kernels = [
        {"name": "void ns::moe<1, 2>(int)", "count": 10, "us": 50.0},
        {"name": "aten::mm", "count": 5, "us": 10.0},
        {"name": "nvjet_a", "count": 5, "us": 10.0},
        {"name": "nvjet_b", "count": 5, "us": 5.0},
    ]
    profile = {"sequences": 64, "profiled": 5, "kernels": kernels}
    data["rows"]["small/graph_v2"]["profiles"] = {"profile64": profile}
    path.write_text(json.dumps(data))

    told = page.kernels(merge.merged([path]), "small")

    assert told.splitlines()[0] == "| microseconds a step at 64, by kernel | `graph_v2` |"
    assert told.splitlines()[2:] == [
        "| `moe` | 10 |",
        "| `dense GEMM` | 3 |",
        "| all that were recorded | 13 |",
    ]


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("fused_moe_kernel", "fused_moe_kernel"),
        ("void cutlass::device_kernel<flash::enable<int>>(int)", "flash attention"),
        ("void deep_ep::elastic::dispatch_impl<true, 64>(void*)", "dispatch_impl"),
        ("std::enable_if<(8>0), void>::type vllm::norm_kernel<int>(int)", "norm_kernel"),
        ("aten::mm", "aten::mm"),
    ],
)
def test_a_kernels_name_is_without_what_the_compiler_adds(name: str, bare: str) -> None:
    assert page.bare(name) == bare


def test_a_result_names_no_folder_of_the_machine_it_was_made_on(tmp_path: Path) -> None:
    path = part(tmp_path / "a.json", {"small/graph_v2": "done"}, {})
    path.write_text(path.read_text().replace('"command": "c"', f'"command": "run {ROOT}/x"'))

    assert merge.merged([path])["command"] == "run x"


def test_a_mode_that_parts_more_than_rounding_explains_is_named(tmp_path: Path) -> None:
    result = merge.merged([part(tmp_path / "a.json", {"small/graph_v2": "done"}, {})])
    row = result["rows"]["small/graph_v2"]
    row["across_batches"] = {"differences_a_token": 0.2}
    equality = {"sequences": 9, "equal": 0, "differences_a_token": 0.3}
    row["equality"] = {"64": equality, "walk": equality}

    assert "(0.300 a token against 0.200)" in page.undecided(result)

    row["across_batches"]["differences_a_token"] = 0.3

    assert page.undecided(result) == ""


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
