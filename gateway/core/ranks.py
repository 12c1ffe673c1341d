"""Rank state as parallel columns, and the lifecycle table.

One row per configured rank, addressed by its global number; a reload may add and remove rows at
the end (`gateway.core.reconfigure`). Columns are plain lists so that a compiled cost formula runs over them in one
comprehension. Only `Router` and the parts it owns (ledger, load) write here.
"""

# ruff: noqa: FURB136, PLR1730 - a comparison costs a tenth of a call of `max`, and `refresh` runs several times per request

from enum import StrEnum
from math import inf

from gateway.config.schema import Config, GroupBudget
from gateway.core.rank_row import RankRow, restore_own_work, restore_report
from gateway.types import FAMILIES, RankInfo

DEFAULT_MAX_IN_FLIGHT = 1024
SLOTS_FACTOR = 4
DEFAULT_MEAN_OUT_TOKENS = 128
MAX_STEP_US = 10_000_000
_STEP_SMOOTHING = 0.1
_OUT_TOKENS_SMOOTHING = 0.05


class RankState(StrEnum):
    """Lifecycle of a rank as the gateway sees it."""

    ABSENT = "ABSENT"
    JOINING = "JOINING"
    READY = "READY"
    SUSPECT = "SUSPECT"
    DRAINING = "DRAINING"
    EJECTED = "EJECTED"
    LOST = "LOST"

    # Enum's own hash is a Python function.
    __hash__ = str.__hash__


_READY = RankState.READY
TRANSITIONS: dict[RankState, dict[str, RankState]] = {
    # "held": an operator drains it, and it is the process that it was.
    RankState.ABSENT: {"joined": RankState.READY, "held": RankState.DRAINING},
    RankState.JOINING: {
        "settled": RankState.READY,
        "joined": RankState.READY,
        "held": RankState.DRAINING,
        "lost": RankState.LOST,
        "removed": RankState.ABSENT,
    },
    RankState.READY: {
        "silent": RankState.SUSPECT,
        "drained": RankState.DRAINING,
        "ejected": RankState.EJECTED,
        "lost": RankState.LOST,
    },
    RankState.SUSPECT: {"heard": RankState.READY, "drained": RankState.DRAINING, "lost": RankState.LOST},
    # A rank that is restarted while it drains comes back READY: the restart was what it was drained for. A connection that
    # was lost and is back is no restart.
    RankState.DRAINING: {"undrained": RankState.READY, "lost": RankState.LOST, "removed": RankState.ABSENT},
    RankState.EJECTED: {
        "returned": RankState.READY,
        "undrained": RankState.READY,
        "drained": RankState.DRAINING,
        "lost": RankState.LOST,
    },
    # "heard": it was lost for its silence, and its sockets were kept.
    RankState.LOST: {
        "joined": RankState.READY,
        "held": RankState.DRAINING,
        "heard": RankState.JOINING,
        "removed": RankState.ABSENT,
    },
}
"""All lifecycle transitions: state -> event -> next state. Anything else is a no-op for that rank."""
SERVING = frozenset({RankState.READY, RankState.SUSPECT, RankState.DRAINING, RankState.EJECTED})
"""The states in which a rank may have charges; only READY ranks get new ones."""


