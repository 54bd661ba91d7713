"""From what clients saw to figures, and from results to the page; and what the simulator models."""

import itertools
import json
import re
from pathlib import Path
from typing import Any  # results are JSON

import numpy as np
import pytest

from bench.split import page
from bench.split.client import Asked, Status, save
from bench.split.figures import DROPPED_MAX, Seen, of_cell, quantiles, rows
from bench.split.measure import Steps
from bench.split.settings import Comparison, Load, Slo, Times
from splitwave.core.generation import Sampling
from splitwave.engine.port import Role
from splitwave.engine.sim import SimSettings, start_sim_group
from tests.sim.engine_client import reading
from tests.sim.virtual_loop import run

TIMES = Times(
    warm_s=10.0, measure_s=10.0, cool_s=2.0, drain_s=5.0, system_s=99.0, ready_s=9.0, boot_s=1.0
)
SLO = Slo(ttft_ms=300.0, itl_p99_ms=150.0, tpot_ms=120.0, attained_share=0.9, give_up_share=0.5)
RATE = Load(kind="poisson", value=0.5)


def asked(number: int, due_s: float, *, gap_s: float = 0.1, **changes: Any) -> Asked:
    """A request of 11 tokens, the first 0.2 s after it was due."""
    events = [due_s + 0.2 + gap_s * token for token in range(11)]
    made = Asked(number, due_s, sent_s=due_s + 0.01, ended_s=events[-1] + 0.05, tokens=11)
    made.events_s.extend(events)
    made.status = Status.DONE
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def seen(tmp_path: Path, *clients: list[Asked]) -> Seen:
    paths = []
    for index, each in enumerate(clients):
        paths.append(tmp_path / f"{index}.npz")
        save(paths[-1], each, cpu_s=0.5 * (index + 1), wall_s=2.0)
    return Seen.read(paths)


def figures(tmp_path: Path, *clients: list[Asked]) -> dict[str, Any]:
    return of_cell(seen(tmp_path, *clients), RATE, TIMES, SLO)


