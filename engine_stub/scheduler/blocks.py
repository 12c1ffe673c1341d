"""The paged KV pool: block ids are handed out and come back; a promise keeps a block free for its owner.

Invariant: `used + free == total` and `promised <= free`, so usage can't exceed the capacity.
"""


class BlockPool:
    """A fixed number of KV blocks."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.promised = 0
        self.high_water = 0
        self._free = list(range(total - 1, -1, -1))

    @property
    def used(self) -> int:
        """Blocks that hold KV now."""
        return self.total - len(self._free)

    @property
    def available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return len(self._free) - self.promised

    def promise(self, count: int) -> None:
        """Keep `count` free blocks for later `take_promised` calls of the caller."""
        assert count <= self.available, "promised more blocks than are available"
        self.promised += count

    def take(self, count: int) -> list[int]:
        """Take `count` available blocks; the caller has checked that they are there."""
        assert count <= self.available, "took more blocks than are available"
        return self._take(count)

    def take_promised(self, count: int) -> list[int]:
        """Take `count` blocks against an earlier promise."""
        assert count <= self.promised, "took blocks that were not promised"
        self.promised -= count
        return self._take(count)

    def give_back(self, blocks: list[int], promised: int) -> None:
        """Return blocks and drop what is left of a promise."""
        self._free.extend(blocks)
        self.promised -= promised

    def _take(self, count: int) -> list[int]:
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        self.high_water = max(self.high_water, self.used)
        return taken
