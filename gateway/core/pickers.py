"""How one rank is chosen among the eligible ones: argmin, p2c, random, round_robin; and tie-breaks.

A picker gets the request's values and the eligible ranks (None: all of them) and returns
`(rank, ties, costs)`. What changes from pick to pick (the scan position, the counters, the source
of randomness) is in one `PickState`, so that a dry run can put it back.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from sys import float_info
from typing import Protocol

from gateway.core.costing import CostFunction, RequestValues
from gateway.core.presets import ResolvedPolicy
from gateway.core.ranks import RankTable

_FEW = 8
"""Up to so many ranks that stay out have their costs overwritten; picking the others' out would take longer."""


class PickState:
    """`rng` gives uniform numbers in [0, 1). `cursor` is where the next scan starts.

    `all_non_finite` counts decisions that had to fall back to the least in-flight.
    """

    __slots__ = ("all_non_finite", "cursor", "rng")

    def __init__(self, rng: Callable[[], float]) -> None:
        self.rng = rng
        self.cursor = 0
        self.all_non_finite = 0


Pick = tuple[int, int, list[float] | None]
"""The chosen rank, how many ranks were as good (1: none but itself), and the costs if any were computed."""


class Picker(Protocol):
    """One way to choose."""

    def pick(self, request: RequestValues, eligible: list[int] | None) -> Pick:
        """Choose among the eligible ranks, which are never none."""
        ...

    def pick_among(
        self, request: RequestValues, eligible: list[int] | None, passing: list[int], costs: list[float] | None
    ) -> Pick:
        """Choose among `passing`, which are some of the eligible ranks; `fleet_*` still look at all eligible ones.

        `costs` are those of every rank, where they have been computed already.
        """
        ...


class Argmin:
    """The best cost; costs within the tolerance of it are ties, decided by `tie_break`."""

    def __init__(self, policy: ResolvedPolicy, cost: CostFunction, table: RankTable, state: PickState) -> None:
        self._cost = cost
        self._direct = cost.direct
        self._table = table
        self._state = state
        self._is_maximised = policy.objective == "max"
        self._relative = policy.tie_tolerance.relative
        self._absolute = policy.tie_tolerance.absolute
        self._is_rotating = policy.tie_break == "rotate"
        self._is_random = policy.tie_break == "random"
        # Different whole numbers up to 1/relative are further apart than the tolerance: ties are equal then.
        is_exact = cost.formula.expression.is_integer and self._absolute < 1
        self._exact_below = (1 / self._relative if self._relative > 0 else inf) if is_exact else 0.0
        self._is_simple = self._is_random and not self._is_maximised
        self._worst = -inf if self._is_maximised else inf
        self._last_eligible: list[int] | None = None
        self._excluded: list[int] | None = None
        self._is_known = False

    def pick(self, request: RequestValues, eligible: list[int] | None) -> Pick:
        """Evaluate every rank and take the best."""
        if self._direct is None:
            return self.best(self._cost.all_ranks(request, eligible), eligible)
        # Spelled out: a call with * leaves the interpreter's fast path.
        now, prompt_tokens, cached_tokens, new_tokens, max_tokens, priority, prefill_ms = request
        costs = self._direct(now, prompt_tokens, cached_tokens, new_tokens, max_tokens, priority, prefill_ms)
        if eligible is None and self._is_simple:
            best = min(costs)
            if -self._exact_below < best < self._exact_below:
                count = costs.count(best)
                if count == 1:
                    return (costs.index(best), 1, costs)
                if count == len(costs):
                    return (int(self._state.rng() * count), count, costs)
        return self.best(costs, eligible)

    def pick_among(
        self, request: RequestValues, eligible: list[int] | None, passing: list[int], costs: list[float] | None
    ) -> Pick:
        """As `pick`: every rank is evaluated, the passing ones compete."""
        return self.best(costs if costs is not None else self._cost.all_ranks(request, eligible), passing)

    def best(self, costs: list[float], eligible: list[int] | None) -> Pick:
        """The best of `eligible` by costs that are already computed."""
        keys, ranks = costs, eligible
        if eligible is not None:
            excluded = self._excluded_by(eligible)
            if excluded is None:
                keys = list(map(costs.__getitem__, eligible))
            else:
                keys, ranks = costs.copy(), None
                for rank in excluded:
                    keys[rank] = self._worst
        if self._is_maximised:
            keys = [-key for key in keys]
        best = min(keys)
        tied: Sequence[int]
        if -self._exact_below < best < self._exact_below:
            count = keys.count(best)
            if count == 1 and not self._is_rotating:
                position = keys.index(best)
                return (position if ranks is None else ranks[position], 1, costs)
            is_every = count == len(keys)
            tied = range(count) if is_every else [position for position, key in enumerate(keys) if key == best]
        elif best == inf:
            self._state.all_non_finite += 1
            return self._choose(self._least_in_flight(eligible), costs)
        else:
            tied = self._within_tolerance(keys, best)
        return self._choose(tied if ranks is None else [ranks[position] for position in tied], costs)

    def _excluded_by(self, eligible: list[int]) -> list[int] | None:
        """The ranks that are not eligible, if they are few and this list came before: the filters give it again.

        A list is for one size of the table: `Policy.configure` makes other filters and another picker.
        """
        if eligible is not self._last_eligible:
            self._last_eligible, self._excluded, self._is_known = eligible, None, False
        elif not self._is_known:
            self._is_known = True
            if self._table.size - len(eligible) <= _FEW:
                self._excluded = list({*range(self._table.size)}.difference(eligible))
        return self._excluded

    def _within_tolerance(self, keys: Sequence[float], best: float) -> Sequence[int]:
        """Ascending positions of the keys that tie with the best."""
        limit = min(best + max(self._relative * abs(best), self._absolute), float_info.max)
        position = keys.index(best)
        # Under load ties are rare, and a second `min` is cheaper than comparing costs one by one.
        others = [*keys]
        others[position] = inf
        has_tie = min(others) <= limit
        return [position for position, key in enumerate(keys) if key <= limit] if has_tie else (position,)

    def _least_in_flight(self, eligible: list[int] | None) -> Sequence[int]:
        column = self._table.in_flight
        ranks = range(self._table.size) if eligible is None else eligible
        least = min(column[rank] for rank in ranks)
        return [rank for rank in ranks if column[rank] == least]

    def _choose(self, tied: Sequence[int], costs: list[float]) -> Pick:
        """Decide among equals; `tied` is ascending and not empty. A rotating scan moves on even without a tie."""
        count = len(tied)
        if self._is_rotating:
            start = self._state.cursor
            self._state.cursor = (start + 1) % self._table.size
            # The first from the scan's start on, or else from 0 on.
            position = bisect_left(tied, start)
            return (tied[position if position < count else 0], count, costs)
        return (tied[int(self._state.rng() * count)] if self._is_random and count > 1 else tied[0], count, costs)


