"""The GGUF reader gives the values that the format's definition gives."""

import struct
from pathlib import Path

import pytest

from splitwave.demo_model import DemoModelError
from splitwave.demo_model.gguf import Gguf
from tests.unit.demo_model_files import F16, F32, Q4_1, Q8_0, Tensor, small_llama, write_gguf


def read(path: Path, tensor: Tensor) -> list[list[float]]:
    gguf = Gguf(write_gguf(path / "m.gguf", {"key": 1}, {"t": tensor}))
    values: list[list[float]] = gguf.tensor("t").tolist()
    return values


def test_q4_1_is_scale_times_nibble_plus_minimum_low_nibbles_first(tmp_path: Path) -> None:
    # Byte i holds weight i in its low nibble and weight 16 + i in its high one.
    packed = bytes((15 - i) << 4 | i for i in range(16))
    block = struct.pack("<ee", 0.5, -2.0) + packed

    values = read(tmp_path, ((1, 32), Q4_1, block))

    assert values == [
        [0.5 * i - 2.0 for i in range(16)] + [0.5 * (15 - i) - 2.0 for i in range(16)]
    ]


def test_q8_0_is_scale_times_signed_byte(tmp_path: Path) -> None:
    quants = [-128, -1, 0, 1, 127, *range(27)]
    blocks = struct.pack("<e32b", 0.25, *quants) + struct.pack("<e32b", -2.0, *quants)

    values = read(tmp_path, ((2, 32), Q8_0, blocks))

    assert values == [[0.25 * q for q in quants], [-2.0 * q for q in quants]]


@pytest.mark.parametrize(("kind", "form"), [(F32, "<6f"), (F16, "<6e")])
def test_plain_formats_keep_shape_slowest_dimension_first(
    tmp_path: Path, kind: int, form: str
) -> None:
    octets = struct.pack(form, 1, 2, 3, 4, 5, -6.5)

    assert read(tmp_path, ((2, 3), kind, octets)) == [[1, 2, 3], [4, 5, -6.5]]


def test_metadata_and_every_tensor_are_found(tmp_path: Path) -> None:
    gguf = Gguf(small_llama(tmp_path / "m.gguf"))

    assert gguf.metadata["tokenizer.ggml.merges"] == ["a b"]
    assert gguf.metadata["llama.rope.freq_base"] == 10000.0
    assert gguf.tensor("blk.1.ffn_down.weight").shape == (64, 96)
    assert gguf.weight_count == sum(gguf.tensor(name).size for name in gguf.names)


@pytest.mark.parametrize(
    ("octets", "message"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(100), "not a GGUF file of version 3"),
        (struct.pack("<4sIQQ", b"GGUF", 2, 0, 0), "not a GGUF file of version 3"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 9, 9), "damaged GGUF header"),
    ],
)
def test_what_is_no_such_file_is_named(tmp_path: Path, octets: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(octets)

    with pytest.raises(DemoModelError, match=rf"m.gguf: {message}"):
        Gguf(path)


def test_what_the_file_lacks_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"odd": ((32,), 14, b"x"), "cut": ((64,), F32, b"")})
    gguf = Gguf(path)

    for name, message in [("none", "no tensor"), ("odd", "type 14"), ("cut", "file ends within")]:
        with pytest.raises(DemoModelError, match=message):
            gguf.tensor(name)
