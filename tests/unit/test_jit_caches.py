"""Folders of kernels compiled at run time, one a rank."""

import multiprocessing
from pathlib import Path

import pytest

from splitwave.engine.vllm.jit_caches import FOLDERS, MARK, rank_of, separate


@pytest.mark.parametrize(
    ("name", "rank"), [("EngineCore_DP0", 0), ("EngineCore_DP31", 31), ("MainProcess", None)]
)
def test_an_engines_rank_is_in_its_process_name(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Call this process `name`."""
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {}, raising=False)
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)


def test_ranks_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for rank in range(2):
        named(monkeypatch, f"EngineCore_DP{rank}")
        environ = {"XDG_CACHE_HOME": str(tmp_path)}
        separate(environ)
        found.append(environ)

    for variable, folder in FOLDERS.items():
        ours = [Path(environ[variable]) for environ in found]
        assert ours == [tmp_path / "splitwave/jit" / folder / f"rank{rank}" for rank in range(2)]
        assert all(path.is_dir() for path in ours)


def test_a_folder_that_is_set_is_the_root_and_is_not_parted_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named(monkeypatch, "EngineCore_DP1")
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "mine")}

    separate(environ)
    separate(environ)

    assert environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine" / "rank1")
    assert environ[MARK] == "1"


def test_groups_of_two_roles_on_one_host_compile_into_different_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named(monkeypatch, "EngineCore_DP0")
    found = []
    for mode in ("prefill_eager_ht", "decode_graph_ht"):
        environ = {"XDG_CACHE_HOME": str(tmp_path), "SPLITWAVE_MODE": mode}
        separate(environ)
        found.append(Path(environ["EP_JIT_CACHE_DIR"]).name)

    assert found == ["prefill-rank0", "decode-rank0"]


def test_a_process_of_no_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "MainProcess")
    environ: dict[str, str] = {}

    separate(environ)

    assert environ == {}
