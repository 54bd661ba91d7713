"""What is asked, and when: drawn from the seed alone, so that every system gets the same."""

import hashlib
from dataclasses import dataclass

import numpy as np

from bench.split.settings import Load

POISSON, CLOSED, PROMPT = 1, 2, 3
"""Keep the draws of different things apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One cell's requests. Those of a closed load are numbered by turn and stream."""

    seed: int
    load: Load
    prompt_tokens: int
    completion_tokens: int
    token_ids: tuple[int, int]
    warm_s: float
    until_s: float
    """No request is sent from here on."""

    @property
    def _key(self) -> list[int]:
        return [self.seed, self.prompt_tokens, self.completion_tokens, round(self.load.value * 1e6)]

    def arrivals_s(self) -> list[float]:
        """Poisson: when each request is due, from the beginning."""
        assert self.load.kind == "poisson"
        draw = np.random.default_rng([*self._key, POISSON])
        expected = int(self.load.value * self.until_s)
        due = np.cumsum(draw.exponential(1.0 / self.load.value, size=2 * expected + 100))
        assert due[-1] > self.until_s
        return [float(at_s) for at_s in due[due < self.until_s]]

    def starts_s(self) -> list[float]:
        """Closed: when each stream begins, within the first half of the warm-up."""
        assert self.load.kind == "closed"
        draw = np.random.default_rng([*self._key, CLOSED])
        return [float(at_s) for at_s in draw.uniform(0.0, self.warm_s / 2, int(self.load.value))]

    def prompt(self, number: int) -> list[int]:
        """Token ids of one request."""
        draw = np.random.default_rng([*self._key, PROMPT, number])
        low, high = self.token_ids
        return [int(x) for x in draw.integers(low, high, size=self.prompt_tokens, endpoint=True)]

    def number(self, stream: int, turn: int) -> int:
        """Closed: the number of a stream's request."""
        return turn * int(self.load.value) + stream

    def digest(self) -> str:
        """Of the arrivals and of the first prompts: equal where the same was asked."""
        times = self.arrivals_s() if self.load.kind == "poisson" else self.starts_s()
        heads = [self.prompt(number) for number in range(4)]
        told = repr(([round(at_s, 9) for at_s in times], heads, self.completion_tokens))
        return hashlib.sha256(told.encode()).hexdigest()[:16]
