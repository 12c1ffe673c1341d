"""Rank state as parallel columns, and the lifecycle table.

One row per configured rank, addressed by its global number; the set of ranks is fixed by the
configuration. Columns are plain lists so that a compiled cost formula runs over them in one
comprehension. Only `Router` and the parts it owns (ledger, load) write here.
"""

from enum import StrEnum
from math import inf

from gateway.config.schema import Config
from gateway.types import RankInfo

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
            semantics = group.load_semantics or ("resident" if group.protocol == "tokenspeed" else "disjoint")
            for index in range(group.ranks):
                self.group_of.append(number)
                self.group_rank.append(index)
                self.engine_index.append(group.start_index + index)
                self.is_resident.append(semantics == "resident")
                self.counts_tokens.append(group.protocol == "tokenspeed")
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

    def has_report(self, rank: int) -> bool:
        """Whether the current incarnation ever reported load."""
        return self.snapshot_at[rank] is not None
