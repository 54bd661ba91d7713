"""The seeded walk of a hammer: which graph each replay runs, on what, and which rank is late.

Every rank makes the same walk from the same settings, so that the group agrees on each graph
without a word between the ranks. What is real in a graph's rows differs from rank to rank.
"""

import enum
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class Late(enum.StrEnum):
    """How a rank is held back before a replay."""

    HOST = enum.auto()
    GPU = enum.auto()
    BOTH = enum.auto()


@dataclass(frozen=True, slots=True)
class Skew:
    """One rank is late by so many milliseconds."""

    rank: int
    ms: float
    late: Late


@dataclass(frozen=True, slots=True)
class Step:
    """One replay. Tuples have one value a rank.

    `size` is the graph's rows; `tokens` are the real ones, 0 to size; `entries` is the place in
    the pool of inputs; the inputs are multiplied by `factor`, a signed power of two, which keeps
    bfloat16 exact and makes rows of another replay wrong rows. `eager`: a host-synchronised
    dispatch follows the replay, where the transport under test has one. `astray` breaks the rule
    that the group agrees on each graph, to see what that does.
    """

    size: int
    tokens: tuple[int, ...]
    entries: tuple[int, ...]
    factor: float
    skew: Skew | None = None
    eager: bool = False
    astray: tuple[int, int] | None = None
    """A rank that replays another graph than its peers, and the size of it."""

    def size_of(self, rank: int) -> int:
        """Return the rows of the graph that a rank replays."""
        if self.astray is not None and self.astray[0] == rank:
            return self.astray[1]
        return self.size

    @property
    def eager_tokens(self) -> tuple[int, ...]:
        """Return how many tokens each rank sends in the host-synchronised dispatch.

        Fewer than the replay before it, so that a count that is the replay's shows.
        """
        return tuple(max(1, n // 3) for n in self.tokens)


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """What a walk is made from; equal settings make equal walks on every machine."""

    sizes: tuple[int, ...]
    replays: int
    seed: int
    ranks: int = 2
    entries: int = 32
    """Inputs in the pool of a rank."""
    pair_min: int = 50
    """How often each ordered pair of sizes must follow one another, as far as `replays` allows."""
    skew_ms_max: float = 20.0
    skew_budget_s: float = 60.0
    """How long all skews together may last."""
    idle_share: float = 0.02
    """Share of the replays in which one rank has no real token, like an idle rank's dummy step."""
    eager_share: float = 0.0
    """Share of the replays that a host-synchronised dispatch follows."""
    astray_share: float = 0.0
    """Share of the replays in which one rank replays another graph than its peers."""

    def __post_init__(self) -> None:
        assert self.sizes
        assert min(self.sizes) > 0
        assert len(set(self.sizes)) == len(self.sizes)
        assert self.replays > 0
        assert self.ranks > 0
        assert self.entries > 0
        assert self.skew_ms_max >= 0


EXPONENT_MAX = 6
"""Factors are 2**-6 to 2**6, with either sign."""


def plan(settings: WalkSettings) -> list[Step]:
    """Return the whole walk: `settings.replays` steps."""
    chance = random.Random(settings.seed)
    sizes = size_walk(settings, chance)
    skews = skew_plan(settings, chance)
    return [_step(settings, size, skews.get(place), chance) for place, size in enumerate(sizes)]


def _step(settings: WalkSettings, size: int, skew: Skew | None, chance: random.Random) -> Step:
    tokens = ragged(settings, size, chance)
    astray = None
    if chance.random() < settings.astray_share:
        astray = chance.randrange(settings.ranks), chance.choice(settings.sizes)
        tokens = tuple(
            min(n, astray[1]) if rank == astray[0] else n for rank, n in enumerate(tokens)
        )
    return Step(
        size=size,
        tokens=tokens,
        entries=tuple(chance.randrange(settings.entries) for _ in range(settings.ranks)),
        factor=chance.choice((-1.0, 1.0)) * 2.0 ** chance.randint(-EXPONENT_MAX, EXPONENT_MAX),
        skew=skew,
        eager=chance.random() < settings.eager_share,
        astray=astray,
    )


def size_walk(settings: WalkSettings, chance: random.Random) -> list[int]:
    """Return sizes in which each ordered pair follows one another `pair_min` times or more.

    The first stretch is a closed walk over every ordered pair, as often as asked and as fits; the
    rest is drawn freely. So a run that ends early has seen its pairs.
    """
    pairs = len(settings.sizes) ** 2
    rounds = min(settings.pair_min, (settings.replays - 1) // pairs)
    walk = _closed_walk(settings.sizes, rounds, chance) if rounds else []
    while len(walk) < settings.replays:
        walk.append(chance.choice(settings.sizes))
    return walk


def _closed_walk(sizes: Sequence[int], rounds: int, chance: random.Random) -> list[int]:
    """Return a random closed walk that takes each ordered pair, own pairs too, `rounds` times.

    Each size has as many ways in as out, so Hierholzer's method always finds one.
    """
    ways = {size: list(sizes) * rounds for size in sizes}
    for out in ways.values():
        chance.shuffle(out)
    walk: list[int] = []
    stack = [chance.choice(sizes)]
    while stack:
        if ways[stack[-1]]:
            stack.append(ways[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    assert len(walk) == len(sizes) ** 2 * rounds + 1
    return walk[::-1]


def ragged(settings: WalkSettings, size: int, chance: random.Random) -> tuple[int, ...]:
    """Return the real tokens of each rank: mostly anything, often an extreme, seldom none."""
    tokens = [_tokens(size, chance) for _ in range(settings.ranks)]
    if chance.random() < settings.idle_share:
        tokens[chance.randrange(settings.ranks)] = 0
    return tuple(tokens)


def _tokens(size: int, chance: random.Random) -> int:
    kind = chance.random()
    if kind < 0.15:
        return size
    if kind < 0.25:
        return 1
    if kind < 0.35:
        return max(1, size - chance.randrange(1, 9))
    return chance.randint(1, size)


def skew_plan(settings: WalkSettings, chance: random.Random) -> dict[int, Skew]:
    """Return which replays are skewed, within the budget, spread over the whole walk."""
    if settings.skew_ms_max == 0:
        return {}
    budget_ms = 1000.0 * settings.skew_budget_s
    wanted = min(settings.replays, int(2 * budget_ms / settings.skew_ms_max))
    places = chance.sample(range(settings.replays), wanted)
    skews: dict[int, Skew] = {}
    for place in places:
        ms = chance.uniform(0.0, settings.skew_ms_max)
        if ms > budget_ms:
            break
        budget_ms -= ms
        late = chance.choice(list(Late))
        skews[place] = Skew(rank=chance.randrange(settings.ranks), ms=ms, late=late)
    return skews


def pair_counts(steps: Sequence[Step]) -> Counter[tuple[int, int]]:
    """Return how often each ordered pair of sizes followed one another."""
    return Counter((a.size, b.size) for a, b in itertools.pairwise(steps))


def pair_minimum(steps: Sequence[Step], sizes: Sequence[int]) -> int:
    """Return how often the scarcest ordered pair of `sizes` followed one another."""
    counts = pair_counts(steps)
    return min(counts[a, b] for a, b in itertools.product(sizes, repeat=2))


def skew_figures(steps: Sequence[Step]) -> dict[str, float]:
    """Return how many replays were skewed, for how long together and at most (milliseconds)."""
    ms = [step.skew.ms for step in steps if step.skew is not None]
    return {"count": len(ms), "total_ms": round(sum(ms), 1), "max_ms": round(max(ms, default=0), 2)}
