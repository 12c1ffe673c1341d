"""Which ranks a request may go to: filters with one reason per rank, applied before every picker.

Hard filters: the rank's state, a blocked send queue, its in-flight limit, its group's budget, the model's
context, the KV capacity, and (by default) the free KV tokens. Soft filters are relaxed, weakest first, when no
rank passes: `kv_usage`, `tried` (the rank of the attempt before), then `kv_fit` where it is configured as soft. A rank with nothing in flight
has its whole KV capacity free, whatever its last snapshot said.

That no rank can ever take a request is said only if no rank that is configured could, those included that are away: they
are as large as they last reported, and one that never joined may be of any size.
"""

from collections.abc import Mapping
from itertools import compress
from typing import NamedTuple

from gateway.config.schema import Filters, GroupBudget
from gateway.core.capacity import most_in_flight, obstacle
from gateway.core.errors import Reason
from gateway.core.ranks import RankState, RankTable

REASONS = (
    "eligible",
    "kv_usage",
    "tried",
    "kv_fit",
    "full",
    "group_full",
    "blocked",
    "kv_capacity",
    "group_budget",
    "context_length",
    "suspect",
    "ejected",
    "draining",
    "joining",
    "lost",
    "absent",
    "not_pinned",
)
"""Stable strings, weakest first. A rank that fails several filters shows the strongest."""

ELIGIBLE, KV_USAGE, TRIED, KV_FIT, FULL, GROUP_FULL, BLOCKED, KV_CAPACITY, GROUP_BUDGET, CONTEXT_LENGTH = range(10)
SUSPECT, EJECTED, DRAINING, JOINING, LOST, ABSENT, NOT_PINNED = range(10, len(REASONS))
_UNDECIDED = len(REASONS)
_UNDECIDED_IF_0 = bytes([_UNDECIDED, ELIGIBLE]) + bytes(254)
_IS_ELIGIBLE = bytes([1]) + bytes(255)
_CODE_OF_STATE = {
    RankState.SUSPECT: SUSPECT,
    RankState.EJECTED: EJECTED,
    RankState.DRAINING: DRAINING,
    RankState.JOINING: JOINING,
    RankState.LOST: LOST,
    RankState.ABSENT: ABSENT,
}
STATE_OF_CODE = {code: state for state, code in _CODE_OF_STATE.items()}
_NOT_READY = {*STATE_OF_CODE, NOT_PINNED}
_NO_GROUPS: Mapping[int, int] = {}
_NEVER_FITS = {KV_CAPACITY, GROUP_BUDGET, CONTEXT_LENGTH}


class Screened(NamedTuple):
    """The filters' result. `codes[rank]` indexes `REASONS`; `relaxed` names the soft filters that were given up.

    Nothing of it is changed any more, so the same result may stand for more than one request.
    """

    codes: bytes
    eligible: list[int]
    relaxed: tuple[str, ...] = ()
    refusal: Reason | None = None


