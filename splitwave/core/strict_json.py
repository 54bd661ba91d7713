"""JSON with one form for each value, and a reader that takes nothing it was not told of."""

import json
import math
from collections.abc import Mapping, Sequence

Scalar = str | int | float | bool | None
WHOLE_MAX = 2**63
"""Whole numbers stay below this on both sides of 0: what is larger no other reader holds."""


class JsonError(ValueError):
    """Text that is not the JSON it should be. The message names the place."""


def canonical(value: object) -> bytes:
    """The one form of a JSON value: keys sorted, no spaces, UTF-8, no NaN or infinity."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse(data: bytes, *, bytes_max: int) -> object:
    """Read JSON; JsonError for a repeated key, NaN, a number that is too large, bad UTF-8, half a
    character or too many bytes.

    Every text of what it returns can be written as UTF-8.
    """
    if len(data) > bytes_max:
        raise JsonError(f"has {len(data)} bytes; at most {bytes_max} are read")
    try:
        found: object = json.loads(
            data.decode(), object_pairs_hook=_unrepeated, parse_constant=_no_constant,
            parse_float=_finite, parse_int=_whole,
        )  # fmt: skip
        if b"\\u" in data:  # Half of a surrogate pair can be escaped; written out it is no UTF-8.
            canonical(found)
    except JsonError:
        raise
    except UnicodeEncodeError:
        raise JsonError("has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise JsonError(f"is not JSON: {error}") from None
    return found


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise JsonError(f"has {twice!r} twice in one object")
    return made


def _no_constant(name: str) -> object:
    raise JsonError(f"has {name}, which is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise JsonError(f"has {text}, which is too large for a number")
    return number


def _whole(text: str) -> int:
    if len(text) > len(str(-WHOLE_MAX)) or not -WHOLE_MAX < (number := int(text)) < WHOLE_MAX:
        raise JsonError(f"has {text[:24]}..., which is too large for a whole number")
    return number


def flatten(value: object, name: str = "") -> dict[str, Scalar]:
    """Leaves by dotted name, items of lists by number; empty containers stay as `{}` and `[]`.

    Members of enumerations become the plain values that JSON has of them.
    """
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
        empty = "{}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [(str(number), inner) for number, inner in enumerate(value)]
        empty = "[]"
    else:
        assert value is None or isinstance(value, str | int | float), type(value)
        return {name: _plain(value)}
    if not items:
        return {name: empty}
    leaves: dict[str, Scalar] = {}
    for key, inner in items:
        leaves |= flatten(inner, f"{name}.{key}" if name else key)
    return leaves


def _plain(value: Scalar) -> Scalar:
    """The value without a class of its own: it must equal what is read back."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))


class Fields:
    """One JSON object being read. Each field is taken once; `end` refuses what is left over."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise JsonError(f"{where or 'the document'}: is no object")
        self._left = dict(value)
        self._where = where

    def name_of(self, name: str) -> str:
        """Where a field stands, for messages."""
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str) -> object:
        """A field of any kind; JsonError if it is missing."""
        try:
            return self._left.pop(name)
        except KeyError:
            raise JsonError(f"{self.name_of(name)}: is missing") from None

    def text(self, name: str) -> str:
        """A string."""
        value = self.take(name)
        if not isinstance(value, str):
            raise JsonError(f"{self.name_of(name)}: is no text")
        return value

    def whole(self, name: str) -> int:
        """A whole number."""
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise JsonError(f"{self.name_of(name)}: is no whole number")
        return value

    def number(self, name: str) -> int | float:
        """A number, whole or not."""
        value = self.take(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise JsonError(f"{self.name_of(name)}: is no number")
        return value

    def truth(self, name: str) -> bool:
        """True or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise JsonError(f"{self.name_of(name)}: is neither true nor false")
        return value

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise JsonError(f"{self.name_of(name)}: is no list")
        return value

    def whole_numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        found = self.items(name)
        numbers = tuple(x for x in found if isinstance(x, int) and not isinstance(x, bool))
        if len(numbers) != len(found):
            raise JsonError(f"{self.name_of(name)}: holds something that is no whole number")
        return numbers

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        found = self.items(name)
        words = tuple(x for x in found if isinstance(x, str))
        if len(words) != len(found):
            raise JsonError(f"{self.name_of(name)}: holds something that is no text")
        return words

    def scalars(self, name: str) -> dict[str, Scalar]:
        """An object of plain values."""
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise JsonError(f"{self.name_of(name)}: is no object")
        for key, inner in value.items():
            if inner is not None and not isinstance(inner, str | int | float):
                raise JsonError(f"{self.name_of(name)}.{key}: is no plain value")
        return dict(value)

    def fields(self, name: str) -> "Fields":
        """An object."""
        return Fields(self.take(name), self.name_of(name))

    def end(self) -> None:
        """Raise JsonError if a field was not taken."""
        if self._left:
            raise JsonError(f"{self.name_of(min(self._left))}: is unknown here")
