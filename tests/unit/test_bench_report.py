"""docs/benchmarks.md is what the results say, and every result can be made again."""

import json
import tomllib
from pathlib import Path

import pytest

from bench import report, run
from bench.decode_modes import page as decode_modes
from bench.load import Sample
from bench.workload import FOLDER, Ask, Workload

ROOT = Path(__file__).parents[2]
RESULT_BYTES_MAX = 1_000_000
RESULTS = sorted(path for path in run.RESULTS.glob("*.json") if "split-" not in path.stem)
"""Those of bench/split have tests of their own, as its workloads do."""
SERVED = sorted(path for path in FOLDER.glob("*.toml") if "split_" not in path.stem)
BY_HAND = sorted([*run.RESULTS.glob("gpu/*.json"), *run.RESULTS.glob("batteries/*.json")])
"""Results from machines or of commands that `make bench` does not have."""
SUMS_UP = {"batteries"}
"""Scripts that read what `splitwave certify` has made."""


def test_every_table_is_fresh() -> None:
    page = report.PAGE.read_text(encoding="utf-8")

    assert report.filled(page) == page


def test_every_plot_is_fresh() -> None:
    plots = decode_modes.plots(decode_modes.read())

    assert {path.name for path in decode_modes.PLOTS.glob("decode_modes_*")} == plots.keys()
    for name, svg in plots.items():
        assert (decode_modes.PLOTS / name).read_text(encoding="utf-8") == svg


def test_a_stale_table_is_found() -> None:
    page = report.PAGE.read_text(encoding="utf-8").replace(" | ", " |  ", 40)

    assert report.filled(page) != page


def test_a_page_without_a_tables_place_is_refused() -> None:
    with pytest.raises(ValueError, match="generated: tiny origin"):
        report.filled("nothing")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.name))
def test_a_result_says_where_it_comes_from(path: Path) -> None:
    told = json.loads(path.read_text(encoding="utf-8"))

    assert path.stat().st_size <= RESULT_BYTES_MAX
    assert {"command", "git_sha", "git_dirty", "python", "cpu"} <= told.keys()
    assert path.stem in run.COMMANDS


def test_a_result_made_by_hand_says_where_it_comes_from() -> None:
    for path in BY_HAND:
        told = json.loads(path.read_text(encoding="utf-8"))

        assert path.stat().st_size <= RESULT_BYTES_MAX
        assert {"command", "git_sha", "git_dirty"} <= told.keys()


def test_every_script_that_writes_a_result_says_by_which_command() -> None:
    scripts = {
        path.stem
        for path in (ROOT / "bench").glob("*.py")
        if "provenance(" in path.read_text() and path.stem not in {"provenance", *SUMS_UP}
    }

    assert (
        scripts - {module.removeprefix("bench.") for module, *_ in run.COMMANDS.values()} == set()
    )
    assert run.COMMANDS["serving_tiny"] == ["bench.serving", "tiny"]


@pytest.mark.parametrize("path", SERVED, ids=lambda path: str(path.stem))
def test_a_workload_asks_the_same_of_every_system_and_anew_in_every_round(path: Path) -> None:
    workload = Workload.read(path.stem)
    streams = max(workload.requests_per_stream)

    asks = workload.asks(streams, 0)

    assert asks == workload.asks(streams, 0) != workload.asks(streams, 1)
    assert len(asks) == streams * workload.requests_per_stream[streams]
    lowest, highest = tomllib.loads(path.read_text())["lengths"]["prompt_tokens"]
    assert {lowest <= len(ask.prompt) <= highest for ask in asks} == {True}


def test_times_are_counted_between_events_with_text() -> None:
    sample = Sample(Ask(0, (1,), 4), sent_s=1.0, text_s=[1.5, 1.6, 1.8], ended_s=2.0, tokens=4)

    assert sample.ttft_ms == pytest.approx(500.0)
    assert sample.gaps_ms == pytest.approx([100.0, 200.0])
    assert sample.tpot_ms == pytest.approx(100.0)
