"""What ranks could ever take, by what they last reported: as if nothing were in flight and every rank were READY.

A rank that is away is as large as it was when it was there; one that never joined may be of any size.
"""

from math import inf
from typing import NamedTuple

from gateway.config.schema import GroupBudget
from gateway.core.entry import Lane, Narrow
from gateway.core.ranks import RankState, RankTable
from gateway.types import RankInfo

_READY = RankState.READY


def obstacle(table: RankTable, rank: int, prompt_tokens: int, max_tokens: int) -> str | None:
    """Why the rank could never take a sequence of this size, as one of `eligibility.REASONS`; None if it could."""
    budget = table.budgets[table.group_of[rank]]
    prompts, kv = budget.max_prompt_tokens, budget.max_kv_tokens
    if 0 < table.max_model_len[rank] <= prompt_tokens:  # no room for one generated token
        return "context_length"
    if (prompts is not None and prompt_tokens > prompts) or (kv is not None and prompt_tokens + max_tokens > kv):
        return "group_budget"
    return "kv_capacity" if prompt_tokens >= table.kv_capacity_tokens[rank] else None


def most_in_flight(
    table: RankTable, prompt_tokens: int, max_tokens: int, pinned_rank: int | None, *, checks_fit: bool
) -> float:
    """How many sequences of this size the ranks could have in flight together; `checks_fit`: only in free KV tokens."""
    by_group: dict[int, float] = {}
    for rank in range(table.size) if pinned_rank is None else (pinned_rank,):
        if obstacle(table, rank, prompt_tokens, max_tokens) is None:
            room = table.kv_capacity_tokens[rank] // prompt_tokens if checks_fit else inf
            group = table.group_of[rank]
            by_group[group] = by_group.get(group, 0) + min(table.max_in_flight[rank], room)
    return sum(
        min(count, _or_inf(budget.max_requests), *_of_tokens(budget, prompt_tokens, prompt_tokens + max_tokens))
        for count, budget in ((count, table.budgets[group]) for group, count in by_group.items())
    )


def _of_tokens(budget: GroupBudget, prompt_tokens: int, kv_tokens: int) -> tuple[float, float]:
    return _or_inf(budget.max_prompt_tokens) // prompt_tokens, _or_inf(budget.max_kv_tokens) // kv_tokens


def _or_inf(value: int | None) -> float:
    return inf if value is None else value


class _Least(NamedTuple):
    """What every rank could take: prompts below the first, with at most the others' tokens."""

    size: float
    prompt_tokens: float
    kv_tokens: float


class Reach:
    """In which lane of the queue an entry waits: with all those that the same ranks could ever take.

    So a rank that has room looks only at what it could take, however much else is queued.
    """

    def __init__(self, table: RankTable) -> None:
        self._table = table
        self._infos: list[RankInfo | None] = []
        self._budgets: list[GroupBudget] = []
        self._least = _Least(0, 0, 0)
        self.refresh()

    @property
    def is_current(self) -> bool:
        """Whether ranks could take what they could at the last `refresh`; if not, entries may have other lanes."""
        return self._infos == self._table.info and self._budgets == self._table.budgets

    def refresh(self) -> None:
        """Look at what the ranks are now."""
        table = self._table
        self._infos, self._budgets = list(table.info), list(table.budgets)
        lengths = [length for length in table.max_model_len if length]
        self._least = _Least(
            min(*table.kv_capacity_tokens, *lengths, inf),
            min(_or_inf(budget.max_prompt_tokens) for budget in table.budgets),
            min(_or_inf(budget.max_kv_tokens) for budget in table.budgets),
        )

    def lane(self, prompt_tokens: int, max_tokens: int, pinned_rank: int | None) -> Lane:
        """The lane of a sequence of this size, as of the last `refresh`. `Narrow(0)`: no rank could ever take it."""
        if pinned_rank is not None:
            return pinned_rank
        size, prompts, kv = self._least
        if prompt_tokens < size and prompt_tokens <= prompts and prompt_tokens + max_tokens <= kv:
            return None
        table = self._table
        ranks = [rank for rank in range(table.size) if obstacle(table, rank, prompt_tokens, max_tokens) is None]
        return None if len(ranks) == table.size else Narrow(sum(1 << rank for rank in ranks))

    def away_since(self, lane: Lane) -> float | None:
        """Since when no rank that could take what waits in the lane is READY; None while one is.

        A pinned one waits for its rank as long as any is READY: if that one is lost, its wait ends by itself.
        """
        table = self._table
        latest = 0.0
        for rank, since in enumerate(table.away_since):
            if isinstance(lane, Narrow) and not lane.mask >> rank & 1:
                continue
            if since is None:
                return None
            latest = max(latest, since)
        return latest


class OpenLanes:
    """The lanes in which something waits that a rank with an open gate could take; some gate is open."""

    __slots__ = ("_gate", "_mask")

    def __init__(self, gate: bytes) -> None:
        self._gate = gate
        self._mask: int | None = None

    def __contains__(self, lane: object) -> bool:
        if lane is None:
            return True
        if isinstance(lane, Narrow):
            if self._mask is None:
                self._mask = sum(1 << rank for rank, state in enumerate(self._gate) if not state)
            return lane.mask & self._mask != 0
        assert isinstance(lane, int)
        return not self._gate[lane]


class LanesOf:
    """The lanes in which something waits that one rank could take."""

    __slots__ = ("_rank",)

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __contains__(self, lane: object) -> bool:
        if isinstance(lane, Narrow):
            return lane.mask >> self._rank & 1 == 1
        return lane is None or lane == self._rank
