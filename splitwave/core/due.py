"""What falls due when."""

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", str, tuple[str, str])


class Due(Generic[K]):
    """Keys by the time at which they fall due. Every operation costs O(log n), amortized.

    Entries of keys that were dropped or moved stay in the heap until they surface
    or outnumber the others, so dropping needs no search.
    """

    def __init__(self) -> None:
        self._at_s: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._at_s)

    @property
    def entries(self) -> int:
        """Size of the heap: at most twice the keys, and 64."""
        return len(self._heap)

    def set(self, key: K, at_s: float) -> None:
        """Let a key fall due at `at_s`, whatever was said of it before."""
        self._at_s[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > 2 * len(self._at_s) + 64:
            self._heap = [(at_s, key) for key, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forget a key; unknown ones too."""
        self._at_s.pop(key, None)

    def pop(self, now_s: float) -> list[K]:
        """Remove and return the keys that are due, in the order of their times."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, key = heapq.heappop(self._heap)
            if self._at_s.get(key) == at_s:
                del self._at_s[key]
                due.append(key)
        return due
