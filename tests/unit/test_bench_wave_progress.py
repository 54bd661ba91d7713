"""A long run of the wave simulation goes on where it was stopped."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import wave_progress
from bench.wave_progress import OtherRun, Progress, go_on, load, save
from bench.wave_sim import figures, run_on
from tests.sim.wave import runner
from tests.sim.wave.runner import Failure, Tally, run

SEEDS = 12
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHUNK", 4)


def new() -> Progress:
    return Progress({"git_sha": "abc"}, first=0, seeds=SEEDS, processes=1)


def counts(tally: Tally) -> dict[str, object]:
    return dataclasses.asdict(tally) | {"cpu_s": 0.0}


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    state = tmp_path / "run.state.json"
    run_on(new(), -1.0, state)  # Time is up after the first chunk.
    half = load(state)
    assert half.tally.schedules == 4
    assert half.left == range(4, SEEDS)

    rest = go_on(state, new())
    run_on(rest, 60.0, state)

    assert counts(load(state).tally) == counts(run(range(SEEDS)))
    assert load(state).left == range(SEEDS, SEEDS)
    assert load(state).wall_s > half.wall_s > 0
    assert figures(load(state))["git_sha"] == "abc"


def test_a_failure_is_kept_and_ends_the_run(tmp_path: Path) -> None:
    state = tmp_path / "run.state.json"
    broken = new()
    broken.tally.schedules = 8
    broken.tally.failures.append(Failure(7, "W1: work waits"))
    save(broken, state)

    again = go_on(state, new())
    run_on(again, 60.0, state)

    assert load(state).tally.schedules == 8
    assert [str(failure) for failure in again.tally.failures] == [str(Failure(7, "W1: work waits"))]


def test_seeds_of_other_code_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "run.state.json"
    save(new(), state)
    monkeypatch.setattr(wave_progress, "sources_digest", lambda: "another")

    with pytest.raises(OtherRun, match="other code"):
        go_on(state, new())


def test_a_file_of_other_seeds_is_not_gone_on_from(tmp_path: Path) -> None:
    state = tmp_path / "run.state.json"
    save(new(), state)

    with pytest.raises(OtherRun, match="12 seeds from 0"):
        go_on(state, Progress({}, first=0, seeds=SEEDS + 1, processes=1))


def test_its_processes_end_with_it_even_if_it_is_killed() -> None:
    command = [sys.executable, "-m", "bench.wave_sim", "--seeds", "100000", "--processes", "2"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(kids := children.read_text().split()) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)

    deadline_s = time.monotonic() + 10
    while any(is_running(int(kid)) for kid in kids):
        assert time.monotonic() < deadline_s, f"{kids} go on"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_the_state_is_one_whole_file(tmp_path: Path) -> None:
    state = tmp_path / "run.state.json"
    save(new(), state)
    save(new(), state)

    assert [path.name for path in tmp_path.iterdir()] == ["run.state.json"]
    assert json.loads(state.read_text())["seeds"] == SEEDS
