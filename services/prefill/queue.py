"""Queued prompt tokens by rank: where a prompt goes, whether it fits, how long it would wait."""

from dataclasses import dataclass

MEMORY_S = 30.0
"""The rate of computing is remembered over about this much busy time."""


@dataclass(slots=True)
class Queued:
    """One prompt in a rank's queue, until its answer."""

    rank: int
    tokens: int
    arrived_s: float
    started_s: float | None = None
    """When it came within the rank's next batch; the engine says no more."""


class RankQueues:
    """The queues of one group's ranks.

    Invariants, asserted by `check`:
      Q1  a rank's tokens are the sum over its queue
      Q2  above `tokens_max` only a queue of one prompt
    """

    def __init__(self, *, ranks: int, batch_max_tokens: int, batches: int) -> None:
        assert ranks > 0
        assert batch_max_tokens > 0
        self._batch_max_tokens = batch_max_tokens
        self.tokens_max = batches * batch_max_tokens
        self._queues: list[dict[str, Queued]] = [{} for _ in range(ranks)]
        self.tokens = [0] * ranks
        self._busy_since_s = [0.0] * ranks
        self._computed_tokens = 0.0
        self._busy_s = 0.0

    def add(self, call_id: str, tokens: int, now_s: float) -> Queued | None:
        """Queue a prompt at the rank with the fewest tokens; None if even that one is full."""
        assert tokens > 0
        rank = min(range(len(self.tokens)), key=self.tokens.__getitem__)
        if self.tokens[rank] and self.tokens[rank] + tokens > self.tokens_max:
            return None
        if not self._queues[rank]:
            self._busy_since_s[rank] = now_s
        queued = self._queues[rank][call_id] = Queued(rank, tokens, now_s)
        self.tokens[rank] += tokens
        self._start(rank, now_s)
        return queued

    def remove(self, call_id: str, rank: int, now_s: float, *, computed: bool) -> None:
        """Take a prompt off; `computed` ones tell how fast the rank is."""
        queued = self._queues[rank].pop(call_id)
        self.tokens[rank] -= queued.tokens
        if computed:
            self._busy_s += max(0.0, now_s - self._busy_since_s[rank])
            self._computed_tokens += queued.tokens
            self._busy_since_s[rank] = now_s
            if self._busy_s > MEMORY_S:
                self._busy_s /= 2
                self._computed_tokens /= 2
        self._start(rank, now_s)

    def retry_after_s(self, tokens: int) -> float:
        """Seconds until the emptiest rank will have room for `tokens`, at the pace seen so far."""
        if not self._computed_tokens or not self._busy_s:
            return 1.0
        surplus = min(self.tokens) + tokens - self.tokens_max
        pace = self._computed_tokens / self._busy_s
        return min(60.0, max(0.01, surplus / pace))

    def prompts(self) -> list[tuple[int, int]]:
        """Prompts of each rank: those that wait, and those within its next batch."""
        counts = []
        for queue in self._queues:
            started = sum(queued.started_s is not None for queued in queue.values())
            counts.append((len(queue) - started, started))
        return counts

    def _start(self, rank: int, now_s: float) -> None:
        """Note which prompts have come within the next batch."""
        ahead = 0
        for queued in self._queues[rank].values():
            if ahead >= self._batch_max_tokens:
                break
            if queued.started_s is None:
                queued.started_s = now_s
            ahead += queued.tokens

    def check(self) -> None:
        """Assert the invariants."""
        for tokens, queue in zip(self.tokens, self._queues, strict=True):
            assert tokens == sum(x.tokens for x in queue.values()), "Q1"
            assert tokens <= self.tokens_max or len(queue) == 1, "Q2"
