"""Numbers of batch slots: a batch grows slot by slot, and slots that are done are refilled before it grows.

A batch ends when nothing is live any more; the next request starts a new one in slot 0.
"""

from heapq import heappop, heappush


class Slots:
    """The slots of the current batch: `grown` of them exist, the done ones wait to be recycled."""

    def __init__(self) -> None:
        self.grown = 0
        self._done: list[int] = []

    @property
    def has_done(self) -> bool:
        """Whether a slot of the batch is done and empty."""
        return bool(self._done)

    def take(self) -> int:
        """The lowest done slot, or a new one."""
        if self._done:
            return heappop(self._done)
        self.grown += 1
        return self.grown - 1

    def give_back(self, slot: int) -> None:
        """A slot is done."""
        heappush(self._done, slot)

    def end_batch(self) -> None:
        """Nothing is live: the next batch starts small."""
        self.grown = 0
        self._done.clear()