class PowerOfTwo:
    """Two eligible ranks at random, the better of them by cost. Only these two are evaluated."""

    def __init__(self, policy: ResolvedPolicy, cost: CostFunction, table: RankTable, state: PickState) -> None:
        self._cost = cost
        self._table = table
        self._state = state
        self._argmin = Argmin(policy, cost, table, state)

    def pick(self, request: RequestValues, eligible: list[int] | None) -> Pick:
        """Draw the pair without replacement."""
        pair = self._draw(range(self._table.size) if eligible is None else eligible)
        return self._argmin.best(self._cost.some_ranks(request, eligible, pair), pair)

    def pick_among(
        self, request: RequestValues, eligible: list[int] | None, passing: list[int], costs: list[float] | None
    ) -> Pick:
        """As `pick`, with a pair of passing ranks."""
        pair = self._draw(passing)
        return self._argmin.best(costs if costs is not None else self._cost.some_ranks(request, eligible, pair), pair)

    def _draw(self, ranks: Sequence[int]) -> list[int]:
        if len(ranks) <= 2:
            return list(ranks)
        first = int(self._state.rng() * len(ranks))
        second = int(self._state.rng() * (len(ranks) - 1))
        second += second >= first
        return sorted((ranks[first], ranks[second]))


class Random:
    """Any eligible rank, all equally likely."""

    def __init__(self, table: RankTable, state: PickState) -> None:
        self._table = table
        self._state = state

    def pick(self, request: RequestValues, eligible: list[int] | None) -> Pick:  # noqa: ARG002 - uses no cost
        """Draw one."""
        ranks = range(self._table.size) if eligible is None else eligible
        return (ranks[int(self._state.rng() * len(ranks))], len(ranks), None)

    def pick_among(
        self,
        request: RequestValues,
        eligible: list[int] | None,  # noqa: ARG002 - uses no cost
        passing: list[int],
        costs: list[float] | None,  # noqa: ARG002 - uses no cost
    ) -> Pick:
        """Draw one of the passing."""
        return self.pick(request, passing)


class RoundRobin:
    """The next eligible rank in the order of their numbers."""

    def __init__(self, table: RankTable, state: PickState) -> None:
        self._table = table
        self._state = state

    def pick(self, request: RequestValues, eligible: list[int] | None) -> Pick:  # noqa: ARG002 - uses no cost
        """Take the first from the cursor on, and move the cursor behind it."""
        rank = self._state.cursor
        if eligible is not None:
            rank = next((number for number in eligible if number >= rank), eligible[0])
        self._state.cursor = (rank + 1) % self._table.size
        return (rank, 1, None)

    def pick_among(
        self,
        request: RequestValues,
        eligible: list[int] | None,  # noqa: ARG002 - uses no cost
        passing: list[int],
        costs: list[float] | None,  # noqa: ARG002 - uses no cost
    ) -> Pick:
        """Take the next of the passing."""
        return self.pick(request, passing)


def make_picker(policy: ResolvedPolicy, cost: CostFunction | None, table: RankTable, state: PickState) -> Picker:
    """The picker that the policy names."""
    if policy.picker == "random":
        return Random(table, state)
    if policy.picker == "round_robin":
        return RoundRobin(table, state)
    assert cost is not None
    return Argmin(policy, cost, table, state) if policy.picker == "argmin" else PowerOfTwo(policy, cost, table, state)
