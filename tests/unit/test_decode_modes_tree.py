"""A row's processes: read along, ended whole at the limit, one of them stopped on purpose."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.decode_modes import tree
from bench.decode_modes.spec import Spec
from bench.decode_modes.tree import Outcome, environment, free_ports, in_words, started

FAKE = """#!{python}
import json, os, pathlib, subprocess, sys, time
rank, folder = int(sys.argv[-1]), pathlib.Path(sys.argv[-3]).parent
(folder / f"pid{{rank}}").write_text(str(os.getpid()))
reports = (folder / f"rank{{rank}}.jsonl").open("a")
def report(**fields):
    print(json.dumps(fields), file=reports, flush=True)
report(booted=True, at_s=1.0, cudagraph_mode="FULL_DECODE_ONLY")
phase = dict(phase="64", sequences=64, median_ms=1.0, p99_ms=1.0, tokens_per_s=1.0)
{body}
"""
PHASE = "report(**phase, steps_by_kind={'full': 5})\n"
HANG = "time.sleep(300)\n"
DONE = PHASE + "report(done=True)\n"
FAILED = "if rank == 1:\n    print('the cause'); report(failed='E: why'); sys.exit(1)\n" + HANG
CHILD = "child = subprocess.Popen(['sleep', '300'])\nreport(child=child.pid)\n" + HANG
TELLS = (
    PHASE
    + """
if rank == 1:
    time.sleep(300)
while not (folder / "rank1.jsonl").exists():
    time.sleep(0.02)
pid = (folder / "pid1").read_text()
while "State:\\tT" not in pathlib.Path(f"/proc/{pid}/status").read_text():
    time.sleep(0.02)
print("rank 1 is silent")
sys.exit(7)
"""
)


@pytest.fixture
def run_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a row whose ranks do as told."""

    def run(body: str, wait: str = "wait", **limits: float) -> Outcome:
        fake = tmp_path / "python"
        fake.write_text(FAKE.format(python=sys.executable, body=body))
        fake.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(fake))
        monkeypatch.setattr(tree, "LINGER_S", 0.5)
        spec = Spec(
            row="m/a", model_dir="m", arguments={}, dtype="float32", vocabulary=9, kv_token_bytes=1,
            out_dir=str(tmp_path / "row"), batches=[4], warm=1, timed=1, ragged=[], ragged_s=0.0,
        )  # fmt: skip
        with started(spec, {"MODE": "1"}, tmp_path / "caches") as made:
            outcome: Outcome = getattr(made, wait)(*limits.values(), said.append)
        return outcome

    said.clear()
    return run


said: list[str] = []


def pids(folder: Path) -> list[int]:
    return [int((folder / f"row/pid{rank}").read_text()) for rank in (0, 1)]


def are_gone(some: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in some)


def test_a_row_is_done_when_both_ranks_have_ended_well(run_as: Callable[..., Outcome]) -> None:
    outcome = run_as(DONE, limit_s=20.0)

    assert (outcome.status, outcome.exit_codes) == ("done", [0, 0])
    assert outcome.first(1, "phase")["sequences"] == 64
    assert outcome.log_tails == []
    assert said[0] == "rank 0: booted after 1.0 s, FULL_DECODE_ONLY"


