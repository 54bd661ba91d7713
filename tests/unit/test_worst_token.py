"""What of worst-token dispatch needs no torch: bounds, the gate, the log and the wedge watch."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any  # reports are messages of plain values

import pytest

from splitwave.engine.vllm.switches import (
    collective_marks_wanted,
    collective_timeout_s,
    worst_token_transport,
)
from splitwave.engine.vllm.worst_token import gate, wedge
from splitwave.engine.vllm.worst_token.collectives import CollectiveLog, diagnose, position
from splitwave.engine.vllm.worst_token.rows import receive_bound, worst_rows

SOUND = gate.Resolved(
    cudagraph_mode="FULL_DECODE_ONLY",
    capture_sizes=(64, 128, 256),
    sequences_max=256,
    batch_max_tokens=256,
    ranks=2,
    expert_parallel=True,
    breakable_graphs=False,
    microbatched=False,
    backend="deepep_v2",
    data_parallel_runner_v2=True,
)


@pytest.mark.parametrize(
    ("padded", "bound"), [(1, 1), (3, 4), (64, 64), (65, 128), (96, 128), (130, 192), (256, 256)]
)
def test_receive_bound(padded: int, bound: int) -> None:
    assert receive_bound(padded, 512) == bound


def test_bounds_hold_every_row_and_are_few() -> None:
    bounds = [receive_bound(rows, 1024) for rows in range(1, 1025)]

    assert all(bound >= rows for rows, bound in enumerate(bounds, start=1))
    assert all(bound < 2 * rows for rows, bound in enumerate(bounds, start=1))
    assert len(set(bounds)) == 7 + 15
    assert worst_rows(64, 2) == 128


@pytest.mark.parametrize("padded", [0, 161])
def test_a_step_that_the_buffer_is_not_made_for_has_no_bound(padded: int) -> None:
    with pytest.raises(ValueError, match=f"padded_tokens: is {padded}; .* 1 to 160 rows"):
        receive_bound(padded, 160)


def test_a_bound_is_never_beyond_what_the_buffer_is_made_for() -> None:
    assert [receive_bound(rows, 160) for rows in (96, 130, 160)] == [128, 160, 160]
    assert receive_bound(33, 48) == 48


@pytest.mark.parametrize(
    ("change", "transport", "rule"),
    [
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, "v2", "whole_step"),
        ({"cudagraph_mode": "NONE"}, "legacy", "whole_step"),
        ({"breakable_graphs": True}, "v2", "not_breakable"),
        ({"data_parallel_runner_v2": False}, "v2", "runner_v2"),
        ({"expert_parallel": False}, "v2", "expert_parallel"),
        ({"ranks": 1}, "v2", "expert_parallel"),
        ({"capture_sizes": ()}, "v2", "grid"),
        ({"sequences_max": 257}, "v2", "grid_covers_seats"),
        ({"batch_max_tokens": 8192}, "v2", "decode_batch"),
        ({"microbatched": True}, "v2", "backend"),
        ({"backend": "deepep_high_throughput"}, "v2", "backend"),
        ({"backend": "deepep_v2"}, "legacy", "backend"),
    ],
)
def test_the_gate_names_the_rule(change: dict[str, Any], transport: str, rule: str) -> None:
    with pytest.raises(gate.WorstTokenRefused, match=f"rule {rule}:") as refused:
        gate.check(replace(SOUND, **change), transport)
    assert refused.value.rule == rule


@pytest.mark.parametrize(("transport", "microbatched"), list(gate.BACKENDS))
def test_the_gate_lets_a_sound_configuration_pass(transport: str, microbatched: bool) -> None:
    backend = gate.BACKENDS[transport, microbatched]
    gate.check(replace(SOUND, backend=backend, microbatched=microbatched), transport)


def test_legacy_over_several_hosts_is_refused_once_its_buffer_knows() -> None:
    gate.check_hosts(1)
    with pytest.raises(gate.WorstTokenRefused, match=r"rule one_host: .* not 2"):
        gate.check_hosts(2)


def recorded(log: CollectiveLog, graph: str, layers: int) -> None:
    """Capture a graph with so many dispatches and combines."""
    log.begin_recording(graph)
    for _ in range(layers):
        log.launched("dispatch")
        log.launched("combine")
    log.end_recording()


def test_a_replay_launches_what_its_graph_holds() -> None:
    log = CollectiveLog()
    recorded(log, "64", 24)
    recorded(log, "128", 3)
    log.replayed("64")
    log.replayed("128")

    found = log.report({("dispatch", 0): 27, ("combine", 0): 27}, 1.0)
    assert found["replays"] == 2
    assert [one["launched"] for one in found["collectives"]] == [27, 27]
    assert log.collectives_a_graph()["64"] == {"dispatch/0": 24, "combine/0": 24}
    assert position(found) == "no collective (host phase: idle)"


def test_counts_are_aligned_with_the_devices_after_capture() -> None:
    log = CollectiveLog()
    log.launched("dispatch")
    log.align({("dispatch", 0): 7, ("combine", 0): 6})
    log.launched("dispatch")

    assert [one["launched"] for one in log.report({}, 0.0)["collectives"]] == [8, 6]


def stuck(dispatched: int, combined: int, *, tokens: int = 64, phase: str = "launch") -> Any:
    """Report of a rank that has launched 24 of each, of which so many have ended."""
    log = CollectiveLog()
    recorded(log, "g", 24)
    log.replayed("g")
    log.step("full", tokens)
    log.enter(phase, 0.0)
    return log.report({("dispatch", 0): dispatched, ("combine", 0): combined}, 5.0)


def test_position_is_the_first_collective_that_has_not_ended() -> None:
    assert position(stuck(5, 4)) == "combine 5"
    assert position(stuck(5, 5)) == "dispatch 6"


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({0: stuck(5, 4), 1: stuck(5, 4)}, "all reporting ranks are in the same place"),
        ({0: stuck(5, 4), 1: stuck(5, 5)}, "ranks are in different collectives"),
        ({0: stuck(5, 4), 1: stuck(5, 4, tokens=128)}, "of steps of different shapes"),
        ({0: stuck(24, 24, phase="agree")}, r"host phase: agree\); no report from rank 1"),
        ({}, "no rank has reported"),
    ],
)
def test_diagnosis_tells_a_stuck_group_from_a_diverged_one(
    reports: dict[int, Any], words: str
) -> None:
    assert re.search(words, diagnose(reports, range(2)))


def test_the_watch_fires_when_nothing_moves_and_not_before() -> None:
    log = CollectiveLog()
    recorded(log, "g", 2)
    log.replayed("g")
    marks = [1, 0, 0, 0]
    watch = wedge.WedgeWatch(log, lambda: list(marks), timeout_s=10.0)

    assert watch.look(100.0) is None
    assert watch.look(109.0) is None
    marks[1] = 1
    assert watch.look(109.9) is None
    assert watch.look(119.0) is None
    report = watch.look(120.0)
    assert report is not None
    assert position(report) == "dispatch 2"


def test_the_watch_is_quiet_while_idle_and_fires_on_a_peer_that_never_agrees() -> None:
    log = CollectiveLog()
    watch = wedge.WedgeWatch(log, lambda: [0, 0, 0, 0], timeout_s=10.0)

    assert watch.look(1000.0) is None
    log.enter("agree", 1000.0)
    assert watch.look(1009.0) is None
    report = watch.look(1010.0)
    assert report is not None
    assert report["phase"] == "agree"


def test_a_wedged_rank_reports_for_all_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = CollectiveLog()
    log.enter("agree", -100.0)
    watch = wedge.WedgeWatch(log, lambda: [0, 0, 0, 0], timeout_s=1.0)
    wedge.write_report(tmp_path, 1, stuck(5, 4))
    ended: list[int] = []

    place = wedge.Place(rank=0, ranks=2, directory=tmp_path)
    wedge.run(watch, place, end=ended.append, sleep=lambda _seconds: None)

    assert ended == [wedge.EXIT_CODE]
    assert set(wedge.read_reports(tmp_path)) == {0, 1}
    said = capsys.readouterr().err
    assert "rank 0: no collective (host phase: agree); rank 1: combine 5" in said


@pytest.mark.parametrize("value", ["v3", "", "V2"])
def test_an_unknown_transport_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="set it to v2 or legacy"):
        worst_token_transport({"SPLITWAVE_WORST_TOKEN": value})


def test_switches_have_their_defaults() -> None:
    assert worst_token_transport({}) is None
    assert worst_token_transport({"SPLITWAVE_WORST_TOKEN": "legacy"}) == "legacy"
    assert collective_marks_wanted({})
    assert not collective_marks_wanted({"SPLITWAVE_COLLECTIVE_MARKS": "0"})
    assert collective_timeout_s({}) == 30.0
    with pytest.raises(ValueError, match="number of seconds"):
        collective_timeout_s({"SPLITWAVE_COLLECTIVE_TIMEOUT_S": "soon"})
