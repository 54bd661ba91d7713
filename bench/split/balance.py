"""A plain balancer inside the clients: of two addresses drawn by chance, the less loaded one.

It costs no hop and sees every client's requests at once, which no balancer in between does
better: what is compared with it gets no worse balancing than it would have anywhere.
"""

import mmap
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WORD_BYTES = 8


class Board:
    """Requests in flight, by client and address, in a file that all clients map.

    A client writes its own row only, so nothing is locked.
    """

    def __init__(self, path: Path, clients: int, addresses: int) -> None:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), clients * addresses * WORD_BYTES)
        self.counts = np.frombuffer(mapped, dtype=np.int64).reshape(clients, addresses)

    @classmethod
    def make(cls, path: Path, clients: int, addresses: int) -> None:
        """Write an empty board."""
        path.write_bytes(bytes(clients * addresses * WORD_BYTES))


class Balancer:
    """One client's choices."""

    def __init__(self, board: Board, client: int, draw: random.Random) -> None:
        self._counts = board.counts
        self._client = client
        self._draw = draw

    def take(self) -> int:
        """Choose an address, and count a request there until it is given back."""
        place = self._choose(range(self._counts.shape[1]))
        self._counts[self._client, place] += 1
        return place

    def give(self, place: int) -> None:
        """The request has ended."""
        self._counts[self._client, place] -= 1

    def _choose(self, places: Sequence[int]) -> int:
        if len(places) == 1:
            return places[0]
        a, b = self._draw.sample(places, 2)
        return a if self._counts[:, a].sum() <= self._counts[:, b].sum() else b
