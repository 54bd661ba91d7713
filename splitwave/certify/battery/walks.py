"""Which batch size each rank runs in which step. Pure planning; the engine's scheduler obeys it."""

import itertools
import random
from collections.abc import Iterable, Sequence

Plan = list[int]
"""Batch sizes of one rank, one a step."""


def every_order(sizes: Sequence[int]) -> Plan:
    """The shortest walk in which each size follows each size, itself included.

    An Eulerian circuit of the complete graph with loops: n * n + 1 steps for n sizes.
    """
    assert sizes
    assert len(set(sizes)) == len(sizes)
    left = {size: list(sizes) for size in sizes}
    stack, walk = [sizes[0]], []
    while stack:
        if onward := left[stack[-1]]:
            stack.append(onward.pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def orders_missing(sizes: Sequence[int], executed: Iterable[int]) -> set[tuple[int, int]]:
    """Ordered pairs of sizes that never ran one right after the other."""
    steps = list(executed)
    seen = set(itertools.pairwise(steps))
    return {(first, then) for first in sizes for then in sizes} - seen


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """At most `count` of the sizes, the smallest and the largest among them, evenly apart."""
    assert count >= 2
    if len(sizes) <= count:
        return list(sizes)
    places = [round(place * (len(sizes) - 1) / (count - 1)) for place in range(count)]
    return [sizes[place] for place in places]


def ragged(sizes: Sequence[int], ranks: int, steps: int, seed: int) -> list[Plan]:
    """A walk a rank, each by itself: often at opposite ends, now and then alike.

    Rank r leans to small sizes while its neighbour leans to large ones, and they change places
    every so often; within that each step is drawn.
    """
    assert ranks >= 2
    source = random.Random(seed)
    ordered = sorted(sizes)
    period = max(2, 2 * len(ordered))
    plans: list[Plan] = [[] for _ in range(ranks)]
    for step in range(steps):
        swapped = step // period % 2
        for rank, plan in enumerate(plans):
            leaning = source.random() ** 3  # Mostly near 0.
            place = leaning if (rank + swapped) % 2 else 1.0 - leaning
            plan.append(ordered[min(len(ordered) - 1, int(place * len(ordered)))])
    return plans


def parts(plans: Sequence[Sequence[int]], steps_max: int) -> list[list[Plan]]:
    """Plans of equal length cut into parts of at most `steps_max` steps, in order.

    Each part begins with the step that ended the one before, so no order of two steps is lost.
    Parts in which nobody has anything to do are left out.
    """
    assert steps_max >= 2
    (length,) = {len(plan) for plan in plans}
    firsts = range(0, max(1, length - 1), steps_max - 1)
    cut = [[list(plan[first : first + steps_max]) for plan in plans] for first in firsts]
    return [part for part in cut if any(map(any, part))]


def raggedness(plans: Sequence[Sequence[int]]) -> float:
    """Share of the steps in which ranks ran different sizes."""
    together = list(zip(*plans, strict=False))
    return sum(len(set(step)) > 1 for step in together) / len(together) if together else 0.0


def raggedness_seen(logs: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Share of the steps in which ranks ran different sizes, by when each rank's steps ended.

    `logs`: a rank each, (end in seconds, size) in order; a step in which a rank had nothing to do
    is not in its log. In lock-step no rank ends a step before all have ended the one before, so
    in order of their ends a step is over when one of its ranks comes again.
    """
    ends = sorted(
        (ended_at_s, rank, size) for rank, log in enumerate(logs) for ended_at_s, size in log
    )
    together: list[dict[int, int]] = []
    for _, rank, size in ends:
        if not together or rank in together[-1]:
            together.append({})
        together[-1][rank] = size
    ragged = sum(len(step) < len(logs) or len(set(step.values())) > 1 for step in together)
    return ragged / len(together) if together else 0.0


def stretch(walked: Sequence[int], executed: Sequence[int]) -> slice:
    """Where in a rank's steps its walk was; all of them if it is not there."""
    wanted = [size for size in walked if size]
    for first in range(len(executed) - len(wanted) + 1):
        if list(executed[first : first + len(wanted)]) == wanted:
            return slice(first, first + len(wanted))
    return slice(None)


def storm(count: int, ranks: int, seed: int, *, pause_s: float) -> list[tuple[float, int]]:
    """Bursts of requests with gaps: seconds to wait before each, and its rank.

    Most gaps are longer than `pause_s`, in which an idle group pauses; within a burst there are
    none, so that first requests race each other to different ranks.
    """
    source = random.Random(seed)
    planned: list[tuple[float, int]] = []
    while len(planned) < count:
        gap_s = pause_s * source.choice((0.2, 1.0, 1.5, 2.0))
        gaps_s = [gap_s] + [0.0] * source.randint(0, ranks)
        planned += [(wait_s, source.randrange(ranks)) for wait_s in gaps_s]
    return planned[:count]
