"""vLLM's resolved configuration as plain values by dotted name."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any  # vLLM's objects are untyped here

from splitwave.core.strict_json import Scalar, flatten

DEPTH_MAX = 12
NUMBER_MAX = 2**63
"""What comes between engine and worker holds 64 bits."""

TWINS = {"hf_text_config": "hf_config", "hf_image_processor_config": "hf_config"}
"""Fields that are the very object that another field is, for most models: told once."""


def resolved(vllm_config: Any) -> dict[str, Scalar]:
    """Every field of a VllmConfig, `vllm.` before its name, whatever it is.

    A value of a kind that has no plain form stands there by its type's name, so that a change of
    kind is seen; nothing depends on addresses, on the order of sets or on the process.
    """
    return flatten(_plain(vllm_config, DEPTH_MAX), "vllm")


def _plain(value: Any, depth: int) -> Any:
    """A JSON value of equal meaning."""
    if isinstance(value, enum.Enum):  # first: some are also numbers or texts
        return value.name
    if isinstance(value, int | float) and not -NUMBER_MAX < value < NUMBER_MAX:
        return str(value)  # infinity and NaN too: JSON has none
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == 0:
        return _type_name(value)
    for kind, plain in _KINDS:
        if isinstance(value, kind):
            return plain(value, depth - 1)
    return _plain_object(value, depth - 1)


def _plain_object(value: Any, depth: int) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if callable(getattr(value, "to_dict", None)):
        # A configuration of transformers: a model's own extras are in it, and are no fields.
        return _plain(value.to_dict(), depth)
    if dataclasses.is_dataclass(value):
        return _fields(value, depth)
    if type(value).__module__ == "torch":  # dtype, device
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _fields(value: Any, depth: int) -> dict[str, Any]:
    found = {item.name: getattr(value, item.name, None) for item in dataclasses.fields(value)}
    return {
        name: _plain(inner, depth)
        for name, inner in found.items()
        if name not in TWINS or inner is not found.get(TWINS[name])
    }


def _items(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {str(_plain(key, 1)): _plain(inner, depth) for key, inner in value.items()}


def _list(value: Sequence[Any], depth: int) -> list[Any]:
    return [_plain(inner, depth) for inner in value]


def _set(value: AbstractSet[Any], depth: int) -> list[Any]:
    return sorted((_plain(inner, depth) for inner in value), key=str)


_KINDS: tuple[tuple[type, Any], ...] = (  # each with its own parameter's type
    (PurePath, lambda value, _: str(value)),
    (bytes, lambda value, _: value.hex()),
    (Mapping, _items),
    (AbstractSet, _set),
    (list, _list),
    (tuple, _list),
)
