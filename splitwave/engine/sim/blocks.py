"""The KV blocks of one rank, and who wrote each of them last."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Free and taken blocks.

    Invariants, asserted by `check`:
      B1  a block is free or taken, never both, and none is lost
      B2  the blocks taken are as many as the caller's requests and leases hold
    """

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max > 0
        self._blocks_max = blocks_max
        # Freed last is reused last: what an expired lease held stays readable for a while.
        self._free = deque(range(blocks_max))
        self._writer = [0] * blocks_max

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks taken."""
        return self._blocks_max - len(self._free)

    def take(self, count: int, writer: int) -> list[int] | None:
        """Take blocks for `writer`, who is taken to write them; None if so many are not free."""
        free = self._free
        if count > len(free):
            return None
        blocks = [free.popleft() for _ in range(count)]
        for block in blocks:
            self._writer[block] = writer
        return blocks

    def give(self, blocks: Iterable[int]) -> None:
        """Free blocks; what is in them stays until they are taken again."""
        self._free.extend(blocks)

    def intact(self, blocks: Iterable[int], writer: int) -> bool:
        """True if nobody has taken any of these blocks since `writer` did."""
        return all(self._writer[block] == writer for block in blocks)

    def check(self, held: int) -> None:
        """Assert that the caller holds all that is taken."""
        assert 0 <= len(self._free) <= self._blocks_max, "B1"
        assert self.used == held, f"B2: {self.used} taken, {held} held"

    def check_each(self) -> None:
        """Assert B1 block by block: for tests, it walks all free blocks."""
        assert len(set(self._free)) == len(self._free), "B1"
