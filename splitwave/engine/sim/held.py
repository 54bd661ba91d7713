"""Finished prompts of one rank whose blocks wait to be pulled."""

from collections.abc import Iterator
from dataclasses import dataclass

from splitwave.core.handoff import LeaseEnd

_TOMBSTONES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """What one lease holds."""

    blocks: list[int]
    expires_at_s: float


class HeldTable:
    """Leases by engine request id.

    Invariants, asserted by `check`:
      H1  started = pulled + released + expired + live: each lease ends exactly once
      H2  blocks_held is the sum over live leases
    """

    def __init__(self, ttl_s: float) -> None:
        assert ttl_s > 0
        self._ttl_s = ttl_s
        self._live: dict[str, HeldBlocks] = {}  # In the order of expiry: all last equally long.
        self._tombstones: dict[str, float] = {}  # In the order of forgetting.
        self.blocks_held = 0
        self.started = 0
        self.ends = dict.fromkeys(LeaseEnd, 0)

    @property
    def live(self) -> int:
        """Leases that have not ended."""
        return len(self._live)

    def hold(self, request_id: str, blocks: list[int], now_s: float) -> HeldBlocks:
        """Start a lease."""
        assert request_id not in self._live
        held = HeldBlocks(blocks, now_s + self._ttl_s)
        self._live[request_id] = held
        self.blocks_held += len(blocks)
        self.started += 1
        return held

    def end(self, request_id: str, end: LeaseEnd) -> list[int] | None:
        """End a live lease and return its blocks to be freed; None if there is none."""
        held = self._live.pop(request_id, None)
        if held is None:
            return None
        self.blocks_held -= len(held.blocks)
        self.ends[end] += 1
        return held.blocks

    def bury(self, request_id: str, now_s: float) -> None:
        """Remember for one lease that this id was released before it held anything."""
        self._tombstones.pop(request_id, None)
        self._tombstones[request_id] = now_s + self._ttl_s
        if len(self._tombstones) > _TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]

    def buried(self, request_id: str) -> bool:
        """True if a release came before there was anything to release."""
        return request_id in self._tombstones

    def sweep(self, now_s: float) -> Iterator[list[int]]:
        """End the leases whose time is up, forget old releases, and give the blocks to be freed."""
        while self._tombstones:
            request_id = next(iter(self._tombstones))
            if self._tombstones[request_id] > now_s:
                break
            del self._tombstones[request_id]
        while self._live:
            request_id = next(iter(self._live))
            if self._live[request_id].expires_at_s > now_s:
                break
            blocks = self.end(request_id, LeaseEnd.EXPIRED)
            assert blocks is not None
            yield blocks

    def check(self) -> None:
        """Assert H1. H2 walks all leases, so it is in `check_each`."""
        assert self.started == sum(self.ends.values()) + len(self._live), "H1"

    def check_each(self) -> None:
        """Assert H2."""
        assert self.blocks_held == sum(len(x.blocks) for x in self._live.values()), "H2"
