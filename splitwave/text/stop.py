"""Stop strings: the text that ends a completion, found as the text arrives."""

import re
from collections.abc import Sequence
from typing import Final

from splitwave.core.errors import Reason, ServingError

STOPS_MAX: Final = 16
"""Stop strings of a request. OpenAI's API allows 4; each costs a search per token."""
STOP_CHARS_MAX: Final = 256
"""Characters of a stop string, which bound what a stream may hold back."""


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces; how it is cut never matters.

    The match that is complete first wins, and of several that end at the same
    character the one listed first: what checking after every character would
    find, and what vLLM finds. The text shown ends before the match, or behind it
    with `include_in_output`.

    Held back is only the longest end of the text that a stop string begins with.
    With `include_in_output` nothing is: a match would be shown anyway.
    """

    __slots__ = (
        "_any_stop",
        "_held",
        "_include",
        "_last_chars",
        "_prefix_chars_max",
        "_prefixes",
        "_stops",
    )

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        """Raise INVALID_REQUEST, naming the field, for stop strings over the limits or empty."""
        _validate(stops)
        self._stops = tuple(stops)
        self._include = include_in_output
        # One search tells that nothing matches, which is so for nearly every token.
        self._any_stop = re.compile("|".join(map(re.escape, stops)) or "(?!)")
        self._prefixes = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))
        # Most text ends in none of these, which one look-up shows.
        self._last_chars = frozenset(prefix[-1] for prefix in self._prefixes)
        self._prefix_chars_max = max(map(len, self._prefixes), default=0)
        self._held = ""
        """The end of the text seen that a stop string begins with."""

    def push(self, text: str, *, unarmed_chars: int = 0) -> tuple[str, str | None]:
        """Add text; return what may be shown and the stop string that matched, if one did.

        A match that ends within the first `unarmed_chars` of `text` does not count.
        After a match the rest of the text is gone and nothing must be pushed.
        """
        held_count = len(self._held)
        seen = self._held + text
        start, stop = self._first_match(seen, held_count + unarmed_chars)
        if stop is not None:
            self._held = ""
            end = start + len(stop) if self._include else start
            return self._unshown(seen[:end], held_count), stop
        self._held = self._open_end(seen)
        if self._include:
            return text, None
        return seen[: len(seen) - len(self._held)], None

    def finish(self) -> str:
        """Return the text held back, for a completion that ended without a match."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _unshown(self, seen: str, held_count: int) -> str:
        return seen[held_count:] if self._include else seen

    def _first_match(self, seen: str, armed_from: int) -> tuple[int, str | None]:
        """Start and text of the match that ends first, and ends behind `armed_from`."""
        best_end, best_start, best = len(seen) + 1, -1, None
        if self._any_stop.search(seen) is None:
            return best_start, best
        for stop in self._stops:
            start = seen.find(stop, max(0, armed_from + 1 - len(stop)))
            if start >= 0 and start + len(stop) < best_end:
                best_end, best_start, best = start + len(stop), start, stop
        return best_start, best

    def _open_end(self, seen: str) -> str:
        """The longest end of `seen` that begins a stop string and is not a whole one."""
        if not seen or seen[-1] not in self._last_chars:
            return ""
        for start in range(max(0, len(seen) - self._prefix_chars_max), len(seen)):
            if seen[start:] in self._prefixes:
                return seen[start:]
        return ""


def _validate(stops: Sequence[str]) -> None:
    if len(stops) > STOPS_MAX:
        raise ServingError(
            Reason.INVALID_REQUEST,
            f"stop: {len(stops)} stop strings are too many; give at most {STOPS_MAX}",
        )
    for index, stop in enumerate(stops):
        if not stop:
            raise ServingError(
                Reason.INVALID_REQUEST,
                f"stop[{index}]: an empty stop string would end every completion at once;"
                " leave it out",
            )
        if len(stop) > STOP_CHARS_MAX:
            raise ServingError(
                Reason.INVALID_REQUEST,
                f"stop[{index}]: {len(stop)} characters are too many; give at most"
                f" {STOP_CHARS_MAX}",
            )
