"""Where a request goes: which decode worker is asked, which prefill worker computes.

Randomness is passed in, so the same code runs in the simulator.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitwave.core.session import GroupLoad


def two_choices(count: int, random_a: float, random_b: float) -> tuple[int, int]:
    """Two different indices below `count` (equal only if count is 1), from numbers in [0, 1).

    Power of two choices: Mitzenmacher, IEEE TPDS 12(10), 2001.
    """
    assert count > 0
    first = int(random_a * count)
    if count == 1:
        return first, first
    second = int(random_b * (count - 1))
    return first, second + (second >= first)


def roomier(a: GroupLoad, b: GroupLoad) -> bool:
    """True if `a` is the better decode worker to ask for room."""
    return _room(a) >= _room(b)


def _room(load: GroupLoad) -> tuple[bool, int, int, int]:
    return (not load.draining, -load.asks_waiting, load.seats_free, load.blocks_free)


@dataclass(slots=True)
class PrefillQueue:
    """What a router knows of one prefill worker's queue, in prompt tokens."""

    worker_id: str
    queued_by_rank: list[int]
    """As the worker last reported."""
    batch_max_tokens: int
    draining: bool = False
    placed: dict[str, int] = field(default_factory=dict)
    """Placed here by this router and perhaps not in the last report: handoff id -> tokens."""

    def tokens(self) -> int:
        """Queued prompt tokens: the report, or our own placements where they are more."""
        return max(sum(self.queued_by_rank), sum(self.placed.values()))

    def least_rank_tokens(self) -> int:
        """Queued prompt tokens of the least loaded rank."""
        return min(self.queued_by_rank, default=0)

    def full(self, tokens: int) -> bool:
        """True if the queue bound of two batches a rank leaves no room for `tokens` more."""
        ranks = max(1, len(self.queued_by_rank))
        waiting = self.tokens()
        return waiting > 0 and waiting + tokens > 2 * self.batch_max_tokens * ranks


def place_prefill(
    queues: Sequence[PrefillQueue],
    tokens: int,
    *,
    affinity_tokens: Mapping[str, int] | None = None,
) -> PrefillQueue | None:
    """The worker with the fewest tokens to wait for, or None if all are full or draining.

    `affinity_tokens` says how many of the prompt's tokens a worker likely has in its
    prefix cache; they count as work that need not be done there.
    """
    affinity = affinity_tokens or {}
    fit = [q for q in queues if not q.draining and not q.full(tokens)]

    def wait(queue: PrefillQueue) -> tuple[int, int, str]:
        work = queue.tokens() + max(0, tokens - affinity.get(queue.worker_id, 0))
        return (work, queue.least_rank_tokens(), queue.worker_id)

    return min(fit, key=wait, default=None)


def subset(worker_ids: Sequence[str], router_index: int, routers: int, size_max: int) -> list[str]:
    """The workers that one router serves: a deterministic, even share of at most `size_max`.

    Routers lie evenly around the ring of sorted ids and each takes the slice that begins
    at its place. So all workers serve as many routers, give or take one, and a worker
    that comes or goes moves each slice by a place or two. (Google's deterministic
    subsetting, SRE book, chapter 20, is as even, but moves most pairs.)
    """
    assert 0 <= router_index < routers
    ids = sorted(worker_ids)
    if len(ids) <= size_max:
        return ids
    start = router_index * len(ids) // routers
    return [ids[(start + i) % len(ids)] for i in range(size_max)]


def floor_tier(used_tokens: int, floor_tokens: int) -> int:
    """How soon a group gets one more request, 0 first, by a mode's floor of a step's tokens.

    A group that has begun and is below the floor comes first, so that it leaves the range in which
    its mode is not at its best; an idle group comes last, so that it does not enter it.
    """
    if used_tokens >= floor_tokens:
        return 1
    return 0 if used_tokens > 0 else 2