class Eligibility:
    """The filters over one rank table. `max_tokens` is the request's output limit; it counts for budgets only."""

    def __init__(self, settings: Filters, table: RankTable) -> None:
        self._table = table
        self._ranks = list(range(table.size))
        self._checks_fit = settings.kv_fit != "off"
        self._soft = (KV_USAGE, TRIED, KV_FIT) if settings.kv_fit == "soft" else (KV_USAGE, TRIED)
        # Most configurations have no budgets, and then nothing looks at groups.
        self._budgets = [(group, budget) for group, budget in enumerate(table.budgets) if budget != GroupBudget()]
        self.has_budgets = bool(self._budgets)
        # The same few ranks often fail for a while. Only what is eligible by its codes alone is kept.
        self._last = Screened(b"", [])

    def is_everyone(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether every rank passes every filter, decided from whole columns; False may also mean "look closer"."""
        table = self._table
        if table.open_count != table.size or table.over_kv_count:
            return False
        # Below both minima it fits, whatever is checked; that answers for nearly all prompts.
        is_small = prompt_tokens < table.kv_floor_tokens and prompt_tokens < table.min_model_len
        if not is_small and not self._fits_everywhere(prompt_tokens):
            return False
        return not self._budgets or not self._closed_groups(prompt_tokens, max_tokens)

    def screen(self, prompt_tokens: int, max_tokens: int, tried: int | None = None) -> Screened:
        """Every rank through every filter. `tried` is the rank of the sequence's attempt before."""
        table = self._table
        if self._fits_everywhere(prompt_tokens):
            passes = bytearray(table.is_open) if table.open_count < table.size else bytearray(b"\1") * table.size
            rank = -1
            for _ in range(table.over_kv_count):
                rank = table.is_over_kv.index(True, rank + 1)
                passes[rank] = False
        else:
            passes = bytearray(
                [
                    is_open and not is_over and prompt_tokens < length and prompt_tokens < free
                    for is_open, is_over, length, free in zip(
                        table.is_open, table.is_over_kv, table.max_model_len, table.free_kv_tokens, strict=True
                    )
                ]
            )
        closed = self._closed_groups(prompt_tokens, max_tokens) if self._budgets else _NO_GROUPS
        if closed:
            for rank, group in enumerate(table.group_of):
                if group in closed:
                    passes[rank] = False
        codes = passes.translate(_UNDECIDED_IF_0)
        rank = codes.find(_UNDECIDED)
        while rank >= 0:
            codes[rank] = self._code(rank, prompt_tokens, closed)
            rank = codes.find(_UNDECIDED, rank + 1)
        if tried is not None and tried < len(codes) and codes[tried] <= TRIED:  # it may be configured no more
            codes[tried] = TRIED
        if codes == self._last.codes:
            return self._last
        screened = self._settle(bytes(codes), prompt_tokens, max_tokens, None)
        if screened.codes == codes and screened.eligible:
            self._last = screened
        return screened

    def _closed_groups(self, prompt_tokens: int, max_tokens: int) -> dict[int, int]:
        """The groups whose budget has no room for the request: `GROUP_FULL`, or `GROUP_BUDGET` if it never has."""
        table = self._table
        kv_tokens = prompt_tokens + max_tokens
        closed: dict[int, int] = {}
        for group, budget in self._budgets:
            requests, prompts, kv = budget.max_requests, budget.max_prompt_tokens, budget.max_kv_tokens
            if (prompts is not None and prompt_tokens > prompts) or (kv is not None and kv_tokens > kv):
                closed[group] = GROUP_BUDGET
            elif (
                (requests is not None and table.group_in_flight[group] >= requests)
                or (prompts is not None and table.group_prompt_tokens[group] + prompt_tokens > prompts)
                or (kv is not None and table.group_kv_tokens[group] + kv_tokens > kv)
            ):
                closed[group] = GROUP_FULL
        return closed

    def _fits_everywhere(self, prompt_tokens: int) -> bool:
        table = self._table
        if prompt_tokens >= table.min_model_len:
            return False
        if not table.has_kv_limit:
            return True
        # Free tokens never exceed the capacity, so below the smallest of them both filters pass.
        if self._checks_fit:
            return prompt_tokens < table.kv_floor_tokens or prompt_tokens < table.raise_kv_floor()
        return prompt_tokens < min(table.kv_capacity_tokens)

    def screen_pinned(self, prompt_tokens: int, max_tokens: int, pinned: int) -> Screened:
        """Only the pinned rank; soft filters can't turn it away."""
        closed = self._closed_groups(prompt_tokens, max_tokens) if self._budgets else _NO_GROUPS
        codes = bytearray([NOT_PINNED]) * self._table.size
        codes[pinned] = self._code(pinned, prompt_tokens, closed)
        return self._settle(bytes(codes), prompt_tokens, max_tokens, pinned)

    def most_in_flight(self, prompt_tokens: int, max_tokens: int, pinned: int | None) -> float:
        """How many such sequences could be in flight together if nothing else were."""
        checks_fit = self._checks_fit and KV_FIT not in self._soft
        return most_in_flight(self._table, prompt_tokens, max_tokens, pinned, checks_fit=checks_fit)

    def _settle(self, codes: bytes, prompt_tokens: int, max_tokens: int, pinned: int | None) -> Screened:
        """Accept the eligible ranks, or else those that only ever weaker soft filters turned away."""
        if ELIGIBLE in codes:
            return Screened(codes, self._eligible(codes))
        for accepted in self._soft:
            if accepted not in codes:
                continue
            relaxed = tuple(REASONS[code] for code in self._soft if code <= accepted and code in codes)
            codes = bytes([ELIGIBLE if code <= accepted else code for code in codes])
            return Screened(codes, self._eligible(codes), relaxed)
        return self._refuse(codes, prompt_tokens, max_tokens, pinned)

    def _eligible(self, codes: bytes) -> list[int]:
        return list(compress(self._ranks, codes.translate(_IS_ELIGIBLE)))

    def _refuse(self, codes: bytes, prompt_tokens: int, max_tokens: int, pinned: int | None) -> Screened:
        """The most informative reason why no rank is eligible.

        Where none ever is, each rank shows what keeps it from ever taking the request, even if it is away.
        """
        waiting = set(codes) - _NOT_READY - _NEVER_FITS
        if waiting:
            return Screened(codes, [], (), Reason.KV_FULL if KV_FIT in waiting else Reason.RANKS_FULL)
        asked = range(self._table.size) if pinned is None else (pinned,)
        obstacles = [obstacle(self._table, rank, prompt_tokens, max_tokens) for rank in asked]
        if None in obstacles:
            reason = Reason.NO_ELIGIBLE_RANK if pinned is None else Reason.PINNED_RANK_UNAVAILABLE
            return Screened(codes, [], (), reason)
        shown = bytearray(codes)
        for rank, name in zip(asked, obstacles, strict=True):
            shown[rank] = REASONS.index(str(name))
        is_output = any(obstacle(self._table, rank, prompt_tokens, 0) is None for rank in asked)
        is_capacity = set(obstacles) == {REASONS[KV_CAPACITY]}
        return Screened(
            bytes(shown), [], (), Reason.KV_TOO_SMALL if is_output or is_capacity else Reason.PROMPT_TOO_LONG
        )

    def _code(self, rank: int, prompt_tokens: int, closed: Mapping[int, int]) -> int:
        """The strongest reason against a rank."""
        table = self._table
        state = table.state[rank]
        if state is not RankState.READY:
            return _CODE_OF_STATE[state]
        if 0 < table.max_model_len[rank] <= prompt_tokens:  # no room for one generated token
            return CONTEXT_LENGTH
        group_code = closed.get(table.group_of[rank], ELIGIBLE) if closed else ELIGIBLE
        if group_code == GROUP_BUDGET:
            return GROUP_BUDGET
        if prompt_tokens >= table.kv_capacity_tokens[rank]:
            return KV_CAPACITY
        if table.is_blocked[rank]:
            return BLOCKED
        if group_code:
            return group_code
        if not table.is_open[rank]:
            return FULL
        if self._checks_fit and prompt_tokens > table.free_kv_tokens[rank]:
            return KV_FIT
        return KV_USAGE if table.is_over_kv[rank] else ELIGIBLE
