"""What the battery generates: prompts from a seed, and how two generations are compared."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from splitwave.core.generation import Sampling, features

TOKEN_IDS = 250
"""Prompts use the ids from 1 on below this: every vocabulary has them."""
TOP = 5
"""Log probabilities that the oracle tells at each place."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""How far a log probability may be off. In float32 batches and ranks only reorder sums; with 8 or
11 bits of mantissa each of some dozen layers rounds what it adds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One generation whose tokens are certain: greedy, or drawn with a seed."""

    name: str
    token_ids: tuple[int, ...]
    new_tokens: int
    features: Sampling | None = None
    """How it is sampled; None: greedily, for exactly `new_tokens`."""

    @property
    def sampling(self) -> Sampling:
        """How it is sampled."""
        if self.features is not None:
            return replace(self.features, max_tokens=self.new_tokens)
        return Sampling(max_tokens=self.new_tokens, temperature=0.0, ignore_eos=True, logprobs=TOP)


_FEATURES = (
    Sampling(
        max_tokens=1, temperature=0.8, seed=11, top_p=0.9, top_k=20, min_p=0.01, logprobs=TOP,
        ignore_eos=True,
    ),
    Sampling(
        max_tokens=1, temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5,
        repetition_penalty=1.3, logprobs=TOP, ignore_eos=True,
    ),
    Sampling(
        max_tokens=1, temperature=0.0, logit_bias={7: 100.0, 9: 99.0}, min_tokens=2,
        stop_token_ids=(7,), eos_token_ids=(2,), logprobs=TOP,
    ),
)  # fmt: skip
"""Together they have every feature that a router can ask for."""


def certified_features() -> tuple[str, ...]:
    """Names of the sampling features that the oracle's cases run, sorted."""
    return tuple(sorted({name for sampling in _FEATURES for name in features(sampling)}))


def feature_cases(length: int, new_tokens: int, seed: int) -> list[Case]:
    """Cases that have every sampling feature."""
    return [
        Case(f"{seed}.features {place}", prompt(length, seed + place), new_tokens, sampling)
        for place, sampling in enumerate(_FEATURES)
    ]


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens, and at each place the log probabilities of the likeliest, the sampled one's too."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """A fixed random prompt."""
    source = random.Random(f"{seed}/{length}")
    return tuple(source.randrange(1, TOKEN_IDS) for _ in range(length))


def cases(lengths: Sequence[int], new_tokens: int, seed: int) -> list[Case]:
    """A case a length; lengths may repeat."""
    return [
        Case(f"{seed}.{place}: {length}", prompt(length, 1000 * seed + place), new_tokens)
        for place, length in enumerate(lengths)
    ]


def lengths_around(block: int, longest: int, count: int) -> list[int]:
    """Prompt lengths at and beside block boundaries, from 2 to `longest`, at most `count`.

    One token is left out: such a prompt's first token is prefill's, so decode would not begin.
    """
    edges = [2, block - 1, block, block + 1, 2 * block, 2 * block + 1, longest // 2, longest]
    fitting = sorted({length for length in edges if 2 <= length <= longest})
    if len(fitting) <= count:
        return fitting
    places = [round(place * (len(fitting) - 1) / (count - 1)) for place in range(count)]
    return [fitting[place] for place in places]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far apart two generations are."""

    first_token: int | None
    """Where tokens differ first, and not by a near tie; None if nowhere."""
    logprob: float
    """Largest difference of a log probability that both sides tell, up to there."""
    near_ties: int = 0


def compare(ours: Generated, theirs: Generated, *, dtype: str) -> Difference:
    """Compare with an oracle's generation.

    In float32 tokens must be equal. With less precision the comparison ends, well, at a token
    whose two candidates the oracle has within the bound.
    """
    bound = BOUNDS[dtype]
    worst = 0.0
    if len(ours.token_ids) != len(theirs.token_ids):
        # Nothing is said of log probabilities: what was cut off must not pass for a wrong weight.
        return Difference(min(len(ours.token_ids), len(theirs.token_ids)), 0.0)
    for place, (mine, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        here, there = ours.logprobs[place], theirs.logprobs[place]
        both = here.keys() & there.keys()
        worst = max([worst, *(abs(here[token] - there[token]) for token in both)])
        if mine == other:
            continue
        margin = there.get(other, math.inf) - there.get(mine, -math.inf)
        if dtype != "float32" and margin <= bound:
            return Difference(None, worst, near_ties=1)
        return Difference(place, worst)
    return Difference(None, worst)
