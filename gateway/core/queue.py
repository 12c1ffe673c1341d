"""The one ordered queue of sequences that wait for a rank. It knows no ranks' states: the caller asks for lanes.

Service order, over the entries whose pin is in one of the lanes asked for (an entry that is pinned to a shut rank is
in nobody's way):

1. entries in time. Tenants take fair turns (`queue_turns`). In a tenant's turn its overdue entries, queued for
   `max_wait_s` or longer, go first, oldest first; then the others by priority, then key, then number. With `fair` off
   all that as if there were one tenant;
2. delayed entries, whose time-out has passed, by number. `max_wait_s` is not for them: only their deadline ends it.

So while an entry is overdue and in time, no entry of its tenant is served before it but those that have waited at least
as long: no later arrival passes it, and the entries before it only get fewer. Other tenants get their turns between
them, and no more: a tenant's old backlog gives it no claim on the others' shares. The bound is on the service order; a
rank that can take the entry must still open.

Costs: `push`, `remove` and `taken` bisect sorted lists (O(log n), and a memmove); `in_order` is O(1) per entry it yields
and O(log) of the tenants it has served, but for `hrrn`, whose keys change with time: O(n) once per tenant and `now`.
Memory is that of the entries: nothing is deleted lazily.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from heapq import merge
from math import inf

from gateway.config.scheduling import Queue, Tenant
from gateway.core.entry import Entry
from gateway.core.queue_lane import Backlog, Lane, Pin
from gateway.core.queue_order import Order
from gateway.core.queue_turns import Turns
from gateway.core.slo import SloTargets
from gateway.core.tenants import Account


class RequestQueue:
    """All entries that wait. `Entry.number` must be unique among them."""

    def __init__(self, settings: Queue, slo: SloTargets) -> None:
        self._settings = settings
        self._order = Order(settings, slo)
        self._levels = {level.priority: level for level in settings.levels}
        self._default_timeout_s = inf if settings.timeout_s is None else settings.timeout_s
        self._max_wait_s = inf if settings.max_wait_s is None else settings.max_wait_s
        self.size = 0
        """Entries that wait."""
        self.pinned = 0
        """Entries of them with a pin."""
        # The only entry, if it came when none was there: alone it needs no order, and it is in no list until it has
        # company. Where ranks keep up with what arrives, no other is ever made.
        self._only: Entry | None = None
        self._depths: dict[int, int] = {}
        self._lanes: dict[Pin, Lane] = {}
        self._backlogs: dict[Account, Backlog] = {}
        self._turns = Turns()
        # Without fairness all entries are in one account's backlog, and nobody is charged.
        self._common = None if settings.fair else Account("", Tenant())
        self._expiries: list[tuple[float, int, Entry]] = []
        self.timeouts_delayed = 0
        """Entries that went behind all others because their time-out passed."""

    def __len__(self) -> int:
        return self.size

    def depth_of(self, priority: int) -> int:
        """Entries of one priority."""
        if self._only is not None:
            return int(self._only.priority == priority)
        return self._depths.get(priority, 0)

    # ---- in and out --------------------------------------------------------------------------

    def push(self, entry: Entry, now: float) -> None:
        """Queue an entry; its time-out starts now. One that is queued already stays where it is."""
        if entry.is_queued:
            return
        entry.is_queued = True
        entry.is_delayed = False
        timeout_s = self._timeout_s(entry)
        entry.expires_at = now + timeout_s if timeout_s < inf else None
        self.size += 1
        if entry.pinned_rank is not None:
            self.pinned += 1
        if self.size == 1:
            self._only = entry
            return
        self._list_only()
        self._list(entry, now)

    def remove(self, entry: Entry) -> None:
        """Take an entry out, whatever its state; nothing is charged. One that is not queued is left alone."""
        if not entry.is_queued:
            return
        entry.is_queued = False
        self.size -= 1
        if entry.pinned_rank is not None:
            self.pinned -= 1
        if entry is self._only:
            self._only = None
            return
        depth = self._depths[entry.priority] - 1
        if depth:
            self._depths[entry.priority] = depth
        else:
            del self._depths[entry.priority]
        lane = self._lanes[entry.pinned_rank]
        lane.discard(entry)
        if not lane.arrivals:
            del self._lanes[entry.pinned_rank]
        if not entry.is_delayed:
            self._leave_backlog(entry)
            if entry.expires_at is not None:
                del self._expiries[bisect_left(self._expiries, (entry.expires_at, entry.number))]

    def taken(self, entry: Entry) -> None:
        """An entry goes to a rank: its tenant is charged, and it leaves."""
        if not entry.is_queued:
            return
        if self._common is None:
            if entry is self._only:
                self._turns.admit(entry.account)
            self._turns.charge(entry.account, self._backlogs.get(entry.account), entry.service_tokens)
        self.remove(entry)

    def expired(self, now: float) -> list[Entry]:
        """Entries whose time-out has passed and that are to be refused, earliest first; they are out of the queue.

        Those that are to be delayed go behind all that are in time, and stay queued.
        """
        if self._only is not None and self._only.expires_at is not None and self._only.expires_at <= now:
            self._list_only()
        due = []
        while self._expiries and self._expiries[0][0] <= now:
            entry = self._expiries[0][2]
            if self._delays(entry):
                self._delay(entry)
            else:
                self.remove(entry)
                due.append(entry)
        return due

    def _list(self, entry: Entry, now: float) -> None:
        """Put an entry into all lists."""
        self._depths[entry.priority] = self._depths.get(entry.priority, 0) + 1
        lane = self._lanes.get(entry.pinned_rank)
        if lane is None:
            lane = self._lanes[entry.pinned_rank] = Lane()
        lane.add(entry)
        self._enter_backlog(entry, now)
        if entry.expires_at is not None:
            insort(self._expiries, (entry.expires_at, entry.number, entry))

    def _list_only(self) -> None:
        """The only entry has company, or its time-out has passed."""
        entry = self._only
        if entry is not None:
            self._only = None
            self._list(entry, entry.enqueued_at)

    def _timeout_s(self, entry: Entry) -> float:
        timeout_s = self._default_timeout_s
        if self._levels:
            level = self._levels.get(entry.priority)
            if level is not None and level.timeout_s is not None:
                timeout_s = level.timeout_s
        asked_s = entry.sequence.request.arrived.queue_timeout_s
        if asked_s is not None and asked_s < timeout_s and self._settings.allow_timeout_override:
            return asked_s
        return timeout_s

    def _delays(self, entry: Entry) -> bool:
        level = self._levels.get(entry.priority)
        action = level.timeout_action if level is not None else None
        return (action or self._settings.timeout_action) == "delay"

    def _delay(self, entry: Entry) -> None:
        self._leave_backlog(entry)
        del self._expiries[0]
        entry.is_delayed = True
        self._lanes[entry.pinned_rank].delay(entry)
        self.timeouts_delayed += 1

    def _enter_backlog(self, entry: Entry, now: float) -> None:
        owner = self._common or entry.account
        backlog = self._backlogs.get(owner)
        if backlog is None:
            backlog = self._backlogs[owner] = Backlog(owner, self._order)
            self._turns.enter(backlog)
        backlog.add(entry, now)

    def _leave_backlog(self, entry: Entry) -> None:
        owner = self._common or entry.account
        backlog = self._backlogs[owner]
        if backlog.discard(entry):
            self._turns.leave(backlog)
            del self._backlogs[owner]

    # ---- service order -----------------------------------------------------------------------

    def in_order(self, now: float, lanes: Container[Pin]) -> Iterator[Entry]:
        """The entries pinned to one of `lanes` (None: unpinned), as they would be served if each were taken in turn.

        Lazy. The queue must not change while the iterator is in use.
        """
        if self._only is not None:
            return iter((self._only,) if self._only.pinned_rank in lanes else ())
        asked = [lane for pin, lane in self._lanes.items() if pin in lanes]
        return self._walk(now, asked, lanes) if asked else iter(())

    def _walk(self, now: float, asked: list[Lane], pins: Container[Pin]) -> Iterator[Entry]:
        yield from self._turns.walk(pins, now - self._max_wait_s, now)
        for _, entry in merge(*[lane.delayed for lane in asked]):
            yield entry

    # ---- looking -----------------------------------------------------------------------------

    def pinned_to(self, rank: int) -> list[Entry]:
        """The entries that are pinned to a rank, in arrival order."""
        if self._only is not None:
            return [self._only] if self._only.pinned_rank == rank else []
        lane = self._lanes.get(rank)
        return [] if lane is None else [entry for _, _, entry in lane.arrivals]

    def entries(self) -> list[Entry]:
        """All entries in arrival order."""
        if self._only is not None:
            return [self._only]
        return [entry for _, _, entry in merge(*[lane.arrivals for lane in self._lanes.values()])]

    def oldest(self) -> Entry | None:
        """The entry that has waited longest."""
        if self._only is not None or not self.size:
            return self._only
        return min(lane.arrivals[0] for lane in self._lanes.values())[2]

    def check(self) -> None:
        """Assert that all lists hold the same entries, in order; for tests."""
        entries = self.entries()
        assert len(entries) == self.size
        assert sum(entry.pinned_rank is not None for entry in entries) == self.pinned
        assert all(entry.is_queued for entry in entries)
        listed = [] if self._only is not None else entries
        assert len(listed) == sum(self._depths.values())
        assert all(self._depths.values())
        assert all(lane.arrivals for lane in self._lanes.values())
        in_time = [entry for entry in listed if not entry.is_delayed]
        waiting = [entry for backlog in self._backlogs.values() for entry in backlog.checked()]
        delayed = [item[1] for lane in self._lanes.values() for item in lane.delayed]
        assert sorted(map(id, waiting)) == sorted(map(id, in_time))
        assert sorted(map(id, waiting + delayed)) == sorted(map(id, listed))
        assert len(self._expiries) == sum(entry.expires_at is not None for entry in in_time)
        assert {turn[2].account for turn in self._turns.line} == set(self._backlogs)
        for lane in self._lanes.values():
            assert lane.arrivals == sorted(lane.arrivals)
            assert lane.delayed == sorted(lane.delayed)
        assert self._turns.line == sorted(self._turns.line)
        assert self._expiries == sorted(self._expiries)
