"""Write a .safetensors file tensor by tensor, so that memory holds one at a time.

Source: the format's description in safetensors' README. The header, which comes
first, is written last: room for it is kept and filled up with spaces, as the
format allows.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from splitwave.demo_model.recipe import Dtype

HEADER_BYTES: Final = 256 * 1024
"""Room for the header with its length in front; the largest build needs a third."""

_NAMES: Final = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16", Dtype.FLOAT16: "F16"}


def write(path: Path, tensors: Iterable[tuple[str, NDArray[np.float32]]], dtype: Dtype) -> int:
    """Write float32 tensors in a format, rounded to nearest even, and return the file's size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    with path.open("wb") as file:
        file.seek(HEADER_BYTES)
        start = 0
        for name, weights in tensors:
            assert name not in header
            octets = encoded(weights, dtype)
            file.write(octets.data)
            end = start + octets.nbytes
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(weights.shape),
                "data_offsets": [start, end],
            }
            start = end
        file.seek(0)
        file.write(_header_octets(header))
    return HEADER_BYTES + start


def encoded(weights: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """The weights as an array whose memory is what the file holds."""
    weights = np.ascontiguousarray(weights, dtype="<f4")
    if dtype is Dtype.FLOAT32:
        return weights
    if dtype is Dtype.FLOAT16:
        return weights.astype("<f2")
    return _bfloat16(weights)


def _bfloat16(weights: NDArray[np.float32]) -> NDArray[np.generic]:
    """The upper half of each float32, rounded to nearest even. Weights are finite."""
    bits = weights.view("<u4")
    half_or_less = np.uint32(0x7FFF)
    return ((bits + half_or_less + (bits >> 16 & 1)) >> 16).astype("<u2")


def _header_octets(header: dict[str, object]) -> bytes:
    octets = json.dumps(header, separators=(",", ":")).encode()
    room = HEADER_BYTES - 8
    assert len(octets) <= room
    return room.to_bytes(8, "little") + octets.ljust(room)
