"""The sorted lists that the queue is made of.

An entry is in one `Row`, that of its lane, which knows arrivals; and while it is in time also in one `Backlog`, that of
its tenant, which knows the service order and what is overdue. All lists are sorted by keys that end in the entry's
number, which no other queued entry has: an entry is found by bisection and never compared itself.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from heapq import merge

from gateway.core.entry import Entry, Lane
from gateway.core.queue_order import Order, Ranked
from gateway.core.tenants import Account

Arrival = tuple[float, int, Entry]
"""Enqueued at (s), number, entry."""


class Row:
    """All entries of one lane, by arrival; and those of them whose time-out has passed, by number."""

    __slots__ = ("arrivals", "delayed")

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.delayed: list[tuple[int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """Put an entry in. It need not be the latest: the queue's only entry is listed when it gets company."""
        insort(self.arrivals, (entry.enqueued_at, entry.number, entry))

    def delay(self, entry: Entry) -> None:
        """One of its entries is to go behind all that are in time."""
        insort(self.delayed, (entry.number, entry))

    def discard(self, entry: Entry) -> None:
        """Take out one of its entries."""
        del self.arrivals[bisect_left(self.arrivals, (entry.enqueued_at, entry.number))]
        if entry.is_delayed:
            del self.delayed[bisect_left(self.delayed, (entry.number,))]


class _Line:
    """Entries of one tenant and one lane, by rank in service and by arrival. `keyed_at`: what all keys are for."""

    __slots__ = ("arrivals", "items", "keyed_at")

    def __init__(self, now: float) -> None:
        self.arrivals: list[Arrival] = []
        self.items: list[Ranked] = []
        self.keyed_at = now

    def overdue(self, cutoff: float) -> Iterator[Arrival]:
        """What was queued at `cutoff` or before, oldest first."""
        for arrival in self.arrivals:
            if arrival[0] > cutoff:
                return
            yield arrival


class Backlog:
    """What one account has queued and in time. `turn` (tag, serial number) belongs to `Turns`."""

    __slots__ = ("_lines", "_order", "account", "turn")

    def __init__(self, account: Account, order: Order) -> None:
        self._order = order
        self._lines: dict[Lane, _Line] = {}
        self.account = account
        self.turn: tuple[int, int] | None = None

    def add(self, entry: Entry, now: float) -> None:
        """Put an entry in, and set its key."""
        line = self._lines.get(entry.lane)
        if line is None:
            line = self._lines[entry.lane] = _Line(now)
        entry.key = self._order.key(entry, line.keyed_at)
        insort(line.items, (entry.priority, entry.key, entry.number, entry))
        insort(line.arrivals, (entry.enqueued_at, entry.number, entry))

    def discard(self, entry: Entry) -> bool:
        """Take out one of its entries. True when that was the last one."""
        line = self._lines[entry.lane]
        key = self._order.key(entry, line.keyed_at) if self._order.is_dynamic else entry.key
        del line.items[bisect_left(line.items, (entry.priority, key, entry.number))]
        del line.arrivals[bisect_left(line.arrivals, (entry.enqueued_at, entry.number))]
        if not line.items:
            del self._lines[entry.lane]
        return not self._lines

    def move(self, entry: Entry, lane: Lane) -> None:
        """One of its entries goes to another lane."""
        self.discard(entry)
        entry.lane = lane
        self.add(entry, entry.enqueued_at)

    def checked(self) -> list[Entry]:
        """All of it, line by line, once both lists of each line were found to agree; for tests."""
        for line in self._lines.values():
            assert line.items == sorted(line.items)
            assert line.arrivals == sorted((entry.enqueued_at, number, entry) for _, _, number, entry in line.items)
        return [item[3] for line in self._lines.values() for item in line.items]

    def walk(self, lanes: Container[Lane], cutoff: float, now: float) -> Iterator[Entry]:
        """Its entries in one of the lanes, in service order.

        Those queued at `cutoff` or before are overdue and go first, oldest first; the others by priority and key.
        """
        lines: list[_Line] = []
        overdue: list[Iterator[Arrival]] = []
        for lane, line in self._lines.items():
            if lane in lanes:
                lines.append(line)
                if line.arrivals[0][0] <= cutoff:
                    overdue.append(line.overdue(cutoff))
        if overdue:
            for _, _, entry in overdue[0] if len(overdue) == 1 else merge(*overdue):
                yield entry
        if self._order.is_dynamic:
            self._rekey(lines, now)
        items: Iterable[Ranked] = lines[0].items if len(lines) == 1 else merge(*[line.items for line in lines])
        for _, _, _, entry in items:
            if entry.enqueued_at > cutoff:
                yield entry

    def _rekey(self, lines: list[_Line], now: float) -> None:
        """Bring keys that change with time up to date. Close to O(n): the old order is nearly the new one."""
        for line in lines:
            if line.keyed_at != now:
                line.items = self._order.rekeyed(line.items, now)
                line.items.sort()
                line.keyed_at = now
