"""A system's host as its starter sees it: what it says, and how it ends."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any  # results are JSON

import psutil
import pytest

from bench.split import __main__ as command
from bench.split import programs
from bench.split.cells import Store
from bench.split.programs import Place, launch
from bench.split.settings import Comparison, SettingsError
from services.decode.config import DecodeConfig
from services.prefill.config import PrefillConfig
from splitwave.core.worker import Role
from splitwave.engine.sim import SimSettings
from splitwave.runtime import config
from splitwave.runtime.worker import make_group_settings
from tests.unit.processes import is_gone

FAKE = """#!{python}
import json, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
job = json.loads(pathlib.Path(sys.argv[-1]).read_text())
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
pathlib.Path(r"{folder}/pids").open("a").write(str(child.pid) + "\\n")
def say(**fields):
    print(json.dumps(fields), flush=True)
def end(code):
    child.kill()
    sys.exit(code)
cells = job["cells"]
{body}
end(0)
"""
FACTS = {
    "command": "c", "git_sha": "s", "git_dirty": False, "python": "3", "cpu": "x", "cores": 2,
    "began": "now",
}  # fmt: skip


@pytest.fixture
def run_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run one system whose host does as told; its cells, and what was said."""

    def run(body: str, *, limit_s: float = 20.0, budget_s: float | None = None) -> dict[str, Any]:
        fake = tmp_path / "host"
        fake.write_text(FAKE.format(python=sys.executable, folder=tmp_path, body=body))
        fake.chmod(0o755)
        monkeypatch.setattr(command, "_TETHER", (str(fake),))
        monkeypatch.setattr(command, "STOP_S", 0.5)
        comparison = Comparison.read("split_sim")
        none = dict.fromkeys(("warm_s", "measure_s", "cool_s", "drain_s", "boot_s"), 0.0)
        times = dataclasses.replace(comparison.times, **none, system_s=limit_s)
        comparison = dataclasses.replace(comparison, times=times)
        asked = argparse.Namespace(
            engine="sim", model=None, systems="", shapes="1024x128", loads="", out=tmp_path / "sim",
            workloads=tmp_path, budget_s=budget_s, again=False,
        )  # fmt: skip
        store = Store(asked.out, comparison, "sim")
        made = command.Run(asked, comparison, store, [], FACTS, tmp_path / "run")
        monkeypatch.setattr(made, "say", said.append)
        made.one(comparison.system("split"))
        for pid in (tmp_path / "pids").read_text().split():
            assert is_gone(int(pid)), "the host's child is left"
        merged = json.loads(asked.out.read_text())
        return {cell["cell"]: cell for cell in merged["cells"]}

    said.clear()
    return run


said: list[str] = []
FIRST, *OTHERS = (f"split.1024x128.poisson-{rate}" for rate in (2, 4, 8))


def test_a_host_that_does_not_end_is_ended_at_its_limit_with_the_cell_it_was_in(
    run_as: Callable[..., dict[str, Any]],
) -> None:
    began_s = time.monotonic()
    cells = run_as(
        "if len(cells) == 3:\n    say(begun=cells[0]); time.sleep(300)\n"
        "for cell in cells:\n    say(begun=cell); say(done=cell)\n",
        limit_s=4.0,
    )

    assert time.monotonic() - began_s < 18.0
    assert cells[FIRST]["status"] == "failed"
    assert cells[FIRST]["reason"] == "it was ended after its limit of 4 s"
    assert len([line for line in said if "starts" in line]) == 2, "the rest were run"


def test_a_host_that_never_comes_up_fails_every_cell_by_its_last_words(
    run_as: Callable[..., dict[str, Any]],
) -> None:
    cells = run_as("say(failed='no GPU'); end(1)")

    assert {cell["status"] for cell in cells.values()} == {"failed"}
    assert {cell["reason"] for cell in cells.values()} == {"no GPU"}
    assert list(cells) == [FIRST, *OTHERS]
    assert len([line for line in said if "starts" in line]) == 1


