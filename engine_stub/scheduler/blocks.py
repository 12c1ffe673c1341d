"""The paged KV pool: blocks are taken, shared and given back; a promise keeps a block free for its owner.

A block is in one of three states: referenced by sequences (`used`), idle (unreferenced, but the prefix
cache still knows its content, so that it may be shared again) or free. Blocks are taken from the free
ones first, then from the idle ones, the longest idle first.

Invariant: `used + idle + free == total` and `promised <= idle + free`, so usage can't exceed the capacity.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence


class BlockPool:
    """A fixed number of KV blocks with reference counts. `on_evict` is told of each idle block that is taken."""

    def __init__(self, total: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.total = total
        self.promised = 0
        self.high_water = 0
        self._on_evict = on_evict
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * total

    @property
    def used(self) -> int:
        """Blocks that live sequences refer to."""
        return self.total - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that only the prefix cache remembers."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken and are promised to nobody."""
        return len(self._free) + len(self._idle) - self.promised

    def references(self, block: int) -> int:
        """How many sequences refer to a block."""
        return self._references[block]

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks sharing would take out of the available ones."""
        return sum(1 for block in blocks if not self._references[block])

    def promise(self, count: int) -> None:
        """Keep `count` available blocks for later `take_promised` calls of the caller."""
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

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each block, used or idle."""
        for block in blocks:
            if not self._references[block]:
                del self._idle[block]
            self._references[block] += 1
        self.high_water = max(self.high_water, self.used)

    def give_back(self, blocks: Sequence[int], promised: int, remembered: Container[int] = ()) -> int:
        """Drop one reference to each block and what is left of a promise; how many blocks stay referenced.

        `remembered` blocks become idle, the last one first: a prefix is of use without its end, not
        the other way round.
        """
        references, shared = self._references, 0
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                shared += 1
            elif block in remembered:
                self._idle[block] = None
            else:
                self._free.append(block)
        self.promised -= promised
        return shared

    def forget_idle(self) -> None:
        """Make every idle block free: the cache has forgotten their content."""
        self._free.extend(self._idle)
        self._idle.clear()

    def _take(self, count: int) -> list[int]:
        free = self._free
        cut = max(len(free) - count, 0)
        taken = free[cut:]
        del free[cut:]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(block)
            taken.append(block)
        for block in taken:
            self._references[block] = 1
        self.high_water = max(self.high_water, self.used)
        return taken
