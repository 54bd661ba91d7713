"""What is decoded: full batches, a ragged one, and a random walk on each rank.

All of it follows from the rank, the iteration and seeds, never from time: ranks and modes decode
the same sequences in the same batches, and a longer run begins with all of a shorter one.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

RANKS = 2
PROMPT_TOKENS = 32
FIRST_ID = 2
LENGTHS = (4, 96)
"""Tokens of a request of the walk, from and to."""
TURN = 24
"""Iterations between two changes of the walk's aim, on average."""
JOIN_EVERY = 8
"""Requests join in every eighth iteration: filling their cache is the benchmark's own cost, and
the steps between are without it."""
JOIN_MAX = 64
"""Requests that join in one iteration of the walk."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence: where it starts and how long it is decoded."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int


def prompt(vocabulary: int, number: int) -> tuple[int, ...]:
    """A prompt that ends in a token of its own, as long as numbers do not wrap the vocabulary."""
    return (FIRST_ID,) * (PROMPT_TOKENS - 1) + (FIRST_ID + number % (vocabulary - FIRST_ID),)


def batch(phase: str, rank: int, size: int, tokens: int, vocabulary: int) -> list[Request]:
    """`size` sequences of one rank, equally long; those of ranks differ."""
    return [
        Request(f"{phase}/{rank}/{at}", prompt(vocabulary, RANKS * at + rank), tokens)
        for at in range(size)
    ]


class Walk:
    """A random walk of how many sequences run on one rank.

    It aims at a number from 1 to `running_max`, at another every so often, and gets there by
    letting requests of random length join and end.
    """

    def __init__(self, *, rank: int, running_max: int, vocabulary: int, seed: int) -> None:
        self._random = random.Random(f"{seed}/{rank}")  # reproducible, not secret
        self._rank, self._running_max, self._vocabulary = rank, running_max, vocabulary
        self._aim = self._random.randint(1, running_max)
        self._count = self._iteration = 0

    def joining(self, running: int) -> Iterator[Request]:
        """The requests that join in this iteration, with `running` of this rank's unfinished."""
        self._iteration += 1
        if self._random.random() < 1 / TURN:
            self._aim = self._random.randint(1, self._running_max)
        if self._iteration % JOIN_EVERY != 1:
            return
        for _ in range(min(JOIN_MAX, self._aim - running)):
            length = self._random.randint(*LENGTHS)
            ends_in = prompt(self._vocabulary, RANKS * self._count + self._rank)
            yield Request(f"walk{JOIN_EVERY}/{self._rank}/{self._count}", ends_in, length)
            self._count += 1
