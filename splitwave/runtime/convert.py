"""Text and TOML values in the types of a config's fields."""

import enum
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from splitwave.core.reach import COUNT_MAX, SECONDS_MAX, WIDE_MAX

_WIDE = ("_bytes", "epoch", "seed", "_per_s")
"""Endings of names whose numbers need 64 bits."""

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


class BadValue(ValueError):
    """A value that is not of the field's type. Says what it is and what to write instead."""


def check_reach(name: str, value: object) -> None:
    """Raise BadValue for a number that is larger than any setting of this name can mean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if name.endswith(_WIDE):
        most: float = WIDE_MAX
    elif name.endswith("_s"):
        most = SECONDS_MAX
    elif isinstance(value, float):
        most = WIDE_MAX
    else:
        most = COUNT_MAX
    if abs(value) > most:
        raise BadValue(f"is {value}; set it to {most:.0f} at most")


def is_table(kind: object) -> bool:
    """True if a field holds settings by name."""
    return typing.get_origin(kind) is Mapping


def convert(value: object, kind: object) -> object:
    """Return `value`, a text or what TOML gave, as `kind`. Raises BadValue."""
    if isinstance(kind, types.UnionType):
        return _convert_optional(value, kind)
    if is_table(kind):
        return dict(_flatten(value))
    if kind is bool:
        return _convert_bool(value)
    if not isinstance(kind, type) or issubclass(kind, tuple):
        raise BadValue("cannot be set from outside")
    if isinstance(value, bool | Mapping | list):
        raise BadValue(f"is {value!r}; write {_example(kind)}")
    return _convert_plain(value, kind)


def _convert_plain(value: object, kind: type) -> object:
    text = str(value)
    try:
        if issubclass(kind, enum.Enum):
            return kind(text)
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return _finite(text)
    except ValueError:
        raise BadValue(f"is {value!r}; write {_example(kind)}") from None
    if kind is str or issubclass(kind, Path):
        return kind(text)
    raise BadValue("cannot be set from outside")


def _finite(text: str) -> float:
    """A number that clocks and the wire take: neither NaN nor infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _convert_optional(value: object, kind: types.UnionType) -> object:
    inner = [x for x in typing.get_args(kind) if x is not types.NoneType]
    if value == "none" or len(inner) != 1:
        return None
    return convert(value, inner[0])


def _convert_bool(value: object) -> bool:
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise BadValue(f"is {value!r}; write true or false")
    return text in _TRUE


def _flatten(value: object, prefix: str = "") -> "list[tuple[str, str]]":
    """Names and texts of a TOML table, nested ones with dots, or of NAME=VALUE,NAME=VALUE."""
    if isinstance(value, Mapping):
        pairs = []
        for name, inner in value.items():
            if isinstance(inner, Mapping):
                pairs += _flatten(inner, f"{prefix}{name}.")
            else:
                pairs.append((f"{prefix}{name}", str(inner)))
        return pairs
    pairs = []
    for part in str(value).split(","):
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise BadValue(f"has {part!r}; write NAME=VALUE, several with commas between")
        pairs.append((name.strip(), text.strip()))
    return pairs


def _example(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(x.value) for x in kind)
    return {int: "a whole number", float: "a number"}.get(kind, "a text")