def test_times_count_from_when_a_request_was_due(tmp_path: Path) -> None:
    told = figures(tmp_path, [asked(0, 11.0), asked(1, 13.0)])

    assert told["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert told["itl_ms"]["p99"] == pytest.approx(100.0)
    assert told["tpot_ms"]["p50"] == pytest.approx(100.0)
    assert told["total_ms"]["p50"] == pytest.approx(1250.0)
    assert told["late_ms"]["p50"] == pytest.approx(10.0)
    assert (told["good"], told["good_share"], told["goodput_per_s"]) == (2, 1.0, 0.2)


def test_only_the_measured_time_counts(tmp_path: Path) -> None:
    warm, cool = asked(0, 9.9, gap_s=0.5), asked(3, 20.0, gap_s=0.5)
    told = figures(tmp_path, [warm, asked(2, 19.9)], [asked(1, 10.0), cool])

    assert told["requests"] == 2
    assert told["itl_ms"]["p99"] == pytest.approx(100.0)
    # Tokens that came meanwhile, whoever asked: all but the warm one's none, one and one less.
    inside = sum(
        10.0 <= at_s < 20.0
        for each in (warm, cool, asked(1, 10.0), asked(2, 19.9))
        for at_s in each.events_s
    )
    assert told["tokens_per_s"] == pytest.approx(inside / 10.0, abs=0.06)
    assert 0 < inside < 44


@pytest.mark.parametrize(
    ("due_s", "gap_s", "good"),
    [(11.0, 0.1, 1), (11.0, 0.14, 0), (11.0, 0.16, 0)],
    ids=["within all", "TPOT too long", "ITL too long"],
)
def test_a_good_request_keeps_every_limit(
    tmp_path: Path, due_s: float, gap_s: float, good: int
) -> None:
    assert figures(tmp_path, [asked(0, due_s, gap_s=gap_s)])["good"] == good


def test_one_long_gap_and_a_late_first_token_are_not_good(tmp_path: Path) -> None:
    stalled, late = asked(0, 11.0, gap_s=0.05), asked(1, 12.0, gap_s=0.05)
    for place in range(6, 11):
        stalled.events_s[place] += 0.4
    for place in range(11):
        late.events_s[place] += 0.2

    told = figures(tmp_path, [stalled, late, asked(2, 13.0)])

    assert told["good"] == 1
    assert told["kept_ttft_share"] == pytest.approx(2 / 3, abs=1e-3)
    assert told["kept_itl_share"] == pytest.approx(2 / 3, abs=1e-3)


def test_what_was_not_served_is_not_good_and_is_named(tmp_path: Path) -> None:
    broken = asked(7, 12.0, status=Status.FAILED, reason="Refused: status 503")
    cut = asked(9, 13.0, status=Status.UNFINISHED)
    never = asked(11, 14.0, status=Status.UNFINISHED, tokens=0)
    del never.events_s[:]

    told = figures(tmp_path, [asked(1, 11.0), broken], [cut, never])

    assert (told["requests"], told["done"], told["failed"], told["unfinished"]) == (4, 1, 1, 2)
    assert told["good_share"] == 0.25
    assert told["dropped"] == [7, 9, 11]
    assert told["dropped_why"]["Refused: status 503"] == 1
    assert told["ttft_ms"]["p99"] == pytest.approx(200.0), "times are of those that were served"


def test_dropped_requests_are_counted_beyond_those_that_are_named(tmp_path: Path) -> None:
    many = [asked(n, 11.0, status=Status.FAILED, reason="r") for n in range(DROPPED_MAX + 9)]

    told = figures(tmp_path, many)

    assert (len(told["dropped"]), told["failed"]) == (DROPPED_MAX, DROPPED_MAX + 9)
    assert json.loads(json.dumps(told))["dropped_why"] == {"r": DROPPED_MAX + 9}


def test_events_of_several_tokens_show_in_the_tokens_a_second(tmp_path: Path) -> None:
    one, two = figures(tmp_path, [asked(0, 11.0)]), figures(tmp_path, [asked(0, 11.0, tokens=22)])

    assert (one["tokens_per_event"], two["tokens_per_event"]) == (1.0, 2.0)
    assert two["tokens_per_s"] == pytest.approx(2 * one["tokens_per_s"])


def test_a_cell_without_requests_has_no_figures(tmp_path: Path) -> None:
    told = figures(tmp_path, [], [])

    assert (told["requests"], told["good_share"], told["ttft_ms"]) == (0, None, None)
    assert quantiles(np.zeros(0)) is None


def test_clients_tell_how_busy_they_were(tmp_path: Path) -> None:
    assert figures(tmp_path, [asked(0, 11.0)], [asked(1, 12.0)])["client_cores_max"] == 0.5


def test_there_is_a_row_a_request_in_order(tmp_path: Path) -> None:
    empty = asked(3, 14.0, status=Status.FAILED, tokens=0)
    del empty.events_s[:]
    told: Any = rows(
        seen(tmp_path, [asked(2, 25.0), empty], [asked(0, 5.0), asked(1, 11.0)]), TIMES
    )

    table = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert [row["number"] for row in table] == [0, 1, 2, 3]
    assert [row["measured"] for row in table] == [False, True, False, True]
    assert table[1]["first_s"] == pytest.approx(11.2)
    assert (table[3]["first_s"], table[3]["itl_max_ms"], table[3]["status"]) == (
        None,
        None,
        "failed",
    )


def test_steps_outside_the_mode_are_counted_between_two_looks() -> None:
    before = Steps("decode_graph_ht", {"full": 10, "eager": 3}, 5, 100)
    after = Steps("decode_graph_ht", {"full": 50, "eager": 4}, 5, 300)

    assert after.since(before) == {
        "mode": "decode_graph_ht", "steps_by_kind": {"full": 40, "eager": 1}, "out_of_mode": 1,
        "prefill_tokens": 0, "bytes_pulled": 200,
    }  # fmt: skip


def longest_gap_s(*, apart: bool, prompt_tokens: int) -> float:
    """Of a stream on rank 0, in simulated seconds, while a prompt comes to rank 1: of the same
    group, or of another one."""

    async def scenario() -> float:
        settings = SimSettings(
            role=Role.PREFILL, group_id="both", ranks=2, step_fixed_s=0.01,
            step_per_prefill_token_s=0.0001,
        )  # fmt: skip
        async with (
            reading(await start_sim_group(settings)) as client,
            reading(await start_sim_group(settings)) as other,
        ):
            await client.submit("stream", [1, 2], Sampling(max_tokens=20))
            asked = other if apart else client
            await asked.submit("prompt", [3] * prompt_tokens, Sampling(max_tokens=2), rank=1)
            await client.ended("stream")
            at_s = [batch.at_s for batch in client.batches if batch.rank == 0]
        return max(later - earlier for earlier, later in itertools.pairwise([0.0, *at_s]))

    return run(scenario())


def test_a_simulated_group_of_both_phases_delays_tokens_by_prompts() -> None:
    """What the comparison is about; a prompt in a group of its own delays nothing."""
    assert longest_gap_s(apart=False, prompt_tokens=1000) == pytest.approx(0.11, abs=0.001)
    assert longest_gap_s(apart=False, prompt_tokens=2) == pytest.approx(0.01, abs=0.001)
    assert longest_gap_s(apart=True, prompt_tokens=1000) == pytest.approx(0.01, abs=0.001)


TIMED = ("ttft_ms", "itl_ms", "itl_p99_of_requests_ms", "tpot_ms", "total_ms")


def cell(system: str, rate: float, good: float = 1.0, **changes: Any) -> dict[str, Any]:
    times = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    made: dict[str, Any] = {
        "cell": f"{system}.512x128.poisson-{rate:g}", "system": system, "shape": "512x128",
        "load": "poisson", "value": rate, "status": "done", "git_sha": "abc", "git_dirty": False,
        "tokens_per_s": 100.0, "goodput_per_s": rate * good, "good_share": good, "failed": 0,
        "unfinished": 0, "dropped_why": {}, "dropped": [], "steps": {},
        **dict.fromkeys(TIMED, times),
    }  # fmt: skip
    return made | changes


def result(engine: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    run_ = {
        "command": "c", "cores": 2, "cpu": "x", "python": "3", "began": "now", "gpus": [],
        "load_average": 0.5,
    }  # fmt: skip
    sizes = {"prompt_tokens": 512, "completion_tokens": 128, "warm_s": 5.0, "measure_s": 20.0}
    return {
        "engine": engine,
        "runs": [run_],
        "cells": cells,
        "workload": {
            "words": "four GPUs",
            "shapes": {"512x128": sizes},
            "systems": {name: {"words": name, "gpus": 4} for name in ("split", "aggregated")},
            "slo": {
                "ttft_ms": 1.0, "itl_p99_ms": 2.0, "tpot_ms": 3.0, "attained_share": 0.9,
                "give_up_share": 0.5,
            },
        },
    }  # fmt: skip


BOTH = [cell("split", 2), cell("split", 4, 0.8), cell("aggregated", 2), cell("aggregated", 4)]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([cell("s", 2), cell("s", 4), cell("s", 8, 0.89)], (4.0, "found")),
        ([cell("s", 2), cell("s", 4, 0.5), cell("s", 8)], (2.0, "found")),
        ([cell("s", 2), cell("s", 4)], (4.0, "open")),
        ([cell("s", 2), cell("s", 4, status="failed"), cell("s", 8)], (2.0, "unknown")),
        ([cell("s", 2), cell("s", 4, status="left out")], (2.0, "found")),
        ([cell("s", 2, 0.1)], (None, "found")),
        ([cell("s", 2, good_share=None)], (None, "found")),
    ],
)  # fmt: skip
def test_the_highest_rate_is_the_one_below_which_every_rate_was_carried(
    cells: list[dict[str, Any]], told: tuple[float | None, str]
) -> None:
    assert page.highest(cells, 0.9) == told


