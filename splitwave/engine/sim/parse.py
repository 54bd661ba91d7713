"""Settings of a simulated group from JSON: what a worker's command line or a file says."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TypeVar

from splitwave.engine.port import Role
from splitwave.engine.sim.settings import RankDeath, RankPause, SimFaults, SimSettings

T = TypeVar("T")


def settings_from_json(text: str, role: Role) -> SimSettings:
    """Settings of a group of `role`. Raises ValueError that names the field and the fix.

    One object, {} for the defaults: numbers, strings and booleans as `SimSettings`
    has them, and `faults` with an object of `SimFaults`.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"settings are not JSON: {error}") from error
    if isinstance(values, Mapping) and values.get("role", role) != role:
        raise ValueError(f"settings.role is {values['role']!r}, but this is a {role} worker")
    return _object(SimSettings, {"role": role, **_mapping(values, "settings")}, "settings")


def _object(kind: type[T], values: object, where: str) -> T:
    """Make a `kind` of a JSON object; `where` is its name in errors."""
    # Every `kind` here is a dataclass; the type variable cannot say so.
    known = {x.name: x.type for x in fields(kind)}  # type: ignore[arg-type]  # see above
    made: dict[str, object] = {}
    for name, value in _mapping(values, where).items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise ValueError(f"{where}.{name} is unknown: remove it or use one of {names}")
        read = _READERS[known[name]]
        made[name] = read(value, f"{where}.{name}")
    try:
        return kind(**made)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{where} is {value!r}: it must be a JSON object")


def _integer(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{where} is {value!r}: it must be a whole number")


def _number(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{where} is {value!r}: it must be a number")


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{where} is {value!r}: it must be true or false")


def _string(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{where} is {value!r}: it must be a string")


def _role(value: object, where: str) -> Role:
    return Role(_string(value, where))


def _pauses(value: object, where: str) -> tuple[RankPause, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r}: it must be a list of objects")
    return tuple(_object(RankPause, x, f"{where}[{i}]") for i, x in enumerate(value))


def _death(value: object, where: str) -> RankDeath | None:
    return None if value is None else _object(RankDeath, value, where)


def _faults(value: object, where: str) -> SimFaults:
    return _object(SimFaults, value, where)


_READERS: Mapping[object, Callable[[object, str], object]] = {
    int: _integer,
    float: _number,
    bool: _boolean,
    str: _string,
    Role: _role,
    SimFaults: _faults,
    tuple[RankPause, ...]: _pauses,
    RankDeath | None: _death,
}
"""How each type that a setting has is read; a setting of a new type fails its test."""
