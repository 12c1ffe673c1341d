"""Messages that a rank's socket did not take yet.

Pure. Rules: ADDs leave in the order they came; the abort of an ADD that is still here removes it, so
the rank never sees either; aborts of attempts that were sent leave first (their ADDs are ahead of them
already, and they free the rank that is the bottleneck). Bounded in messages and bytes; aborts are not
refused, there are never more than attempts in flight.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_MESSAGES = 1024
MAX_BYTES = 64 * 1024 * 1024
MAX_ABORT_IDS = 1024


class SendQueue:
    """The FIFO of one rank incarnation. Empty is falsy."""

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._adds: OrderedDict[str, list[bytes]] = OrderedDict()
        self._aborts: dict[str, None] = {}
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._adds or self._aborts)

    def __len__(self) -> int:
        return len(self._adds) + len(self._aborts)

    def offer(self, wire_id: str, frames: list[bytes]) -> bool:
        """Queue an ADD; False when it would exceed a bound (one message always fits an empty queue)."""
        size = sum(map(len, frames))
        if self._adds and (len(self._adds) >= self._max_messages or self._bytes + size > self._max_bytes):
            return False
        self._adds[wire_id] = frames
        self._bytes += size
        return True

    def abort(self, wire_ids: Sequence[str]) -> None:
        """Remove the ADDs that are still here; queue the abort of the others."""
        for wire_id in wire_ids:
            frames = self._adds.pop(wire_id, None)
            if frames is None:
                self._aborts[wire_id] = None
            else:
                self._bytes -= sum(map(len, frames))

    def next_aborts(self) -> list[str]:
        """The ids of the abort to send next, at most `MAX_ABORT_IDS`; they stay queued."""
        return [wire_id for wire_id, _ in zip(self._aborts, range(MAX_ABORT_IDS), strict=False)]

    def aborts_sent(self, wire_ids: Sequence[str]) -> None:
        """Forget aborts that left."""
        for wire_id in wire_ids:
            del self._aborts[wire_id]

    def next_add(self) -> tuple[str, list[bytes]] | None:
        """The ADD to send next; it stays queued."""
        for wire_id, frames in self._adds.items():
            return wire_id, frames
        return None

    def add_sent(self, wire_id: str) -> None:
        """Forget an ADD that left or failed."""
        self._bytes -= sum(map(len, self._adds.pop(wire_id)))
