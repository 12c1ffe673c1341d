"""Absolute deadlines of live requests. A heap of handles with lazy deletion, bounded by the live requests.

Handles instead of requests: an ended request must not stay in memory for its deadline.
"""

import heapq
from collections.abc import Collection

_SLACK = 64


class Deadlines:
    """Earliest deadline first. Entries of ended requests are dropped when they surface or pile up."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.heap)

    def add(self, deadline_at: float, handle: int) -> None:
        """Watch a request."""
        heapq.heappush(self.heap, (deadline_at, handle))

    def expired(self, now: float, live: Collection[int]) -> list[int]:
        """Handles of `live` requests whose deadline has passed, earliest first; they are no longer watched."""
        heap, due = self.heap, []
        while heap and heap[0][0] <= now:
            handle = heapq.heappop(heap)[1]
            if handle in live:
                due.append(handle)
        return due

    def compact(self, live: Collection[int]) -> None:
        """Drop ended requests when they outnumber the `live` ones."""
        if len(self.heap) > 2 * len(live) + _SLACK:
            self.heap = [entry for entry in self.heap if entry[1] in live]
            heapq.heapify(self.heap)
