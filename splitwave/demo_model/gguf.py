"""Read the GGUF file of the demo model: GGUF version 3, little endian, four tensor formats.

Source: the GGUF specification (docs/gguf.md of ggml) and ggml's block layouts.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final  # Any: metadata is what the file says

import numpy as np
from numpy.typing import NDArray

from splitwave.demo_model.recipe import DemoModelError

Float32Array = NDArray[np.float32]

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_ALIGNMENT_DEFAULT_BYTES: Final = 32
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a tensor format packs weights: a block of bytes for a number of weights."""

    weights: int
    size_bytes: int
    decode: Callable[[NDArray[np.uint8]], Float32Array]
    """(blocks, size_bytes) to (blocks, weights)."""


def _float16(octets: NDArray[np.uint8]) -> Float32Array:
    return octets.copy().view("<f2").astype(np.float32)


def _q4_1(blocks: NDArray[np.uint8]) -> Float32Array:
    """Scale and minimum as float16, then 4 bits a weight: low nibbles are weights 0 to 15."""
    packed = blocks[:, 4:]
    quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return _float16(blocks[:, :2]) * quants + _float16(blocks[:, 2:4])


def _q8_0(blocks: NDArray[np.uint8]) -> Float32Array:
    """Scale as float16, then 8 signed bits a weight."""
    return _float16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


FORMATS: Final[Mapping[int, BlockFormat]] = {
    0: BlockFormat(1, 4, lambda blocks: blocks.copy().view("<f4").astype(np.float32)),
    1: BlockFormat(1, 2, _float16),
    3: BlockFormat(32, 20, _q4_1),
    8: BlockFormat(32, 34, _q8_0),
}
"""GGML tensor type to format: F32, F16, Q4_1, Q8_0."""


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int


class Gguf:
    """One open file: `metadata` by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        """Raise DemoModelError for what is not such a file."""
        self._path = path
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise DemoModelError(f"{path}: empty; install it again")
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise DemoModelError(f"{path}: damaged GGUF header: {error}") from error

    def tensor(self, name: str) -> Float32Array:
        """One tensor as float32, its slowest dimension first."""
        info = self._tensors.get(name)
        if info is None:
            raise DemoModelError(f"{self._path}: has no tensor {name!r}")
        form = FORMATS.get(info.kind)
        if form is None:
            raise DemoModelError(f"{self._path}: {name}: GGML type {info.kind} is not supported")
        count = math.prod(info.shape) // form.weights * form.size_bytes
        if info.offset_bytes + count > len(self._buffer):
            raise DemoModelError(f"{self._path}: {name}: the file ends within it")
        octets = np.frombuffer(self._buffer, np.uint8, count, info.offset_bytes)
        return form.decode(octets.reshape(-1, form.size_bytes)).reshape(info.shape)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    @property
    def weight_count(self) -> int:
        """Weights of all tensors together."""
        return sum(math.prod(info.shape) for info in self._tensors.values())

    def _read_header(self) -> None:
        magic, version, tensor_count, key_count = self._unpack("<4sIQQ")
        if magic != _MAGIC or version != _VERSION:
            raise DemoModelError(f"{self._path}: not a GGUF file of version {_VERSION}")
        self.metadata: dict[str, Any] = {}  # Any: as the file says, a scalar, string or list
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(*self._unpack("<I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT_DEFAULT_BYTES)
        data_bytes = -(-self._position // alignment) * alignment
        self._tensors = {
            name: _TensorInfo(shape, kind, data_bytes + offset)
            for name, shape, kind, offset in infos
        }

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimension_count,) = self._unpack("<I")
        fastest_first = self._unpack(f"<{dimension_count}Q")
        kind, offset = self._unpack("<IQ")
        return name, fastest_first[::-1], kind, offset

    def _unpack(self, form: str) -> tuple[Any, ...]:  # Any: what struct's format says
        values = struct.unpack_from(form, self._buffer, self._position)
        self._position += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        octets = self._buffer[self._position : self._position + length]
        self._position += length
        return octets.decode("utf-8")

    def _value(self, kind: int) -> Any:  # Any: as the file says
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._unpack("<IQ")
            return [self._value(item_kind) for _ in range(length)]
        raise DemoModelError(f"{self._path}: unknown metadata type {kind}")