def test_a_rate_is_told_a_gpu_and_as_a_bound_where_it_is_one() -> None:
    carried = page.carried(result("vllm", BOTH))

    assert "| split | 2/s, 0.5 a GPU |" in carried
    assert "| aggregated | >= 4/s, 1 a GPU |" in carried
    assert "| split | not measured |" in page.carried(result("vllm", BOTH[2:]))
    assert "| split | below 2 |" in page.carried(result("vllm", [cell("split", 2, 0.0)]))


def test_what_simulated_engines_made_says_so_in_each_table_plot_and_name() -> None:
    results = {"split-sim": result("sim", [*BOTH, cell("split", 8, status="failed", reason="r")])}
    text = page.text(results)
    tables = [line for line in text.splitlines() if set(line) <= set("| -:") and "-" in line]
    heads = re.findall(r"^\| ([^|]*) \|.*\n\| ---", text, re.M)

    assert len(heads) == len(tables) == 2
    assert all(head.startswith("sim: ") for head in heads)
    assert "say nothing of how fast anything is" in text
    assert text.startswith(page.NOTHING)
    assert "sim: Left out, failed or dropped:" in text
    assert re.findall(r"!\[(.{5})", text) == ["sim: "] * 3
    for name, svg in page.plots(results).items():
        assert name.startswith("split_sim_")
        assert "<title>sim: " in svg


