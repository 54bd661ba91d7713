"""Random weights in a form that is known to be served: that of the tiny demo model."""

import dataclasses
import json
import math
import struct
from pathlib import Path

import pytest

from bench.decode_modes.models import SHAPES, Attention, floor
from bench.split.weights import spread, tensors, write
from splitwave.demo_model import DemoModelOptions, Variant, build

pytest.importorskip("torch", reason="NOT RUN: drawing weights needs torch")

TINY = dataclasses.replace(
    SHAPES["cpu_tiny"], attention=Attention(heads=4, kv_heads=2, head_size=64), expert_size=128
)
"""The tiny demo model's sizes."""


def sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Every weight of a directory and its size, from the files' own heads."""
    found: dict[str, tuple[int, ...]] = {}
    for path in directory.glob("*.safetensors"):
        octets = path.read_bytes()
        (length,) = struct.unpack("<Q", octets[:8])
        head = json.loads(octets[8 : 8 + length])
        found |= {name: tuple(told["shape"]) for name, told in head.items() if "shape" in told}
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "tiny"
    build(directory, DemoModelOptions(variant=Variant.TINY))
    return directory


def test_names_and_sizes_are_those_of_a_model_that_is_served(demo: Path, tmp_path: Path) -> None:
    write(TINY, demo, tmp_path, "cpu", 2**30)

    assert sizes(tmp_path) == sizes(demo)
    theirs, ours = (
        json.loads((directory / "config.json").read_text()) for directory in (demo, tmp_path)
    )
    differing = {name for name in theirs if theirs[name] != ours.get(name)}
    assert differing <= {"dtype", "rope_parameters"}, differing
    assert (tmp_path / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()


def test_the_index_says_which_file_has_what(demo: Path, tmp_path: Path) -> None:
    write(TINY, demo, tmp_path, "cpu", 300_000)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index.values())) == files
    assert index.keys() == sizes(tmp_path).keys()


def test_the_same_weights_come_out_however_they_are_cut(demo: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    drawn = []
    for name, shard_bytes in (("one", 2**30), ("many", 300_000)):
        write(TINY, demo, tmp_path / name, "cpu", shard_bytes)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        drawn.append({key: weight for path in files for key, weight in load_file(path).items()})
    one, many = drawn

    assert one.keys() == many.keys()
    assert all(bool((one[name] == many[name]).all()) for name in one)
    experts = [one[f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight"] for e in (0, 1)]
    assert not bool((experts[0] == experts[1]).all())
    deviation = float(experts[0].std())
    assert deviation == pytest.approx(spread("w1.weight", tuple(experts[0].shape)), rel=0.05)


def test_the_large_shape_has_the_weights_that_its_floor_counts() -> None:
    shape = SHAPES["qwen3_30b_24l"]
    bytes_ = sum(2 * math.prod(size) for _, size in tensors(shape, shape.vocabulary))
    read = floor(shape, batch=1_000_000, ranks=1).total_bytes
    embedding = 2 * shape.vocabulary * shape.hidden  # A step reads hardly anything of it.

    assert bytes_ == pytest.approx(read + embedding, rel=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3_4l"])
def test_a_shape_that_the_form_cannot_have_is_refused(
    name: str, demo: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{name}: only plain attention"):
        write(SHAPES[name], demo, tmp_path, "cpu", 2**30)
