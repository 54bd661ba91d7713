"""Weights are known by content; a digest is remembered only for a file that did not change."""

import hashlib
import os
from pathlib import Path

import pytest

from splitwave.certify import weights
from splitwave.certify.weights import ChangedWhileRead, WeightsCache, weights_manifest

OLD_S = 1_700_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    (found / "part").mkdir(parents=True)
    (found / ".cache").mkdir()
    for name in (
        "config.json", "model.safetensors", "part/two.safetensors", "README.md", ".cache/x", ".git",
    ):  # fmt: skip
        (found / name).write_text(name)
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that were written just now be remembered."""
    monkeypatch.setattr(weights, "FRESH_S", -1e9)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from now on."""
    read: list[Path] = []
    real = weights.sha256_of

    def digest(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(weights, "sha256_of", digest)
    return read


def test_each_file_that_an_engine_may_read_has_its_digest(model: Path) -> None:
    found = weights_manifest(model, WeightsCache(None))

    names = ("config.json", "model.safetensors", "part/two.safetensors")
    assert found == {name: sha(name) for name in names}


@pytest.mark.usefixtures("patient")
def test_what_is_known_is_not_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache" / "weights.json"
    read = counting(monkeypatch)

    first = weights_manifest(model, WeightsCache(path))
    assert len(read) == 3
    second = weights_manifest(model, WeightsCache(path))

    assert first == second
    assert len(read) == 3
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("patient")
def test_a_changed_file_is_read_again_even_if_its_size_and_time_are_as_before(
    model: Path, tmp_path: Path
) -> None:
    cache, weight = tmp_path / "weights.json", model / "model.safetensors"
    os.utime(weight, (OLD_S, OLD_S))
    before = weights_manifest(model, WeightsCache(cache))
    weight.write_text("MODEL.safetensors")
    os.utime(weight, (OLD_S, OLD_S))

    after = weights_manifest(model, WeightsCache(cache))

    assert before["model.safetensors"] == sha("model.safetensors")
    assert after["model.safetensors"] == sha("MODEL.safetensors")


@pytest.mark.usefixtures("patient")
def test_a_file_that_was_put_in_its_place_is_read_again(model: Path, tmp_path: Path) -> None:
    cache, weight = tmp_path / "weights.json", model / "model.safetensors"
    weights_manifest(model, WeightsCache(cache))
    other = tmp_path / "other"
    other.write_text("MODEL.safetensors")
    other.replace(weight)

    assert weights_manifest(model, WeightsCache(cache))["model.safetensors"] == sha(
        "MODEL.safetensors"
    )


def test_a_file_that_may_still_change_within_its_timestamp_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counting(monkeypatch)
    for _ in range(2):
        weights_manifest(model, WeightsCache(tmp_path / "weights.json"))

    assert len(read) == 6


def test_a_file_that_changes_while_it_is_read_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_to(path: Path) -> str:
        path.write_text("something longer than it was before")
        return "digest"

    monkeypatch.setattr(weights, "sha256_of", written_to)

    with pytest.raises(ChangedWhileRead, match="changed while its digest was made"):
        weights_manifest(model, WeightsCache(None))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": [1, 2, 3, 4, 5, 6]}'])
def test_a_broken_cache_is_as_good_as_none(model: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "weights.json"
    path.write_text(text.replace("a", str(model / "config.json")))

    assert weights_manifest(model, WeightsCache(path))["config.json"] == sha("config.json")


def test_a_link_is_known_by_what_it_leads_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("blob")
    (model / "linked.safetensors").symlink_to(tmp_path / "blob")

    assert weights_manifest(model, WeightsCache(None))["linked.safetensors"] == sha("blob")


def test_a_directory_without_a_file_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no file"):
        weights_manifest(tmp_path, WeightsCache(None))