def test_a_rank_that_fails_ends_the_row_and_tells_why(
    run_as: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_as(FAILED, limit_s=20.0)

    assert outcome.status == "failed"
    assert outcome.wall_s < 15.0
    assert "the cause" in outcome.log_tails[1]
    assert "rank 1: E: why" in said
    assert are_gone(pids(tmp_path))


def test_at_the_limit_the_whole_tree_is_killed(
    run_as: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_as(CHILD, limit_s=2.0)

    children = [outcome.first(rank, "child")["child"] for rank in (0, 1)]
    assert outcome.status == "late"
    assert are_gone(pids(tmp_path) + children)


def test_a_stopped_rank_is_reported_by_the_other_which_ends(
    run_as: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_as(TELLS, "wait_wedged", limit_s=20.0, bound_s=10.0)

    assert outcome.stopped is not None
    assert outcome.stopped["ended_by_itself"]
    assert outcome.stopped["exit_code"] == 7
    assert "rank 1 is silent" in outcome.stopped["text"]
    assert outcome.stopped["seconds"] < 10.0
    assert are_gone(pids(tmp_path))


def test_a_rank_that_waits_for_a_stopped_one_for_ever_is_killed_at_the_bound(
    run_as: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = run_as(PHASE + HANG, "wait_wedged", limit_s=20.0, bound_s=1.0)

    assert outcome.status == "late"
    assert outcome.stopped is not None
    assert not outcome.stopped["ended_by_itself"]
    assert are_gone(pids(tmp_path))


def test_no_rank_is_stopped_before_both_have_run_a_batch(run_as: Callable[..., Outcome]) -> None:
    outcome = run_as(HANG, "wait_wedged", limit_s=1.0, bound_s=1.0)

    assert outcome.status == "late"
    assert outcome.stopped is None


def test_ranks_end_with_whoever_started_them(tmp_path: Path) -> None:
    """However it ends: nothing else would free the GPUs."""
    code = (
        "import sys; from pathlib import Path\n"
        "from bench.decode_modes import tree; from bench.decode_modes.spec import Spec\n"
        f"sys.executable = {str(tmp_path / 'python')!r}\n"
        "spec = Spec(row='m/a', model_dir='m', arguments={}, dtype='float32', vocabulary=9,"
        f" kv_token_bytes=1, out_dir={str(tmp_path / 'row')!r}, batches=[4], warm=1, timed=1,"
        " ragged=[], ragged_s=0.0)\n"
        f"with tree.started(spec, {{}}, Path({str(tmp_path / 'caches')!r})) as made:\n"
        "    made.wait(300.0, lambda text: None)\n"
    )
    (tmp_path / "python").write_text(FAKE.format(python=sys.executable, body=HANG))
    (tmp_path / "python").chmod(0o755)
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=tree.ROOT)
    try:
        wait_until(lambda: all((tmp_path / f"row/pid{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: all((tmp_path / f"row/pid{rank}").read_text() for rank in (0, 1)))
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()

    wait_until(lambda: are_gone(pids(tmp_path)))


def wait_until(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 15.0
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_rank_knows_its_place_and_has_caches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    both = [environment({"X": "1"}, rank, 23000, tmp_path / "caches") for rank in (0, 1)]

    assert [env["VLLM_DP_RANK"] for env in both] == ["0", "1"]
    assert {env["VLLM_DP_MASTER_PORT"] for env in both} == {"23000"}
    assert both[0]["X"] == "1"
    assert both[1]["TRITON_CACHE_DIR"] == str(tmp_path / "theirs/rank1")
    assert both[1]["EP_JIT_CACHE_DIR"] == str(tmp_path / "caches/deep_ep/rank1")
    assert not {both[0][name] for name in tree.CACHES} & {both[1][name] for name in tree.CACHES}


def test_wedged_ranks_report_beside_their_own_row(
    run_as: Callable[..., Outcome], tmp_path: Path
) -> None:
    tells = "report(at=os.environ['SPLITWAVE_WEDGE_DIR'], done=True)\n"

    outcome = run_as(PHASE + tells, limit_s=30.0)

    assert [outcome.first(rank, "at")["at"] for rank in (0, 1)] == [str(tmp_path / "row")] * 2


def test_ports_in_use_are_passed_over() -> None:
    first = free_ports()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.socket()).bind(("127.0.0.1", first + 3))

        assert free_ports() > first


def test_progress_is_told_in_words() -> None:
    phase = {
        "phase": "64", "sequences": 64, "median_ms": 6.5, "p99_ms": 7.0, "tokens_per_s": 9800.0,
        "steps_by_kind": {"full": 238},
    }  # fmt: skip

    assert in_words(phase) == (
        "64: 6.500 ms median, 7.000 p99, 9800 tokens/s a rank; steps full 238"
    )
    assert in_words({"begins": "engine"}) == "begins engine"
    assert in_words({"failed": "E: why"}) == "E: why"
    assert in_words({"done": True}) == "done"
