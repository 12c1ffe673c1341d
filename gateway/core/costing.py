"""Runs a compiled formula over the rank table and makes every result a usable cost.

A rank whose cost can't be computed (division by zero, no real value, overflow) or isn't finite gets
the worst possible cost: it is chosen only when every other eligible rank is in the same position.
"""

from collections.abc import Callable, Iterable
from math import inf, isfinite, nan

from gateway.core.formula import Aggregate, Expression, Formula
from gateway.core.ranks import RankTable

RequestValues = tuple[float, int, int, int, int, int, float]
"""`(now, prompt_tokens, cached_tokens, new_tokens, max_tokens, priority, prefill_ms)`: a formula's arguments, in order."""

_CostsOf = Callable[..., list[float]]
_CostOf = Callable[..., float]


class CostFunction:
    """A formula bound to one rank table. `worst` is +inf, or -inf where the largest value wins.

    `non_finite` counts the costs of eligible ranks that had to be replaced by `worst`.
    """

    def __init__(
        self, formula: Formula, table: RankTable, *, gateways: int, coupled: bool, is_maximised: bool = False
    ) -> None:
        self.formula = formula
        self.non_finite = 0
        self._table = table
        self._worst = -inf if is_maximised else inf
        fleet = (table, table.size, gateways, int(coupled))
        self._costs, self._cost = _bind(formula.expression, fleet)
        self._aggregates = [(item, *_bind(item.expression, fleet)) for item in formula.aggregates]
        # What may be called as `all_ranks(*request)` without any care; None if care is needed.
        self.direct = self._costs if not formula.can_be_non_finite and not formula.aggregates else None

    def all_ranks(self, request: RequestValues, eligible: list[int] | None) -> list[float]:
        """The cost of every rank, eligible or not. `eligible` None means all; never empty."""
        arguments: tuple[float, ...] = request
        if self._aggregates:
            arguments = (*request, *self._aggregate(request, eligible))
        if not self.formula.can_be_non_finite:
            return self._costs(*arguments)
        costs = self._values(self._costs, self._cost, arguments)
        if not _is_sum_finite(costs):
            self._replace(costs, eligible)
        return costs

    def some_ranks(self, request: RequestValues, eligible: list[int] | None, ranks: Iterable[int]) -> list[float]:
        """Like `all_ranks`, but only `ranks` are evaluated; the others are NaN."""
        arguments = (*request, *self._aggregate(request, eligible)) if self._aggregates else request
        costs = [nan] * self._table.size
        for rank in ranks:
            cost = _safe(self._cost, rank, arguments)
            if not isfinite(cost):
                self.non_finite += 1
                cost = self._worst
            costs[rank] = cost
        return costs

    def _aggregate(self, request: RequestValues, eligible: list[int] | None) -> list[float]:
        results: list[float] = []
        for item, every, single in self._aggregates:
            values = self._values(every, single, (*request, *results))
            if eligible is not None:
                values = [values[rank] for rank in eligible]
            results.append(_summarise(item, values))
        return results

    def _values(self, every: _CostsOf, single: _CostOf, arguments: tuple[float, ...]) -> list[float]:
        try:
            return every(*arguments)
        except (ArithmeticError, ValueError):
            # One rank's fault must not decide for the others.
            return [_safe(single, rank, arguments) for rank in range(self._table.size)]

    def _replace(self, costs: list[float], eligible: list[int] | None) -> None:
        bad = {rank for rank, cost in enumerate(costs) if not _is_finite(cost)}
        for rank in bad:
            costs[rank] = self._worst
        self.non_finite += len(bad) if eligible is None else len(bad.intersection(eligible))


def _bind(expression: Expression, fleet: tuple[RankTable, int, int, int]) -> tuple[_CostsOf, _CostOf]:
    return expression.all_ranks(*fleet), expression.one_rank(*fleet)


def _safe(single: _CostOf, rank: int, arguments: tuple[float, ...]) -> float:
    try:
        return float(single(rank, *arguments))
    except (ArithmeticError, ValueError):
        return nan


def _is_finite(cost: float) -> bool:
    try:
        return isfinite(cost)
    except OverflowError:  # an integer beyond the floats
        return False


def _is_sum_finite(costs: list[float]) -> bool:
    """One C pass: NaN and infinities survive a sum. An overflowing sum of finite costs only costs a second look."""
    try:
        return isfinite(sum(costs))
    except OverflowError:
        return False


def _summarise(item: Aggregate, values: list[float]) -> float:
    """Ranks without a finite value are left out; if none has one, the result is +inf."""
    if item.expression.can_be_non_finite:
        values = [value for value in values if _is_finite(value)]
        if not values:
            return inf
    if item.function == "fleet_mean":
        return sum(values) / len(values)
    return min(values) if item.function == "fleet_min" else max(values)