def test_a_host_that_dies_without_a_word_leaves_the_end_of_its_log(
    run_as: Callable[..., dict[str, Any]],
) -> None:
    cells = run_as("print('the cause', file=sys.stderr); end(3)")

    assert {cell["reason"] for cell in cells.values()} == {"the cause"}


def test_a_cell_that_the_budget_cuts_off_is_left_for_another_time(
    run_as: Callable[..., dict[str, Any]],
) -> None:
    assert run_as("say(begun=cells[0]); time.sleep(300)", budget_s=8.0) == {}

    assert len([line for line in said if "starts" in line]) == 1


def test_nothing_goes_on_before_the_limit_has_ended_the_whole_family(
    run_as: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(processes: Sequence[psutil.Process]) -> None:
        kill(processes[:1])  # Now nothing is left to be read.
        if processes:
            time.sleep(1.0)
        kill(processes)

    kill = programs.kill
    monkeypatch.setattr(command, "kill", slow)

    run_as("say(begun=cells[0]); time.sleep(300)", budget_s=4.0)


def test_a_host_that_has_no_time_left_is_not_started_again(
    run_as: Callable[..., dict[str, Any]],
) -> None:
    cells = run_as("say(stopped='no time is left', cell=cells[0])")

    assert cells == {}
    assert len([line for line in said if "starts" in line]) == 1


def test_every_simulated_group_keeps_the_same_pace_and_steps_together(tmp_path: Path) -> None:
    """As the programs themselves read it; a system with a faster pace would win by it."""
    comparison = Comparison.read("split_sim")
    place = Place(engine="sim", model_path=tmp_path, model="m", run_dir=tmp_path)
    groups: list[SimSettings] = []
    for system in comparison.systems:
        for program in launch(comparison, system, place).programs:
            words = program.command[program.command.index("-m", 3) + 1 :]
            if program.name.startswith("server"):
                told = json.loads(Path(words[-1]).read_text())
                groups.append(SimSettings(role=Role.PREFILL, **told))
            elif program.name in ("prefill", "decode"):
                kind = PrefillConfig if program.name == "prefill" else DecodeConfig
                worker, _ = config.load(kind, program.name, words[1:], {})
                made = make_group_settings(worker, Role(program.name), SimSettings)
                assert isinstance(made, SimSettings)
                groups.append(made)

    assert [group.ranks for group in groups] == [2, 2, 4, 2, 2]
    assert {group.lockstep for group in groups} == {True}
    paces = {
        tuple(getattr(group, name) for name in dataclasses.asdict(comparison.pace))
        for group in groups
    }
    assert paces == {tuple(dataclasses.asdict(comparison.pace).values())}
    assert comparison.pace.step_per_prefill_token_s > 0


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"vocab_size": 260, "max_position_embeddings": 8192}, "40000 is no id below 260"),
        ({"vocab_size": 49152, "max_position_embeddings": 2048}, "2304 is more than the model's"),
        (None, "config.json is not there"),
        ({"vocab_size": 49152, "max_position_embeddings": 8192}, ""),
    ],
)
def test_a_model_that_cannot_take_the_prompts_is_refused(
    tmp_path: Path, told: dict[str, int] | None, words: str
) -> None:
    if told is not None:
        (tmp_path / "config.json").write_text(json.dumps(told))
    refused = pytest.raises(SettingsError, match=words) if words else contextlib.nullcontext()

    with refused:
        command.check_model(tmp_path, Comparison.read("split_h200"))


def test_a_results_command_has_no_place_of_this_machine() -> None:
    told = command.command_of(
        [
            "split_h200",
            "--model",
            "/there",
            "--out",
            "o/split-h200.json",
            "--run-dir",
            "/logs",
        ]
    )

    assert told == (
        "python -m bench.split split_h200 --model MODEL --out o/split-h200.json --run-dir RUN_DIR"
    )