def test_what_gpus_made_comes_first_and_says_no_sim() -> None:
    results = {"split-a-sim": result("sim", BOTH), "split-h200": result("vllm", BOTH)}
    ordered = dict(sorted(results.items(), key=lambda item: item[1]["engine"] == "sim"))
    text = page.text(ordered)

    assert page.NOTHING not in text
    assert "sim" not in text[: text.index("### sim")]
    assert "sim: " not in page.plots(ordered)["split_h200_512x128_goodput.svg"]


def test_a_gap_in_a_table_says_why() -> None:
    dropped = cell("split", 4, failed=2, dropped_why={"status 503": 2}, dropped=[3, 5])
    failed = cell("aggregated", 4, status="failed", reason="server-0 ended with 1:\nmore")
    kinds = cell("split", 2, steps={"decode": {"out_of_mode": 3}, "prefill": {"out_of_mode": 1}})
    text = page.text({"split-h200": result("vllm", [kinds, dropped, failed])})

    assert "- `aggregated.512x128.poisson-4` failed: server-0 ended with 1:" in text
    assert "- `split.512x128.poisson-4` dropped 2 x status 503; requests 3, 5 ..." in text
    assert "| 4 a second, aggregated: failed |" in text
    assert re.search(r"\| 2 a second, split \|.*\| 4 \|$", text, re.M)


def test_no_goodput_has_no_place_on_a_logarithmic_axis() -> None:
    cells = [*BOTH, cell("split", 8, 0.0)]
    svg = page.plots({"split-h200": result("vllm", cells)})["split_h200_512x128_goodput.svg"]
    none = page.plots({"split-h200": result("vllm", [cell("split", 8, 0.0)])})

    assert svg.count("<circle") == 4 + 3
    assert none.keys() == {"split_h200_512x128_itl.svg", "split_h200_512x128_ttft.svg"}


def test_times_are_drawn_beside_their_limits() -> None:
    svg = page.plots({"split-h200": result("vllm", BOTH)})["split_h200_512x128_ttft.svg"]

    assert ">limit</text>" in svg
    assert svg.count("<circle") == 4 + 2
    assert svg.count("stroke-dasharray") == 1


def test_every_plot_of_a_result_is_fresh() -> None:
    plots = page.plots(page.read())

    assert {path.name for path in page.PLOTS.glob("split_*")} == plots.keys()
    for name, svg in plots.items():
        assert (page.PLOTS / name).read_text(encoding="utf-8") == svg


@pytest.mark.parametrize("path", sorted(page.RESULTS.glob("split-*.json")), ids=lambda p: p.stem)
def test_a_result_says_where_it_comes_from_and_is_small(path: Path) -> None:
    told = json.loads(path.read_text(encoding="utf-8"))
    Comparison.read(told["workload"]["name"])

    assert path.stat().st_size <= 1_000_000
    assert {"command", "git_sha", "git_dirty", "python", "cpu"} <= told.keys()
    assert (told["engine"] == "sim") == ("sim" in path.stem)
    assert {each["engine"] for each in told["cells"]} == {told["engine"]}


def test_the_systems_of_a_result_were_asked_the_same() -> None:
    for told in page.read().values():
        asked: dict[tuple[str, str, float], set[str]] = {}
        for each in told["cells"]:
            if each["status"] == "done":
                key = (each["shape"], each["load"], each["value"])
                asked.setdefault(key, set()).add(each["trace"])

        assert {len(traces) for traces in asked.values()} <= {1}
