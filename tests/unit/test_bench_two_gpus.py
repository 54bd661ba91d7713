"""The script for two GPUs: its parts are those it names, and what a machine needs is pinned."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.hammer.settings import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench/two_gpus.sh"
PACKAGES = (ROOT / "bench/two_gpus_packages.txt").read_text().splitlines()


def test_the_parts_that_it_names_are_those_that_it_has() -> None:
    text = SCRIPT.read_text()
    said = re.search(r"parts: ([\w ]+)\n# +([\w ]+)\n", text)

    assert said is not None
    assert sorted(f"{said[1]} {said[2]}".split()) == sorted(
        re.findall(r"^    (\w+)\)", text, re.MULTILINE)
    )


def test_bash_can_read_it() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


@pytest.mark.parametrize("pattern", PACKAGES)
def test_each_package_that_it_needs_is_pinned_once(pattern: str) -> None:
    pins = {
        line
        for path in (ROOT / "requirements").glob("*.txt")
        for line in path.read_text().splitlines()
        if re.fullmatch(pattern, line)
    }

    assert len(pins) == 1


def test_a_copy_that_is_not_installed_is_given_its_entry_points(tmp_path: Path) -> None:
    code = re.search(r"-c '\n(import pathlib.*?)\n' \"\$work/installed\"", SCRIPT.read_text(), re.S)
    assert code is not None
    subprocess.run([sys.executable, "-c", code[1], str(tmp_path)], cwd=ROOT, check=True)

    (made,) = importlib.metadata.distributions(path=[str(tmp_path)])

    installed = importlib.metadata.distribution("splitwave").entry_points
    wanted = {(e.group, e.name, e.value) for e in installed if e.group.startswith("vllm.")}
    assert {(e.group, e.name, e.value) for e in made.entry_points} == wanted


def test_a_part_that_is_none_is_said_and_nothing_is_left_running(tmp_path: Path) -> None:
    environment = os.environ | {"SPLITWAVE_BENCH_WORK": str(tmp_path / "work")}

    done = subprocess.run(
        ["bash", str(SCRIPT), "nonsense", str(tmp_path / "results")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert "no such part" in done.stdout
    assert (tmp_path / "results/two_gpus.tgz").exists()


def run(tmp_path: Path, *parts: str) -> str:
    """What was started in these parts, a program a line; none of them does anything."""
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>"{told}"\n')
    python.chmod(0o755)
    work = {"SPLITWAVE_BENCH_WORK": str(tmp_path / "work"), "PYTHON": str(python)}
    subprocess.run(
        ["bash", str(SCRIPT), *parts, str(tmp_path / "results")],
        cwd=ROOT, env=os.environ | work, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return told.read_text()


def test_a_part_runs_as_it_would_alone_whatever_came_before_it(tmp_path: Path) -> None:
    alone, after = (tmp_path / name for name in ("alone", "after"))
    for folder in (alone, after):
        folder.mkdir()

    told = run(alone, "prefill").splitlines()
    both = run(after, "v3", "long", "prefill").replace(str(after), str(alone)).splitlines()

    assert any("--models qwen3_30b_24l" in line for line in told)
    assert both[-len(told) + 1 :] == told[1:], "the first line asks for the installed package"


def test_the_hammer_can_do_all_that_it_is_asked(tmp_path: Path) -> None:
    for part in ("hammer", "served", "long"):
        folder = tmp_path / part
        folder.mkdir()
        asked = [line.split()[2:] for line in run(folder, part).splitlines() if ".hammer" in line]

        assert asked
        for words in asked:
            parse(words)  # It ends the program if it cannot.


def test_results_of_rows_are_kept_from_the_moment_they_are_there(tmp_path: Path) -> None:
    told = run(tmp_path, "prefill", "handoff", "split", "repeated")

    outs = re.findall(r"--out (\S+)", told)
    assert len(outs) == 5 + 5  # rows of prefill, and one each beside two of split
    assert {Path(path).parent for path in outs} == {tmp_path / "work/out"}


def test_logs_of_every_part_come_back(tmp_path: Path) -> None:
    logs = (
        "rows/v2/rows/a/rank0.log", "prefill/rows/b/rank1.log", "split/logs/decode.log",
        "repeated/logs/decode.log", "handoff/demo/prefill.log", "handoff/demo/control/decode.log",
        "handoff/fence.log", "hammer_v2.log",
    )  # fmt: skip
    for log in logs:
        (tmp_path / "work" / log).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / log).write_text("words")

    run(tmp_path, "nonsense")
    with tarfile.open(tmp_path / "results/two_gpus.tgz") as kept:
        names = set(kept.getnames())

    assert {f"./{log.replace('/', '_')}.txt" for log in logs} <= names
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["two_gpus.tgz"]


def test_ranks_compile_into_shared_folders_only_where_all_is_compiled_already(
    tmp_path: Path,
) -> None:
    seen = []
    for made in (False, True):
        caches = tmp_path / "work/rows/v2/caches"
        if made:
            caches.mkdir(parents=True)
        script = SCRIPT.read_text().replace("RAGGED_S=300 ROW_S=520", 'env >"$work/seen"; exit')
        (tmp_path / "script.sh").write_text(script)
        subprocess.run(
            ["bash", str(tmp_path / "script.sh"), "long", str(tmp_path / "results")],
            cwd=ROOT, timeout=60, check=False, capture_output=True,
            env=os.environ | {"SPLITWAVE_BENCH_WORK": str(tmp_path / "work"), "PYTHON": "true"},
        )  # fmt: skip
        seen.append("EP_JIT_CACHE_DIR=" in (tmp_path / "work/seen").read_text())

    assert seen == [False, True]
