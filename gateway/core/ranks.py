"""Rank state as parallel columns, and the lifecycle table.

One row per configured rank, addressed by its global number; the set of ranks is fixed by the
configuration. Columns are plain lists so that a compiled cost formula runs over them in one
comprehension. Only `Router` and the parts it owns (ledger, load) write here.
"""

from enum import StrEnum
from math import inf

from gateway.config.schema import Config
from gateway.core.rank_row import RankRow
from gateway.types import FAMILIES, RankInfo

DEFAULT_MAX_IN_FLIGHT = 1024
SLOTS_FACTOR = 4


class RankState(StrEnum):
    """Lifecycle of a rank as the gateway sees it."""

    ABSENT = "ABSENT"
    READY = "READY"
    LOST = "LOST"


TRANSITIONS: dict[RankState, dict[str, RankState]] = {
    RankState.ABSENT: {"joined": RankState.READY},
    RankState.READY: {"joined": RankState.READY, "lost": RankState.LOST},
    RankState.LOST: {"joined": RankState.READY},
}
"""All lifecycle transitions: state -> event -> next state. Anything else is a no-op for that rank."""


class RankTable:
    """The columns. Counts are of this gateway's own work unless the name says `reported`."""

    def __init__(self, config: Config) -> None:
        size = sum(group.ranks for group in config.groups)
        self.size = size
        self.group_names = [group.name for group in config.groups]
        self.group_of: list[int] = []
        self.group_rank: list[int] = []
        self.engine_index: list[int] = []
        self.is_resident: list[bool] = []
        self.counts_tokens: list[bool] = []
        for number, group in enumerate(config.groups):
            family = FAMILIES[group.protocol]
            semantics = group.load_semantics or family.load_semantics
            for index in range(group.ranks):
                self.group_of.append(number)
                self.group_rank.append(index)
                self.engine_index.append(group.start_index + index)
                self.is_resident.append(semantics == "resident")
                self.counts_tokens.append(family.counts_completion_tokens)
        self._max_in_flight_setting = config.admission.max_in_flight_per_rank
        self._max_kv_usage = config.filters.max_kv_usage

        self.state: list[RankState] = [RankState.ABSENT] * size
        self.incarnation = [0] * size
        self.info: list[RankInfo | None] = [None] * size
        self.max_in_flight = [self._max_in_flight_setting or DEFAULT_MAX_IN_FLIGHT] * size
        self.max_model_len = [0] * size
        self.is_blocked = [False] * size

        # Own work. `queued_tokens` are prompt tokens of attempts without a first token.
        self.in_flight = [0] * size
        self.in_flight_prefill = [0] * size
        self.in_flight_decode = [0] * size
        self.queued_tokens = [0] * size
        self.ctx_tokens = [0] * size
        self.own_tokens = [0] * size
        self.sent_since_snapshot = [0] * size
        self.head_since: list[float | None] = [None] * size

        # The last snapshot, raw and normalised.
        self.reported_running = [0] * size
        self.reported_waiting = [0] * size
        self.running = [0] * size
        self.waiting = [0] * size
        self.foreign = [0] * size
        self.kv_usage = [0.0] * size
        self.snapshot_at: list[float | None] = [None] * size
        self.kv_capacity_tokens: list[float] = [inf] * size

        # Derived, kept current by `refresh`: what the filters look at.
        self.free_kv_tokens: list[float] = [inf] * size
        self.is_open = [False] * size
        self.is_over_kv = [False] * size
        self.open_count = 0
        self.over_kv_count = 0
        self.has_kv_limit = False
        self.min_model_len = 0
        self.kv_floor_tokens = inf
        """A lower bound of `free_kv_tokens`; `raise_kv_floor` makes it exact."""

    def refresh(self, rank: int) -> None:
        """Recompute the derived columns of one rank; called after every change to it."""
        in_flight = self.in_flight[rank]
        self.foreign[rank] = max(0, self.running[rank] + self.waiting[rank] - in_flight)
        capacity = self.kv_capacity_tokens[rank]
        usage = self.kv_usage[rank]
        if capacity is not inf:
            used = max(usage * capacity, self.own_tokens[rank]) if in_flight else 0
            free = self.free_kv_tokens[rank] = capacity - used
            self.kv_floor_tokens = min(self.kv_floor_tokens, free)
        is_open = (
            self.state[rank] is RankState.READY and not self.is_blocked[rank] and in_flight < self.max_in_flight[rank]
        )
        if is_open is not self.is_open[rank]:
            self.is_open[rank] = is_open
            self.open_count += 1 if is_open else -1
        limit = self._max_kv_usage
        is_over = limit is not None and in_flight > 0 and usage > limit
        if is_over is not self.is_over_kv[rank]:
            self.is_over_kv[rank] = is_over
            self.over_kv_count += 1 if is_over else -1

    def join(self, rank: int, incarnation: int, info: RankInfo) -> None:
        """Start an incarnation: own work and snapshot begin from nothing."""
        self.incarnation[rank] = incarnation
        self.info[rank] = info
        self.max_model_len[rank] = info.max_model_len
        capacity = info.kv_capacity_tokens
        if capacity is None and info.num_gpu_blocks and info.block_size:
            capacity = info.num_gpu_blocks * info.block_size
        self.kv_capacity_tokens[rank] = float(capacity) if capacity else inf
        self.free_kv_tokens[rank] = self.kv_capacity_tokens[rank]
        self.raise_kv_floor()
        self.min_model_len = min(self.max_model_len)
        self.has_kv_limit = any(value is not inf for value in self.kv_capacity_tokens)
        if self._max_in_flight_setting is None:
            slots = info.max_num_seqs
            self.max_in_flight[rank] = SLOTS_FACTOR * slots if slots else DEFAULT_MAX_IN_FLIGHT
        self.is_blocked[rank] = False
        for column in (
            self.in_flight,
            self.in_flight_prefill,
            self.in_flight_decode,
            self.queued_tokens,
            self.ctx_tokens,
            self.own_tokens,
        ):
            column[rank] = 0
        self.head_since[rank] = None
        self.forget_snapshot(rank)

    def restore(self, row: RankRow, now: float, max_model_len: int) -> None:
        """Set one rank's columns as a rank that joined, was sent work and reported would have left them.

        For decisions about a state that was written down; `max_model_len` stands in where the row has none. The
        ledger knows nothing of this work.
        """
        rank = row.rank
        info = RankInfo(max_model_len=row.max_model_len or max_model_len, kv_capacity_tokens=row.kv_capacity_tokens)
        self.join(rank, row.incarnation or 1, info)
        self.state[rank] = RankState(row.state)
        if row.max_in_flight is not None:
            self.max_in_flight[rank] = row.max_in_flight
        self._restore_own_work(row, now)
        if row.has_report:
            self._restore_report(row, now)
        self.refresh(rank)

    def _restore_own_work(self, row: RankRow, now: float) -> None:
        rank, in_flight = row.rank, row.in_flight or 0
        prefill, decode = row.in_flight_prefill, row.in_flight_decode
        if prefill is None:
            prefill = 0 if decode is None else max(0, in_flight - decode)
        self.in_flight[rank] = in_flight
        self.in_flight_prefill[rank] = prefill
        self.in_flight_decode[rank] = max(0, in_flight - prefill) if decode is None else decode
        self.queued_tokens[rank] = row.queued_tokens or 0
        self.ctx_tokens[rank] = row.ctx_tokens or 0
        implied = self.queued_tokens[rank] + self.ctx_tokens[rank]
        self.own_tokens[rank] = implied if row.own_tokens is None else row.own_tokens
        self.sent_since_snapshot[rank] = row.sent_since_snapshot or 0
        if row.head_age_ms is not None:
            self.head_since[rank] = now - row.head_age_ms / 1e3

    def _restore_report(self, row: RankRow, now: float) -> None:
        """Of raw and normalised counts, those that are missing follow from the others."""
        rank, is_resident = row.rank, self.is_resident[row.rank]
        waiting = row.waiting if row.waiting is not None else row.reported_waiting or 0
        running = row.running
        if running is None:
            running = row.reported_running or 0
            running = max(0, running - waiting) if is_resident else running
        raw = running + waiting if is_resident else running
        self.running[rank], self.waiting[rank] = running, waiting
        self.reported_running[rank] = raw if row.reported_running is None else row.reported_running
        self.reported_waiting[rank] = waiting if row.reported_waiting is None else row.reported_waiting
        self.kv_usage[rank] = row.kv_usage or 0.0
        self.snapshot_at[rank] = now - (row.snapshot_age_ms or 0.0) / 1e3

    def raise_kv_floor(self) -> float:
        """Make the floor exact again and return it."""
        self.kv_floor_tokens = min(self.free_kv_tokens)
        return self.kv_floor_tokens

    def forget_snapshot(self, rank: int) -> None:
        """Back to "never reported"."""
        for column in (
            self.reported_running,
            self.reported_waiting,
            self.running,
            self.waiting,
            self.foreign,
            self.sent_since_snapshot,
        ):
            column[rank] = 0
        self.kv_usage[rank] = 0.0
        self.snapshot_at[rank] = None
