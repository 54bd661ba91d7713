"""The script for two GPUs: its parts are those it names, and what a machine needs is pinned."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
