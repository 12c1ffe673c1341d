"""Snapshots: stored as reported, normalised, and clamped when the gateway knows better.

The gateway routed every request, so it is the authority on quiescence: when a rank's in-flight set
is empty, what the rank last said about its queue is stale (its last report was taken before its last
request ended) and becomes 0. KV usage stays as reported, and so does the snapshot's age.
"""

from collections.abc import Sequence

from gateway.config.schema import Config
from gateway.config.schema import Load as LoadSettings
from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.ranks import RankTable
from gateway.types import EngineLoad

MAX_REORDERED_S = 5.0
"""A report that is older by more than this wasn't overtaken on the way: the rank's clock is not what it was."""


class LoadBook:
    """Owns the snapshot columns of the rank table."""

    def __init__(self, table: RankTable, settings: LoadSettings, gateways: int, counters: Counters) -> None:
        self._table = table
        self._counters = counters
        self._settings, self._gateways = settings, gateways
        self._own_at_receipt = [0] * table.size
        self._last_abort_at: list[float | None] = [None] * table.size
        self._last_step: dict[tuple[int, str], tuple[int, int]] = {}
        self._last_taken_at: dict[int, float] = {}
        self.foreign: set[int] = set()
        """Ranks with load that is nobody's we know, for `expire`."""

    def configure(self, config: Config) -> None:
        """Go by other settings, for as many ranks as the table has now."""
        self._settings, self._gateways = config.load, config.gateways
        size = self._table.size
        resize(self._own_at_receipt, size, int)
        resize(self._last_abort_at, size, lambda: None)
        self.foreign = {rank for rank in self.foreign if rank < size}
        self._last_step = {key: step for key, step in self._last_step.items() if key[0] < size}
        self._last_taken_at = {rank: at for rank, at in self._last_taken_at.items() if rank < size}

    def join(self, rank: int) -> None:
        """A new incarnation starts without a report."""
        self._table.forget_snapshot(rank)
        self._own_at_receipt[rank] = 0
        self._last_abort_at[rank] = None
        self.foreign.discard(rank)
        for source in ("output", "coordinator"):
            self._last_step.pop((rank, source), None)
        self._last_taken_at.pop(rank, None)

    def aborted(self, rank: int, now: float) -> None:
        """We sent an abort; reports without rows soon after still count the aborted request."""
        self._last_abort_at[rank] = now

    def store(self, rank: int, load: EngineLoad, now: float) -> bool:
        """Keep a report; False when a later one is stored already. Refreshing the rank is the caller's.

        That of a batch is stored before the batch's rows are looked at.
        """
        if (load.taken_at_s is not None or load.step_counter is not None) and self._is_regression(rank, load):
            return False
        table = self._table
        running, waiting, usage = load.running, load.waiting, load.kv_usage
        table.reported_running[rank] = running
        table.reported_waiting[rank] = table.waiting[rank] = waiting
        if table.is_resident[rank]:
            running = running - waiting if running > waiting else 0
        table.running[rank] = running
        # NaN counts as nothing.
        table.kv_usage[rank] = usage if 0.0 < usage <= 1.0 else 1.0 if usage > 1.0 else 0.0
        table.snapshot_at[rank] = now
        table.sent_since_snapshot[rank] = 0
        self._own_at_receipt[rank] = table.in_flight[rank]
        self._counters.snapshots[rank] += 1
        return True

    def store_earlier(self, rank: int, loads: Sequence[EngineLoad], now: float, *, is_idle: bool) -> None:
        """Do for the reports of joined messages, none of them a step back, what came of them one by one.

        The last message's is stored afterwards, and hides all that they leave but counts. They came with rows.
        """
        if not is_idle and self.store(rank, loads[0], now):
            self._counters.snapshots[rank] += len(loads) - 1
            return
        for load in loads[0 if is_idle else 1 :]:
            self.store(rank, load, now)
            if is_idle:
                self.settle(rank, now, has_rows=True)

    def report(self, rank: int, load: EngineLoad, now: float) -> None:
        """Keep a report that came by itself."""
        if not self.store(rank, load, now):
            return
        self._table.refresh(rank)
        if not self._table.in_flight[rank]:
            self.settle(rank, now, has_rows=False)

    def settle(self, rank: int, now: float, *, has_rows: bool) -> None:
        """Judge a report that came while nothing of ours was in flight; `has_rows`: it came with rows."""
        table = self._table
        if not (table.reported_running[rank] or table.reported_waiting[rank]):
            self.foreign.discard(rank)
            return
        last_abort = self._last_abort_at[rank]
        is_settling = last_abort is not None and now - last_abort <= self._settings.abort_settle_s
        if has_rows or is_settling:
            self.clamp(rank)
        else:
            self._counters.foreign_reports += 1
            self.foreign.add(rank)

    def clamp(self, rank: int) -> None:
        """The in-flight set is empty: queue counts go to the other gateways' share, 0 for a sole one."""
        table = self._table
        if self.foreign:
            self.foreign.discard(rank)
        if not (table.reported_running[rank] or table.reported_waiting[rank]):
            return
        self._counters.clamped[rank] += 1
        if self._gateways == 1:
            self._own_at_receipt[rank] = 0
            table.reported_running[rank] = table.reported_waiting[rank] = 0
            table.running[rank] = table.waiting[rank] = table.foreign[rank] = 0
            return
        self._remove_own(rank)
        # The others' share is theirs to confirm, as any foreign load.
        if table.reported_running[rank] or table.reported_waiting[rank]:
            self.foreign.add(rank)
        self._own_at_receipt[rank] = 0
        self._normalise(rank)

    def unsent(self, rank: int) -> None:
        """The set emptied because a request never left: the report stands, but not for ever."""
        if self._table.reported_running[rank] or self._table.reported_waiting[rank]:
            self.foreign.add(rank)

    def expire(self, now: float) -> None:
        """Forget foreign load that no fresh report confirmed: an idle engine is silent."""
        if not self.foreign:
            return
        table = self._table
        for rank in tuple(self.foreign):
            at = table.snapshot_at[rank]
            if at is None or now - at > self._settings.foreign_ttl_s:
                self.foreign.discard(rank)
                self._counters.foreign_expired += 1
                table.reported_running[rank] = 0
                table.reported_waiting[rank] = 0
                self._normalise(rank)

    def _is_regression(self, rank: int, load: EngineLoad) -> bool:
        """Whether the rank took a stored report after this one: two sources come over two connections."""
        taken_at = load.taken_at_s
        if taken_at is not None:
            behind_s = self._last_taken_at.get(rank, taken_at) - taken_at
            if 0.0 < behind_s < MAX_REORDERED_S:
                self._counters.step_regressions += 1
                return True
        if load.step_counter is not None:
            key, step = (rank, load.source), (load.wave, load.step_counter)
            last = self._last_step.get(key)
            if last is not None and step < last:
                self._counters.step_regressions += 1
                return True
            self._last_step[key] = step
        if taken_at is not None:
            self._last_taken_at[rank] = taken_at
        return False

    def _remove_own(self, rank: int) -> None:
        """Take our own requests at receipt out of the report: the running ones first."""
        table = self._table
        own = self._own_at_receipt[rank]
        if table.is_resident[rank]:
            # Waiting is part of running: shrink the total, then cut waiting to what is left of it.
            table.reported_running[rank] = max(0, table.reported_running[rank] - own)
            table.reported_waiting[rank] = min(table.reported_waiting[rank], table.reported_running[rank])
            return
        from_running = min(own, table.reported_running[rank])
        table.reported_running[rank] -= from_running
        table.reported_waiting[rank] = max(0, table.reported_waiting[rank] - (own - from_running))

    def _normalise(self, rank: int) -> None:
        table = self._table
        running = table.reported_running[rank]
        waiting = table.reported_waiting[rank]
        table.running[rank] = max(0, running - waiting) if table.is_resident[rank] else running
        table.waiting[rank] = waiting
        table.refresh(rank)
