"""KV blocks that a prefill worker holds until a decode worker has pulled them.

A lease ends exactly once: pulled, released or expired. Freeing blocks while a
peer may still read them corrupts that peer's KV, and never freeing them starves
the worker. The table does no I/O and reads no clock: callers pass `now_s`.
"""

import enum
from collections import OrderedDict
from dataclasses import dataclass

ENDED_MAX = 131_072
"""Ended ids that are remembered, some 30 MB. Who releases a prompt that comes later than so many
others, or confirms one, is answered as for an unknown id: its lease ends by time, as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The offer that travels from prefill through the router to decode."""

    handoff_id: str
    prefill_worker_id: str
    prefill_address: str
    """host:port of the PrefillService that confirms and releases it."""
    group_id: str
    epoch: int
    rank: int
    prompt_tokens: int
    """Tokens whose KV is held; a sampled token is never among them."""
    block_count: int
    kv_layout: str
    lease_remaining_s: float
    connector: str
    connector_params: bytes


class LeaseEnd(enum.StrEnum):
    """How a lease ended."""

    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"


class ReleaseOutcome(enum.Enum):
    """What a release found."""

    ENDED_NOW = enum.auto()
    """The lease was live; the caller now frees its blocks in the engine."""
    REMEMBERED = enum.auto()
    """The id is not known yet; its prefill will hold nothing when it ends."""
    ENDED_BEFORE = enum.auto()
    """It had ended already, in whatever way."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One live claim on the KV blocks of one rank."""

    handoff_id: str
    rank: int
    block_count: int
    expires_at_s: float


class LeaseTable:
    """The leases of one prefill group, live and lately ended.

    Invariants, asserted by `check`:
      L1  blocks held on a rank are within 0..blocks_per_rank
      L2  they are the sum over the rank's live leases
      L3  started = pulled + released + expired + live: each lease ends exactly once
      L4  no id is both live and ended
      L5  no live lease outlives its time by more than one sweep
      L6  at most ENDED_MAX ended ids are remembered, however many are released
    """

    def __init__(self, *, ranks: int, blocks_per_rank: int, memory_s: float) -> None:
        """`memory_s`: how long ended ids, and releases of unknown ids, are remembered."""
        assert ranks > 0
        assert blocks_per_rank > 0
        assert memory_s > 0
        self._blocks_per_rank = blocks_per_rank
        self._memory_s = memory_s
        self._live: dict[str, Lease] = {}
        # In the order of forgetting; a plain dict would search for its first entry each time.
        self._ended: OrderedDict[str, tuple[LeaseEnd, float]] = OrderedDict()
        self._swept_at_s = float("-inf")
        self.blocks_held = [0] * ranks
        self.started = 0
        self.ends = dict.fromkeys(LeaseEnd, 0)

    @property
    def live(self) -> int:
        """Live leases."""
        return len(self._live)

    def get(self, handoff_id: str) -> Lease | None:
        """The live lease of that id."""
        return self._live.get(handoff_id)

    def ended(self, handoff_id: str) -> LeaseEnd | None:
        """How the lease of that id ended; None if it lives, is not known or was forgotten."""
        end = self._ended.get(handoff_id)
        return end[0] if end is not None else None

    def released_early(self, handoff_id: str) -> bool:
        """True if a release overtook the prefill of this id."""
        end = self._ended.get(handoff_id)
        return end is not None and end[0] is LeaseEnd.RELEASED

    def hold(self, lease: Lease) -> bool:
        """Start a lease. False if it cannot live: its blocks must be freed at once.

        So it is if the id has ended before or is live, and if its time is already up.
        """
        assert lease.block_count > 0
        if lease.handoff_id in self._live or lease.handoff_id in self._ended:
            return False
        if lease.expires_at_s <= self._swept_at_s:
            return False
        self._live[lease.handoff_id] = lease
        self.blocks_held[lease.rank] += lease.block_count
        self.started += 1
        return True

    def confirm(self, handoff_id: str, now_s: float) -> float | None:
        """End a lease as pulled and return the seconds it had left.

        None means that the lease was not live until now: what was read may have been
        reused. So it is at a repeat: the first one let the blocks go, and a second
        reader may have read after that.
        """
        lease = self._live.get(handoff_id)
        if lease is None:
            return None
        if lease.expires_at_s <= now_s:
            self._end(lease, LeaseEnd.EXPIRED, now_s)
            return None
        self._end(lease, LeaseEnd.PULLED, now_s)
        return lease.expires_at_s - now_s

    def release(self, handoff_id: str, now_s: float) -> ReleaseOutcome:
        """End a lease that nobody will pull. Idempotent, also for ids not yet known."""
        lease = self._live.get(handoff_id)
        if lease is not None:
            self._end(lease, LeaseEnd.RELEASED, now_s)
            return ReleaseOutcome.ENDED_NOW
        if handoff_id in self._ended:
            return ReleaseOutcome.ENDED_BEFORE
        self._remember(handoff_id, LeaseEnd.RELEASED, now_s)
        return ReleaseOutcome.REMEMBERED

    def sweep(self, now_s: float) -> list[Lease]:
        """End every lease whose time is up and return them; forget what ended long ago."""
        self._swept_at_s = now_s
        due = [lease for lease in self._live.values() if lease.expires_at_s <= now_s]
        for lease in due:
            self._end(lease, LeaseEnd.EXPIRED, now_s)
        while self._ended and next(iter(self._ended.values()))[1] <= now_s:
            self._ended.popitem(last=False)
        return due

    def _end(self, lease: Lease, end: LeaseEnd, now_s: float) -> None:
        del self._live[lease.handoff_id]
        self.blocks_held[lease.rank] -= lease.block_count
        self.ends[end] += 1
        self._remember(lease.handoff_id, end, now_s)

    def _remember(self, handoff_id: str, end: LeaseEnd, now_s: float) -> None:
        self._ended[handoff_id] = (end, now_s + self._memory_s)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def check(self) -> None:
        """Assert the invariants. Cheap enough to call after every change in tests."""
        for rank, held in enumerate(self.blocks_held):
            assert 0 <= held <= self._blocks_per_rank, "L1"
            mine = (x.block_count for x in self._live.values() if x.rank == rank)
            assert held == sum(mine), "L2"
        assert self.started == sum(self.ends.values()) + len(self._live), "L3"
        assert not self._live.keys() & self._ended.keys(), "L4"
        assert len(self._ended) <= ENDED_MAX, "L6"
        assert all(x.expires_at_s > self._swept_at_s for x in self._live.values()), "L5"
