"""Whose turn it is: start-time fair queueing between the backlogs of the tenants.

Each tenant has a tag, the virtual time at which its next entry would start. The smallest tag is served; the service
moves the tag on by service tokens / weight, so that over time tenants with a backlog get tokens in proportion to their
weights. The virtual time is the largest start that was served in turn. A tenant whose backlog was empty continues at the
virtual time, or at its own tag if that is later: being idle earns nothing.

Plain start-time fair queueing (Goyal, Vin, Cheng 1996) need not care about a tenant that is passed over, because no rank
may take its entries now. Here it keeps the credit of one entry: after its next service it continues at the virtual time,
or its pent-up credit would shut the others out.

Tags are whole numbers: sums that grow for months would lose the small steps of heavy weights otherwise.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from heapq import heappop, heappush

from gateway.core.entry import Entry, Lane
from gateway.core.queue_lane import Backlog
from gateway.core.tenants import Account

Turn = tuple[int, int, Backlog]
"""Tag, serial number, backlog. The serial number lets the tenant that was served longest ago go first among equals."""
_UNITS_PER_TOKEN = float(1 << 32)
_MAX_UNITS_PER_TOKEN = 1e30


def cost_units(account: Account, service_tokens: float) -> int:
    """By how much a service moves the tenant's tag: at least 1, so that no tenant has the turn for ever."""
    return 1 + int(service_tokens * min(_UNITS_PER_TOKEN / account.weight, _MAX_UNITS_PER_TOKEN))


def _next_tag(start: int, cost: int, virtual_time: int) -> int:
    """A tenant's tag after a service that began at `start`."""
    return max(start + cost, virtual_time)


class Turns:
    """The backlogs that are not empty, next one first."""

    __slots__ = ("line", "serial", "virtual_time")

    def __init__(self) -> None:
        self.line: list[Turn] = []
        self.serial = 0
        self.virtual_time = 0

    def admit(self, account: Account) -> None:
        """A tenant that had nothing in time has something now."""
        account.tag = max(self.virtual_time, account.tag)

    def enter(self, backlog: Backlog) -> None:
        """A backlog is not empty any more."""
        self.admit(backlog.account)
        self._put(backlog, backlog.account.tag)

    def leave(self, backlog: Backlog) -> None:
        """A backlog is empty now."""
        turn = backlog.turn
        assert turn is not None
        backlog.turn = None
        del self.line[bisect_left(self.line, turn)]

    def charge(self, account: Account, backlog: Backlog | None, service_tokens: float) -> None:
        """An entry of the tenant is served and about to leave. `backlog` is what the tenant has in time, if anything."""
        start = account.tag
        virtual_time = self.virtual_time = max(self.virtual_time, start)
        account.tag = _next_tag(start, cost_units(account, service_tokens), virtual_time)
        if backlog is not None:
            self.leave(backlog)
            self._put(backlog, account.tag)

    def walk(self, lanes: Container[Lane], cutoff: float, now: float) -> Iterator[Entry]:
        """The entries in one of the lanes as they are served if each that is yielded were charged. Nothing is changed.

        What was queued at `cutoff` or before is overdue: it goes first within its tenant.
        """
        line, serial, virtual_time = self.line, self.serial, self.virtual_time
        # Tenants that this walk has served, by their next turns. The others' are still to come in `line`.
        served: list[tuple[int, int, Account, Iterator[Entry]]] = []
        position = 0
        while served or position < len(line):
            if position < len(line) and (not served or line[position][0] <= served[0][0]):
                tag, _, backlog = line[position]
                position += 1
                account, entries = backlog.account, backlog.walk(lanes, cutoff, now)
            else:
                tag, _, account, entries = heappop(served)
            if position == len(line) and not served:
                yield from entries
                return
            entry = next(entries, None)
            if entry is not None:
                yield entry
                serial += 1
                tag = _next_tag(tag, cost_units(account, entry.service_tokens), virtual_time)
                heappush(served, (tag, serial, account, entries))

    def _put(self, backlog: Backlog, tag: int) -> None:
        self.serial += 1
        backlog.turn = (tag, self.serial)
        insort(self.line, (tag, self.serial, backlog))
