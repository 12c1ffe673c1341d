"""The one ordered queue of sequences that wait for a rank. It knows no ranks' states: the caller asks for lanes.

Service order, over the entries in one of the lanes asked for (an entry that is pinned to a shut rank, or that only shut
ranks could ever take, is in nobody's way):

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
from collections.abc import Callable, Container, Iterator
from heapq import merge
from math import inf

from gateway.config.scheduling import Queue, Tenant
from gateway.core.entry import Entry, Lane
from gateway.core.queue_lane import Backlog, Row
from gateway.core.queue_order import Order
from gateway.core.queue_timeouts import TimeOuts
from gateway.core.queue_turns import Turns
from gateway.core.slo import SloTargets
from gateway.core.tenants import Account


class RequestQueue:
    """All entries that wait. `Entry.number` must be unique among them."""

    def __init__(self, settings: Queue, slo: SloTargets) -> None:
        self._common: Account | None = None
        self._use(settings, slo)
        self.size = 0
        """Entries that wait."""
        self.pinned = 0
        """Entries of them with a pin."""
        # The only entry, if it came when none was there: alone it needs no order, and it is in no list until it has
        # company. Where ranks keep up with what arrives, no other is ever made.
        self._only: Entry | None = None
        self._depths: dict[int, int] = {}
        self._rows: dict[Lane, Row] = {}
        self._backlogs: dict[Account, Backlog] = {}
        self._turns = Turns()
        self._expiries: list[tuple[float, int, Entry]] = []
        self.timeouts_delayed = 0
        """Entries that went behind all others because their time-out passed."""

    def configure(self, settings: Queue, slo: SloTargets) -> None:
        """Go by other settings: what waits is put into the new order, with the time-out that it came with."""
        listed = [] if self._only is not None else self.entries()
        for entry in listed:
            self._unlist(entry)
        self._use(settings, slo)
        for entry in listed:
            self._list(entry, entry.enqueued_at)

    def relane(self, lane_of: Callable[[Entry], Lane]) -> None:
        """Put every entry into the lane that it belongs to now. The service order stays."""
        for entry in self.entries():
            lane = lane_of(entry)
            if lane == entry.lane:
                continue
            if entry is self._only:
                entry.lane = lane
                continue
            self._leave_row(entry)
            if entry.is_delayed:
                entry.lane = lane
            else:
                self._backlogs[self._common or entry.account].move(entry, lane)
            self._enter_row(entry)

    def _use(self, settings: Queue, slo: SloTargets) -> None:
        self._order = Order(settings, slo)
        self.time_outs = TimeOuts(settings)
        self._max_wait_s = inf if settings.max_wait_s is None else settings.max_wait_s
        # Without fairness all entries are in one account's backlog, and nobody is charged.
        self._common = None if settings.fair else self._common or Account("", Tenant())

    def __len__(self) -> int:
        return self.size

    def depth_of(self, priority: int) -> int:
        """Entries of one priority."""
        if self._only is not None:
            return int(self._only.priority == priority)
        return self._depths.get(priority, 0)

    # ---- in and out --------------------------------------------------------------------------

    def push(self, entry: Entry, now: float, *, since: float | None = None) -> None:
        """Queue an entry; its time-out counts from `since` (None: now). One that is queued already stays where it is."""
        if entry.is_queued:
            return
        entry.is_queued = True
        entry.is_delayed = False
        begin = entry.queued_at = now if since is None else since
        arrived = entry.sequence.request.arrived
        asked_s = self.time_outs.asked_s(arrived)
        timeout_s = min(asked_s, self.time_outs.timeout_s(entry.priority))
        entry.gives_up_at = begin + asked_s if asked_s < inf else None
        entry.expires_at = begin + timeout_s if timeout_s < inf else None
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
        else:
            self._unlist(entry)

    def _unlist(self, entry: Entry) -> None:
        """Take an entry out of all lists."""
        depth = self._depths[entry.priority] - 1
        if depth:
            self._depths[entry.priority] = depth
        else:
            del self._depths[entry.priority]
        self._leave_row(entry)
        if entry.expires_at is not None:
            del self._expiries[bisect_left(self._expiries, (entry.expires_at, entry.number))]
        if not entry.is_delayed:
            self._leave_backlog(entry)

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

        Those that are to be delayed go behind all that are in time, and stay queued; until the call's own time-out.
        """
        if self._only is not None and self._only.expires_at is not None and self._only.expires_at <= now:
            self._list_only()
        due = []
        while self._expiries and self._expiries[0][0] <= now:
            entry = self._expiries[0][2]
            if self._delays(entry, now):
                self._delay(entry)
            else:
                self.remove(entry)
                due.append(entry)
        return due

    def _list(self, entry: Entry, now: float) -> None:
        """Put an entry into all lists."""
        self._depths[entry.priority] = self._depths.get(entry.priority, 0) + 1
        self._enter_row(entry)
        if entry.expires_at is not None:
            insort(self._expiries, (entry.expires_at, entry.number, entry))
        if not entry.is_delayed:
            self._enter_backlog(entry, now)

    def _enter_row(self, entry: Entry) -> None:
        row = self._rows.get(entry.lane)
        if row is None:
            row = self._rows[entry.lane] = Row()
        row.add(entry)
        if entry.is_delayed:
            row.delay(entry)

    def _leave_row(self, entry: Entry) -> None:
        row = self._rows[entry.lane]
        row.discard(entry)
        if not row.arrivals:
            del self._rows[entry.lane]

    def _list_only(self) -> None:
        """The only entry has company, or its time-out has passed."""
        entry = self._only
        if entry is not None:
            self._only = None
            self._list(entry, entry.enqueued_at)

    def _delays(self, entry: Entry, now: float) -> bool:
        """Whether it goes behind all others: the call's own time-out is how long its caller waits, and ends it."""
        has_given_up = entry.gives_up_at is not None and entry.gives_up_at <= now
        return not has_given_up and self.time_outs.is_delay(entry.priority)

    def _delay(self, entry: Entry) -> None:
        self._leave_backlog(entry)
        del self._expiries[0]
        entry.is_delayed = True
        self._rows[entry.lane].delay(entry)
        entry.expires_at = entry.gives_up_at
        if entry.expires_at is not None:
            insort(self._expiries, (entry.expires_at, entry.number, entry))
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

    def in_order(self, now: float, lanes: Container[Lane]) -> Iterator[Entry]:
        """The entries in one of `lanes`, as they would be served if each were taken in turn.

        Lazy. The queue must not change while the iterator is in use.
        """
        if self._only is not None:
            return iter((self._only,) if self._only.lane in lanes else ())
        asked = [row for lane, row in self._rows.items() if lane in lanes]
        return self._walk(now, asked, lanes) if asked else iter(())

    def _walk(self, now: float, asked: list[Row], lanes: Container[Lane]) -> Iterator[Entry]:
        yield from self._turns.walk(lanes, now - self._max_wait_s, now)
        for _, entry in merge(*[row.delayed for row in asked]):
            yield entry

    # ---- looking -----------------------------------------------------------------------------

    def pinned_to(self, rank: int) -> list[Entry]:
        """The entries that are pinned to a rank, in arrival order."""
        if self._only is not None:
            return [self._only] if self._only.pinned_rank == rank else []
        row = self._rows.get(rank)
        return [] if row is None else [entry for _, _, entry in row.arrivals]

    def by_lane(self) -> list[tuple[Lane, Iterator[Entry]]]:
        """Each lane in which something waits, and what it is, in arrival order."""
        if self._only is not None:
            return [(self._only.lane, iter((self._only,)))]
        return [(lane, (entry for _, _, entry in row.arrivals)) for lane, row in self._rows.items()]

    def entries(self) -> list[Entry]:
        """All entries in arrival order."""
        if self._only is not None:
            return [self._only]
        return [entry for _, _, entry in merge(*[row.arrivals for row in self._rows.values()])]

    def oldest(self) -> Entry | None:
        """The entry that has waited longest."""
        if self._only is not None or not self.size:
            return self._only
        return min(row.arrivals[0] for row in self._rows.values())[2]

    def check(self) -> None:
        """Assert that all lists hold the same entries, in order; for tests."""
        entries = self.entries()
        assert len(entries) == self.size
        assert sum(entry.pinned_rank is not None for entry in entries) == self.pinned
        assert all(entry.is_queued for entry in entries)
        listed = [] if self._only is not None else entries
        assert len(listed) == sum(self._depths.values())
        assert all(self._depths.values())
        assert all(row.arrivals for row in self._rows.values())
        in_time = [entry for entry in listed if not entry.is_delayed]
        waiting = [entry for backlog in self._backlogs.values() for entry in backlog.checked()]
        delayed = [item[1] for row in self._rows.values() for item in row.delayed]
        assert sorted(map(id, waiting)) == sorted(map(id, in_time))
        assert sorted(map(id, waiting + delayed)) == sorted(map(id, listed))
        assert len(self._expiries) == sum(entry.expires_at is not None for entry in listed)
        assert {turn[2].account for turn in self._turns.line} == set(self._backlogs)
        for row in self._rows.values():
            assert row.arrivals == sorted(row.arrivals)
            assert row.delayed == sorted(row.delayed)
        assert self._turns.line == sorted(self._turns.line)
        assert self._expiries == sorted(self._expiries)
