"""The choice of a rank: filters, then cost and picker, as one synchronous step with its record.

Nothing here changes the rank table: the caller charges the chosen rank before it decides again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway.config import schema
from gateway.core.costing import CostFunction, RequestValues
from gateway.core.decisions import Decision
from gateway.core.eligibility import Eligibility, Screened
from gateway.core.pickers import PickState, make_picker
from gateway.core.presets import resolve
from gateway.core.ranks import RankTable


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
        self.resolved: Final = resolve(settings)
        self._table = table
        self._eligibility = Eligibility(filters, table)
        formula = self.resolved.formula
        self._cost: CostFunction | None = None
        if formula is not None:
            is_maximised = self.resolved.objective == "max"
            self._cost = CostFunction(formula, table, gateways=gateways, coupled=coupled, is_maximised=is_maximised)
        self._state = PickState(rng)
        self._picker = make_picker(self.resolved, self._cost, table, self._state)
        self._copy_columns = formula.copy_columns if formula is not None else _no_columns

    @property
    def non_finite_costs(self) -> int:
        """How many costs of eligible ranks could not be computed or were not finite."""
        return self._cost.non_finite if self._cost is not None else 0

    @property
    def all_non_finite(self) -> int:
        """How many decisions had no usable cost at all and went to the least in-flight."""
        return self._state.all_non_finite

    def decide(
        self,
        now: float,
        *,
        prompt_tokens: int,
        max_tokens: int,
        priority: int = 0,
        cached_tokens: int = 0,
        pinned_rank: int | None = None,
        label: str = "",
    ) -> Decision:
        """Choose a rank for one sequence; `pinned_rank` is a valid rank number. Never raises for a full table."""
        new_tokens = prompt_tokens - cached_tokens
        request = (now, prompt_tokens, cached_tokens, new_tokens if new_tokens > 0 else 1, max_tokens, priority)
        table = self._table
        if pinned_rank is None and self._eligibility.is_everyone(prompt_tokens):
            rank, ties, costs = self._picker.pick(request, None)
            return Decision(
                self.resolved,
                table.size,
                label,
                request,
                None,
                self._copy_columns(table),
                rank,
                costs,
                ties,
                table.size,
            )
        if pinned_rank is None:
            screened = self._eligibility.screen(prompt_tokens)
        else:
            screened = self._eligibility.screen_pinned(prompt_tokens, pinned_rank)
        return self._decide_among(screened, request, pinned_rank, label)

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Decisions inside leave no trace: no counter, scan position or random number is used up.

        Where the choice is random, they show the first of the equals.
        """
        state, cost = self._state, self._cost
        saved = (state.rng, state.cursor, state.all_non_finite, self.non_finite_costs)
        state.rng = _zero
        try:
            yield
        finally:
            state.rng, state.cursor, state.all_non_finite, non_finite = saved
            if cost is not None:
                cost.non_finite = non_finite

    def nominal_costs(self, now: float) -> list[float] | None:
        """What each rank costs a one-token prompt now, eligible or not; None where the policy has no formula.

        For displays: like `dry_run`, it leaves no trace.
        """
        if self._cost is None:
            return None
        with self.dry_run():
            return self._cost.all_ranks((now, 1, 0, 1, 1, 0), None)

    def _decide_among(self, screened: Screened, request: RequestValues, pinned: int | None, label: str) -> Decision:
        """The path for a pin, or when some rank does not pass every filter."""
        codes, eligible, relaxed, refusal = screened
        rank, ties, costs = None, 0, None
        if eligible and pinned is not None:
            rank, ties = pinned, 1
            costs = self._cost.some_ranks(request, eligible, eligible) if self._cost is not None else None
        elif eligible:
            rank, ties, costs = self._picker.pick(request, eligible)
        return Decision(
            self.resolved,
            self._table.size,
            label,
            request,
            pinned,
            self._copy_columns(self._table),
            rank,
            costs,
            ties,
            len(eligible),
            codes,
            relaxed,
            refusal,
        )


def _zero() -> float:
    return 0.0


def _no_columns(table: object) -> tuple[()]:  # noqa: ARG001 - same shape as the generated ones
    return ()