class RankTable:
    """The columns. Counts are of this gateway's own work unless the name says `reported`."""

    def __init__(self, config: Config) -> None:
        size = sum(group.ranks for group in config.groups)
        self.size = size
        self._lay_out(config)
        self.budgets = [group.budget for group in config.groups]
        self.has_budgets = any(budget != GroupBudget() for budget in self.budgets)
        self.is_sole_gateway = config.gateways == 1
        self.times_prefill = config.predictor is not None
        self.max_in_flight_setting = config.admission.max_in_flight_per_rank
        self.max_kv_usage = config.filters.max_kv_usage

        self.state: list[RankState] = [RankState.ABSENT] * size
        # Since when it is not READY; None while it is.
        self.away_since: list[float | None] = [0.0] * size
        self.incarnation = [0] * size
        self.info: list[RankInfo | None] = [None] * size
        self.max_in_flight = [self.max_in_flight_setting or DEFAULT_MAX_IN_FLIGHT] * size
        self.max_model_len = [0] * size
        self.is_blocked = [False] * size
        # Seconds without a message while work was in flight; failures since the last success.
        self.silent_s = [0.0] * size
        self.failures = [0] * size

        self._start_idle(size, len(config.groups))

        # What the rank has shown. A step of 0 is unknown.
        self.step_us = [0] * size
        mean = config.predictor.mean_out_tokens if config.predictor is not None else DEFAULT_MEAN_OUT_TOKENS
        self.mean_out_tokens = [float(mean)] * size

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

    def _start_idle(self, size: int, groups: int) -> None:
        """The columns of own work, by rank and by group."""
        # Own work. `queued_tokens` are prompt tokens of attempts without a first token, `pending_us` their predicted
        # prefill, `head_us` that of the oldest of them; `kv_reserved_tokens` what all attempts may grow to.
        self.in_flight = [0] * size
        self.in_flight_prefill = [0] * size
        self.in_flight_decode = [0] * size
        self.queued_tokens = [0] * size
        self.ctx_tokens = [0] * size
        self.own_tokens = [0] * size
        self.sent_since_snapshot = [0] * size
        self.prompt_tokens_in_flight = [0] * size
        self.kv_reserved_tokens = [0] * size
        self.pending_us = [0] * size
        self.head_us = [0] * size
        self.head_credit_us = [0] * size
        """`head_us`, or 0 where other gateways' work may be the one that the rank is busy with."""
        self.head_since: list[float | None] = [None] * size

        # Own work by group, for `GroupBudget`; as the two columns of reserved tokens kept only if a group has one.
        self.group_in_flight = [0] * groups
        self.group_prompt_tokens = [0] * groups
        self.group_kv_tokens = [0] * groups

    def _lay_out(self, config: Config) -> None:
        """What the configuration fixes for each rank."""
        self.group_names = [group.name for group in config.groups]
        self.group_of: list[int] = []
        self.group_rank: list[int] = []
        self.engine_index: list[int] = []
        self.is_resident: list[bool] = []
        self.counts_tokens: list[bool] = []
        self.refuses_by_abort: list[bool] = []
        for number, group in enumerate(config.groups):
            family = FAMILIES[group.protocol]
            semantics = group.load_semantics or family.load_semantics
            for index in range(group.ranks):
                self.group_of.append(number)
                self.group_rank.append(index)
                self.engine_index.append(group.start_index + index)
                self.is_resident.append(semantics == "resident")
                self.counts_tokens.append(family.counts_completion_tokens)
                self.refuses_by_abort.append(family.refuses_by_abort)

    def refresh(self, rank: int) -> None:
        """Recompute the derived columns of one rank; called after every change to it, several times per request."""
        in_flight = self.in_flight[rank]
        foreign = self.running[rank] + self.waiting[rank] - in_flight
        self.foreign[rank] = foreign if foreign > 0 else 0
        usage = self.kv_usage[rank]
        free = capacity = self.kv_capacity_tokens[rank]
        if capacity is not inf:
            if in_flight:
                reported, own = usage * capacity, self.own_tokens[rank]
                free -= reported if reported > own else own
            self.free_kv_tokens[rank] = free
            if free < self.kv_floor_tokens:
                self.kv_floor_tokens = free
        is_open = in_flight < self.max_in_flight[rank] and self.state[rank] is _READY and not self.is_blocked[rank]
        if is_open is not self.is_open[rank]:
            self.is_open[rank] = is_open
            self.open_count += 1 if is_open else -1
        limit = self.max_kv_usage
        is_over = limit is not None and usage > limit and in_flight > 0
        if is_over is not self.is_over_kv[rank]:
            self.is_over_kv[rank] = is_over
            self.over_kv_count += 1 if is_over else -1

    def check(self) -> None:
        """Assert that the derived columns are what `refresh` makes them; for tests, after every step."""
        columns = (self.foreign, self.free_kv_tokens, self.is_open, self.is_over_kv)
        derived = [column[:] for column in columns]
        for rank in range(self.size):
            self.refresh(rank)
        assert derived == [column[:] for column in columns]
        assert (self.open_count, self.over_kv_count) == (sum(self.is_open), sum(self.is_over_kv))
        assert self.kv_floor_tokens <= min(self.free_kv_tokens)

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
        self.summarise()
        self.limit_in_flight(rank)
        self.is_blocked[rank] = False
        self.count_in_group(
            rank, -self.in_flight[rank], -self.prompt_tokens_in_flight[rank], -self.kv_reserved_tokens[rank]
        )
        for column in (
            self.in_flight,
            self.in_flight_prefill,
            self.in_flight_decode,
            self.queued_tokens,
            self.ctx_tokens,
            self.own_tokens,
            self.prompt_tokens_in_flight,
            self.kv_reserved_tokens,
            self.pending_us,
            # The engine may be another one now. How long outputs are is up to the callers, and stays.
            self.step_us,
        ):
            column[rank] = 0
        self.set_head(rank, None, 0)
        self.forget_snapshot(rank)

    def limit_in_flight(self, rank: int) -> None:
        """Set the bound that the settings or the rank itself name."""
        info = self.info[rank]
        slots = info.max_num_seqs if info is not None else None
        own = SLOTS_FACTOR * slots if slots else DEFAULT_MAX_IN_FLIGHT
        self.max_in_flight[rank] = self.max_in_flight_setting or own

    def set_head(self, rank: int, since: float | None, prefill_us: int) -> None:
        """Another attempt (or none) is now the rank's oldest without a first token."""
        self.head_since[rank] = since
        self.head_us[rank] = prefill_us
        self.head_credit_us[rank] = prefill_us if self.is_sole_gateway else 0

    def observe_step(self, rank: int, gap_us: int) -> None:
        """Learn from the time between two consecutive batches of a busy rank that both had decoding rows.

        Gaps that are no time, or longer than `MAX_STEP_US` (a pause, not a step), are left out.
        """
        if not 0 < gap_us <= MAX_STEP_US:
            return
        mean = self.step_us[rank]
        self.step_us[rank] = mean + round(_STEP_SMOOTHING * (gap_us - mean)) if mean else gap_us

    def observe_finished(self, rank: int, tokens: int) -> None:
        """Learn from an attempt that ended by itself after `tokens` tokens."""
        self.mean_out_tokens[rank] += _OUT_TOKENS_SMOOTHING * (tokens - self.mean_out_tokens[rank])

    def unstarted_us(self, rank: int, now: float) -> int:
        """Predicted prefill that is still to be done on the rank, in microseconds.

        The head is being worked on since `head_since`. Its time counts up to its own prediction: a head that takes
        longer says nothing about those behind it.
        """
        since = self.head_since[rank]
        elapsed_us = 0 if since is None else max(0, round((now - since) * 1e6))
        return self.pending_us[rank] - min(self.head_us[rank], elapsed_us)

    def expected_out_tokens(self) -> float:
        """Tokens that a sequence generates, by what the ranks have shown."""
        return sum(self.mean_out_tokens) / self.size

    def count_in_group(self, rank: int, in_flight: int, prompt_tokens: int, kv_tokens: int) -> None:
        """Add what the rank's own columns gained (or lost) to the sums of its group."""
        group = self.group_of[rank]
        self.group_in_flight[group] += in_flight
        self.group_prompt_tokens[group] += prompt_tokens
        self.group_kv_tokens[group] += kv_tokens

    def restore(self, row: RankRow, now: float, max_model_len: int) -> None:
        """Set one rank's columns as a rank that joined, was sent work and reported would have left them.

        For decisions about a state that was written down; `max_model_len` stands in where the row has none. The
        ledger knows nothing of this work.
        """
        rank = row.rank
        info = RankInfo(max_model_len=row.max_model_len or max_model_len, kv_capacity_tokens=row.kv_capacity_tokens)
        self.join(rank, row.incarnation or 1, info)
        self.state[rank] = RankState(row.state)
        self.away_since[rank] = None if self.state[rank] is _READY else now
        if row.max_in_flight is not None:
            self.max_in_flight[rank] = row.max_in_flight
        restore_own_work(self, row, now)
        if row.has_report:
            restore_report(self, row, now)
        self.refresh(rank)

    def raise_kv_floor(self) -> float:
        """Make the floor exact again and return it."""
        self.kv_floor_tokens = min(self.free_kv_tokens)
        return self.kv_floor_tokens

    def summarise(self) -> None:
        """Recompute what is derived from whole columns."""
        self.raise_kv_floor()
        self.min_model_len = min(self.max_model_len)
        self.has_kv_limit = any(value is not inf for value in self.kv_capacity_tokens)

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
