"""Absolute deadlines of live requests. A heap with lazy deletion, bounded by the live requests."""

import heapq

from gateway.core.request import Request

_SLACK = 64


class Deadlines:
    """Earliest deadline first. Entries of ended requests are dropped when they surface or pile up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline_at: float, request: Request) -> None:
        """Watch a request."""
        heapq.heappush(self._heap, (deadline_at, request.handle, request))

    def expired(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed, earliest first; they are no longer watched."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if not request.is_ended:
                due.append(request)
        return due

    def compact(self, live: int) -> None:
        """Drop ended requests when they outnumber the `live` ones."""
        if len(self._heap) > 2 * live + _SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].is_ended]
            heapq.heapify(self._heap)
