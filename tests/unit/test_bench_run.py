"""The runner of benchmarks: limits, progress, and results that only a success replaces."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from bench import run
from bench.provenance import git
from bench.run import Part, chosen, is_fresh
from tests.unit.processes import is_gone

QUICK_S = 20.0


def part(result: Path, program: str) -> Part:
    return Part("some", [sys.executable, "-c", program], QUICK_S, result)


@pytest.fixture
def result(tmp_path: Path) -> Path:
    path = tmp_path / "some.json"
    path.write_text('"old"')
    return path


def test_a_result_is_replaced_once_it_is_whole(result: Path) -> None:
    said: list[str] = []

    assert part(result, "print('{\"a\": 1}')").run(said.append)

    assert json.loads(result.read_text()) == {"a": 1}
    assert said[0] == "some: begun, 20 s at most"
    assert said[-1].startswith("some: done after ")
    assert list(result.parent.iterdir()) == [result]


@pytest.mark.parametrize("program", ["print('{}'); raise SystemExit(3)", "print('{')", "print()"])
def test_a_part_that_fails_leaves_the_last_result(result: Path, program: str) -> None:
    assert not part(result, program).run(lambda line: None)

    assert result.read_text() == '"old"'


def test_a_part_whose_time_is_over_is_stopped_with_what_it_started(
    result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STOP_S", 0.5)
    told = result.with_name("pids")
    program = f"trap '' INT; sleep 60 & echo $$ $! >{told}; wait"  # A shell: it starts at once.
    deaf = Part("some", ["sh", "-c", program], 3.0, result)
    said: list[str] = []
    began_s = time.monotonic()

    assert not deaf.run(said.append, say_every_s=0.3)

    assert time.monotonic() - began_s < QUICK_S
    assert result.read_text() == '"old"'
    assert len(said) > 3, "it says how far it is"
    assert said[-1].startswith("some: stopped, its time was over, after ")
    for pid in map(int, told.read_text().split()):
        assert is_gone(pid)


def test_a_part_may_stop_what_it_started_itself_also_if_it_runs_in_the_background(
    result: Path,
) -> None:
    """There interrupts are ignored, and a shell cannot trap what it was born to ignore."""
    told = result.with_name("told")
    program = f"trap 'echo bye >{told}; kill $!; exit' INT; sleep 60 & wait"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not Part("some", ["sh", "-c", program], 2.0, result).run(lambda line: None)
    finally:
        signal.signal(signal.SIGINT, before)

    assert told.read_text() == "bye\n"


def test_parts_are_chosen_by_name_and_those_of_hours_by_nothing_else() -> None:
    assert chosen(["demo", "router_64"], resume=False) == ["demo", "router_64"]
    assert "wave_sim" not in chosen(None, resume=False)
    assert chosen(["wave_sim"], resume=False) == ["wave_sim"]
    with pytest.raises(SystemExit, match="nothing: no such part"):
        chosen(["nothing"], resume=False)


def test_every_part_with_a_limit_of_its_own_is_there() -> None:
    assert run.LIMITS_S.keys() <= run.COMMANDS.keys()
    assert set(run.APART) <= run.COMMANDS.keys()


@pytest.mark.skipif(not git("rev-parse", "HEAD"), reason="NOT RUN: no git history here")
def test_a_result_is_fresh_only_if_this_code_has_made_it(tmp_path: Path) -> None:
    first = git("rev-list", "--max-parents=0", "HEAD").split()[0]
    seen = {}
    for name, told in {
        "now": {"git_sha": "HEAD", "git_dirty": False},
        "dirty": {"git_sha": "HEAD", "git_dirty": True},
        "long ago": {"git_sha": first, "git_dirty": False},
    }.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(told))
        seen[name] = is_fresh(path)
    paths = ("bench", "services", "splitwave", "requirements")

    assert not is_fresh(tmp_path / "none.json")
    assert (seen["dirty"], seen["long ago"]) == (False, False)
    if not git("status", "--porcelain", "--", *paths):
        assert seen["now"]
