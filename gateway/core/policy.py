"""The choice of a rank: filters, then cost and picker, as one synchronous step with its record.

Nothing here changes the rank table: the caller charges the chosen rank before it decides again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from gateway.config import schema
from gateway.core.costing import CostFunction, RequestValues
from gateway.core.decisions import GATE_TRIED, Decision, with_kv
from gateway.core.eligibility import Eligibility, Screened
from gateway.core.pickers import Pick, PickState, make_picker
from gateway.core.presets import resolve
from gateway.core.ranks import RankTable

_NoPick = tuple[None, int, None]
_NO_PICK: _NoPick = (None, 0, None)
KvFits = Callable[[int, int], bool]
"""`(rank, prompt_tokens)`: whether the rank has room for a prompt of that length now."""


class Held(NamedTuple):
    """A sequence is better kept back for one of `ranks`, which cost far less than any that may take it now.

    `best` is the cheapest of those that may; `is_idle` says that one of them has nothing in flight. To place it
    nevertheless, decide again with a `hold_ratio` of 0.
    """

    ranks: tuple[int, ...]
    best: int
    is_idle: bool


class Policy:
    """One configured policy over one rank table.

    `rng` gives uniform numbers in [0, 1). Raises `PolicyError` or `FormulaError` (both ValueError) for settings that make
    no policy.
    """

    def __init__(
        self,
        settings: schema.Policy,
        filters: schema.Filters,
        table: RankTable,
        *,
        gateways: int,
        coupled: bool,
        rng: Callable[[], float],
    ) -> None:
        self._table, self._state = table, PickState(rng)
        self._cost: CostFunction | None = None
        self._faults_before = 0
        self._use(settings, filters, gateways=gateways, coupled=coupled)

    def configure(self, config: schema.Config) -> None:
        """Go by another policy and other filters, over as many ranks as the table has now. The counts go on."""
        coupled = any(group.coupled for group in config.groups)
        self._use(config.policy, config.filters, gateways=config.gateways, coupled=coupled)

    def _use(self, settings: schema.Policy, filters: schema.Filters, *, gateways: int, coupled: bool) -> None:
        resolved, table, cost = resolve(settings), self._table, None
        self._state.cursor %= table.size
        formula = resolved.formula
        if formula is not None:
            is_maximised = resolved.objective == "max"
            cost = CostFunction(formula, table, gateways=gateways, coupled=coupled, is_maximised=is_maximised)
        self._picker = make_picker(resolved, cost, table, self._state)
        self._eligibility = Eligibility(filters, table)
        self.is_everyone = self._eligibility.is_everyone
        self._has_budgets = self._eligibility.has_budgets
        self._copy_columns = formula.copy_columns if formula is not None else lambda _: ()
        self._faults_before = self.non_finite_costs
        self.resolved, self._cost = resolved, cost
        self.may_fault = cost is not None and cost.direct is None  # else neither of the counts below ever moves

    @property
    def non_finite_costs(self) -> int:
        """How many costs of eligible ranks could not be computed or were not finite."""
        return self._faults_before + (self._cost.non_finite if self._cost is not None else 0)

    @property
    def all_non_finite(self) -> int:
        """How many decisions had no usable cost at all and went to the least in-flight."""
        return self._state.all_non_finite

    def decide(  # noqa: PLR0913 - one request's values
        self,
        now: float,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        cached_tokens: int = 0,
        pinned_rank: int | None = None,
        label: str = "",
        prefill_ms: float = 0.0,
        *,
        tried_rank: int | None = None,
    ) -> Decision:
        """Choose a rank for one sequence; `pinned_rank` is a valid rank number. Never raises for a full table.

        `tried_rank`, that of an attempt which failed, is chosen again only if there is no other.
        """
        new = prompt_tokens - cached_tokens
        request = (now, prompt_tokens, cached_tokens, new if new > 0 else 1, max_tokens, priority, prefill_ms)
        if pinned_rank is None:
            if tried_rank is None:
                decision = self.decide_among_all(request, label)
                if decision is not None:
                    return decision
            screened = self._eligibility.screen(prompt_tokens, max_tokens, tried_rank)
            pick: Pick | _NoPick = self._picker.pick(request, screened.eligible) if screened.eligible else _NO_PICK
        else:
            screened = self._eligibility.screen_pinned(prompt_tokens, max_tokens, pinned_rank)
            pick = self._pinned(request, pinned_rank) if screened.eligible else _NO_PICK
        return self._record(screened, request, pinned_rank, label, pick)

    def decide_among_all(self, request: RequestValues, label: str) -> Decision | None:
        """`decide` where every rank passes every filter; None, and without a trace, where some rank may not."""
        table = self._table
        size, prompt_tokens = table.size, request[1]
        if table.open_count != size or table.over_kv_count:
            return None
        # What `is_everyone` looks at next, which answers for nearly all prompts.
        is_small = prompt_tokens < table.kv_floor_tokens and prompt_tokens < table.min_model_len
        if (not is_small or self._has_budgets) and not self.is_everyone(prompt_tokens, request[4]):
            return None
        columns = self._copy_columns(table)
        rank, ties, costs = self._picker.pick(request, None)
        return Decision(self.resolved, size, label, request, None, columns, rank, costs, ties, size)

    def refuse(
        self,
        now: float,
        *,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        pinned_rank: int | None = None,
        label: str = "",
        prefill_ms: float = 0.0,
    ) -> Decision | None:
        """What `decide` would say if no rank is eligible; None if some rank is. Leaves no trace."""
        screened = self._screen(prompt_tokens, max_tokens, pinned_rank)
        if screened is None or screened.eligible:
            return None
        request = (now, prompt_tokens, 0, prompt_tokens, max_tokens, priority, prefill_ms)
        return self._record(screened, request, pinned_rank, label, _NO_PICK)

    def most_in_flight(self, prompt_tokens: int, max_tokens: int, pinned_rank: int | None) -> float:
        """How many such sequences the ranks could have in flight together if nothing else were."""
        return self._eligibility.most_in_flight(prompt_tokens, max_tokens, pinned_rank)

    def decide_gated(  # noqa: PLR0913 - one request's values, and the three of late binding
        self,
        now: float,
        *,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        cached_tokens: int = 0,
        pinned_rank: int | None = None,
        label: str = "",
        prefill_ms: float = 0.0,
        gate: bytes,
        kv_fits: KvFits | None,
        hold_ratio: float,
        tried_rank: int | None = None,
    ) -> Decision | Held | None:
        """Late binding: as `decide`, but only a rank whose gate is open (0) and that `kv_fits` (None: all) may be chosen.

        The filters do not know of gates: with no eligible rank the result is a refusal as in `decide`, and a rank that
        a soft filter shuns stays out while there is another eligible one, passing or not. None: no eligible rank
        passes now. `Held` (if `hold_ratio` > 0 and the picker has costs): an eligible rank that does not pass costs
        less than `hold_ratio` times the best that does. A sequence with a `tried_rank` is never held, and passes over
        that rank if there is another one. Only a `Decision` leaves a trace.
        """
        new = prompt_tokens - cached_tokens
        request = (now, prompt_tokens, cached_tokens, new if new > 0 else 1, max_tokens, priority, prefill_ms)
        screened = self._screen(prompt_tokens, max_tokens, pinned_rank)
        eligible = None
        if screened is not None:
            eligible = screened.eligible
            if not eligible:
                return self._record(screened, request, pinned_rank, label, _NO_PICK)
        ranks = range(self._table.size) if eligible is None else eligible
        if kv_fits is None and gate.count(0) == len(gate):
            passing = list(ranks)
        else:
            passing = [rank for rank in ranks if not gate[rank] and (kv_fits is None or kv_fits(rank, prompt_tokens))]
        if not passing:
            return None
        states = with_kv(gate, ranks, passing)
        if tried_rank is not None:
            hold_ratio = 0.0
            if tried_rank in passing and len(passing) > 1:
                passing.remove(tried_rank)
                states = states[:tried_rank] + bytes([GATE_TRIED]) + states[tried_rank + 1 :]
        if pinned_rank is not None:
            pick = self._pinned(request, pinned_rank)
        elif len(passing) == len(ranks):
            pick = self._picker.pick(request, eligible)  # nobody better is kept out
        else:
            found = self._pick_passing(request, eligible, passing, hold_ratio)
            if isinstance(found, Held):
                return found
            pick = found
        return self._record(screened, request, pinned_rank, label, pick, states)

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Decisions inside leave no trace: no counter, scan position or random number is used up.

        Where the choice is random, they show the first of the equals.
        """
        state, cost = self._state, self._cost
        saved = (state.rng, state.cursor, state.all_non_finite, cost.non_finite if cost is not None else 0)
        state.rng = float  # which gives 0.0
        try:
            yield
        finally:
            state.rng, state.cursor, state.all_non_finite, non_finite = saved
            if cost is not None:
                cost.non_finite = non_finite

    def nominal_costs(self, now: float) -> list[float] | None:
        """What each rank costs a one-token prompt now, eligible or not; None where the policy has no formula.

        For displays: like `dry_run`, it leaves no trace. The prompt's own predicted prefill is left out.
        """
        if self._cost is None:
            return None
        with self.dry_run():
            return self._cost.all_ranks((now, 1, 0, 1, 1, 0, 0.0), None)

    def _screen(self, prompt_tokens: int, max_tokens: int, pinned: int | None) -> Screened | None:
        """None: every rank is eligible."""
        if pinned is not None:
            return self._eligibility.screen_pinned(prompt_tokens, max_tokens, pinned)
        if self._eligibility.is_everyone(prompt_tokens, max_tokens):
            return None
        return self._eligibility.screen(prompt_tokens, max_tokens)

    def _pinned(self, request: RequestValues, pinned: int) -> Pick:
        only = [pinned]
        return (pinned, 1, self._cost.some_ranks(request, only, only) if self._cost is not None else None)

    def _pick_passing(
        self, request: RequestValues, eligible: list[int] | None, passing: list[int], hold_ratio: float
    ) -> Pick | Held:
        cost = self._cost
        if cost is None or not hold_ratio > 0:
            return self._picker.pick_among(request, eligible, passing, None)
        faults = cost.non_finite
        costs = cost.all_ranks(request, eligible)
        held = self._held(costs, eligible, passing, hold_ratio)
        if held is not None:
            cost.non_finite = faults
            return held
        return self._picker.pick_among(request, eligible, passing, costs)

    def _held(
        self, costs: list[float], eligible: list[int] | None, passing: list[int], hold_ratio: float
    ) -> Held | None:
        """Shares of a cost mean something only between positive costs; others never hold."""
        ranks = range(self._table.size) if eligible is None else eligible
        # What passes is no better than the best of it, and so not among the better ones.
        if self.resolved.objective == "max":
            best = max(passing, key=costs.__getitem__)
            limit = costs[best] / hold_ratio
            better = [rank for rank in ranks if costs[rank] > limit]
        else:
            best = min(passing, key=costs.__getitem__)
            limit = costs[best] * hold_ratio
            better = [rank for rank in ranks if costs[rank] < limit]
        if not better or not 0 < costs[best] < inf:
            return None
        in_flight = self._table.in_flight
        return Held(tuple(better), best, any(not in_flight[rank] for rank in passing))

    def _record(
        self,
        screened: Screened | None,
        request: RequestValues,
        pinned: int | None,
        label: str,
        pick: Pick | _NoPick,
        gate: bytes | None = None,
    ) -> Decision:
        """The path for a pin, for a gate, or when some rank does not pass every filter (`screened` None: all do)."""
        table = self._table
        columns = self._copy_columns(table)
        rank, ties, costs = pick
        codes, eligible, relaxed, refusal = screened if screened is not None else (None, None, (), None)
        return Decision(
            self.resolved,
            table.size,
            label,
            request,
            pinned,
            columns,
            rank,
            costs,
            ties,
            len(eligible) if eligible is not None else table.size,
            codes,
            relaxed,
            refusal,
            0,
            gate,
        )
