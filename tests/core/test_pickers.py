"""Pickers and tie-breaks: order, spread, tolerance, objective, and what happens without usable costs."""

from collections import Counter
from math import inf, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Policy as PolicySettings
from gateway.config.schema import TieTolerance
from tests.support.policies import charge, make_policy, make_table, report

CHI_SQUARE_P_001 = {3: 16.27, 7: 24.32}
"""Upper 0.1 % points by degrees of freedom."""


def decide(policy, **options):
    return policy.decide(0.0, **{"prompt_tokens": 10, "max_tokens": 10, **options})


def chosen(policy, times):
    return [decide(policy).rank for _ in range(times)]


def block(table, *ranks):
    for rank in ranks:
        table.is_blocked[rank] = True
        table.refresh(rank)


def chi_square(ranks, cells):
    counts = Counter(ranks)
    assert set(counts) <= set(cells)
    expected = len(ranks) / len(cells)
    return sum((counts[cell] - expected) ** 2 / expected for cell in cells)


@pytest.mark.parametrize("preset", ["lmetric", "least_in_flight", "random", "p2c"])
def test_random_choice_among_equals_is_even(preset):
    policy = make_policy(make_table(8), PolicySettings(preset=preset), seed=3)
    ranks = chosen(policy, 4000)
    assert chi_square(ranks, range(8)) < CHI_SQUARE_P_001[7]


@pytest.mark.parametrize("preset", ["lmetric", "random", "p2c"])
def test_random_choice_is_even_over_the_eligible(preset):
    table = make_table(6)
    block(table, 1, 4)
    ranks = chosen(make_policy(table, PolicySettings(preset=preset), seed=4), 4000)
    assert chi_square(ranks, [0, 2, 3, 5]) < CHI_SQUARE_P_001[3]


@pytest.mark.parametrize("cost", ["in_flight", "in_flight * 1.0"])
def test_random_ties_among_some(cost):
    table = make_table(8)
    for rank in (0, 2, 5, 7):
        charge(table, rank)
    policy = make_policy(table, PolicySettings(cost=cost), seed=5)
    ranks = chosen(policy, 4000)
    assert chi_square(ranks, [1, 3, 4, 6]) < CHI_SQUARE_P_001[3]
    assert decide(policy).ties == 4


@pytest.mark.parametrize("preset", ["smg", "vllm"])
def test_a_cold_burst_rotates(preset):
    table = make_table(4)
    policy = make_policy(table, PolicySettings(preset=preset))
    ranks = []
    for _ in range(8):
        ranks.append(decide(policy).rank)
        charge(table, ranks[-1])
    assert ranks == [0, 1, 2, 3, 0, 1, 2, 3]


def test_rotation_moves_on_with_each_unpinned_decision_only():
    table = make_table(4)
    policy = make_policy(table, PolicySettings(cost="in_flight", tie_break="rotate"))
    assert chosen(policy, 2) == [0, 1]
    assert decide(policy, pinned_rank=0).rank == 0
    assert chosen(policy, 1) == [2]
    for rank in (0, 1, 2):
        charge(table, rank)
    assert decide(policy).rank == 3  # no tie, and yet the scan moves on
    table.in_flight[:] = [0] * 4
    assert chosen(policy, 5) == [0, 1, 2, 3, 0]


def test_rotation_skips_ranks_that_are_not_eligible():
    table = make_table(4)
    block(table, 1)
    policy = make_policy(table, PolicySettings(cost="in_flight", tie_break="rotate"))
    assert chosen(policy, 5) == [0, 2, 2, 3, 0]


def test_first():
    table = make_table(4)
    policy = make_policy(table, PolicySettings(cost="in_flight", tie_break="first"))
    assert chosen(policy, 3) == [0, 0, 0]
    block(table, 0)
    assert chosen(policy, 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("tolerance", "costs", "ties"),
    [
        (TieTolerance(), [1.0, 1.0 + 1e-12, 1.1], 2),
        (TieTolerance(), [10**12, 10**12 + 500, 10**12 + 1500], 2),
        (TieTolerance(), [-(10**12), -(10**12) + 500, 0], 2),
        (TieTolerance(), [5, 6, 7], 1),
        (TieTolerance(), [5, 5, 7], 2),
        (TieTolerance(), [5, 5, 5], 3),
        (TieTolerance(relative=0.0), [1.0, 1.0 + 1e-12, 1.1], 1),
        (TieTolerance(relative=0.0), [10**12, 10**12, 10**12 + 1], 2),
        (TieTolerance(relative=0.1), [100, 110, 111], 2),
        (TieTolerance(relative=0.1), [-100, -91, -80], 2),
        (TieTolerance(absolute=2), [5, 7, 8], 2),
        (TieTolerance(relative=0.1, absolute=2), [100, 110, 111], 2),
        (TieTolerance(relative=0.1, absolute=20), [100, 110, 121], 2),
        (TieTolerance(), [0, 0.0, 1], 2),
    ],
)
@pytest.mark.parametrize("objective", ["min", "max"])
@pytest.mark.parametrize("is_everyone", [True, False])
def test_tolerance(tolerance, costs, ties, objective, is_everyone):
    table = make_table(3 if is_everyone else 4)
    if not is_everyone:
        block(table, 3)
    sign = 1 if objective == "min" else -1
    for rank, cost in enumerate(costs):
        table.queued_tokens[rank] = sign * cost
    # Whole-number formulas have a path of their own; the columns hold integers in real life.
    cost = "queued_tokens" if all(isinstance(cost, int) for cost in costs) else "queued_tokens * 1.0"
    policy = make_policy(table, PolicySettings(cost=cost, objective=objective, tie_tolerance=tolerance))
    found = set()
    for _ in range(60):
        decision = decide(policy)
        assert decision.ties == ties
        found.add(decision.rank)
    assert found == set(range(ties))
    assert decision.costs[:3] == [sign * cost for cost in costs]  # left as the formula gave them


def test_max_takes_the_largest_and_shuns_faults():
    table = make_table(3)
    table.in_flight[:] = [0, 4, 2]
    settings = PolicySettings(cost="in_flight if in_flight else 1 / in_flight", objective="max")
    policy = make_policy(table, settings)
    decision = decide(policy)
    assert decision.rank == 1
    assert decision.costs == [-inf, 4, 2]
    assert policy.non_finite_costs == 1


@pytest.mark.parametrize("objective", ["min", "max"])
@pytest.mark.parametrize("is_everyone", [True, False])
@pytest.mark.parametrize("picker", ["argmin", "p2c"])
def test_without_any_cost_the_least_in_flight_is_taken(objective, is_everyone, picker):
    table = make_table(2 if is_everyone else 3)
    table.in_flight[:2] = [3, 1]
    if not is_everyone:
        block(table, 2)
    policy = make_policy(table, PolicySettings(cost="1 / (waiting - waiting)", objective=objective, picker=picker))
    assert decide(policy).rank == 1
    assert policy.all_non_finite == 1
    assert policy.non_finite_costs == 2


def test_nan_never_wins():
    table = make_table(3)
    for rank in (0, 2):
        report(table, rank)  # the others have an infinite age, and inf - inf is NaN
    policy = make_policy(table, PolicySettings(cost="snapshot_age_ms - snapshot_age_ms + in_flight + 1"))
    assert set(chosen(policy, 50)) == {0, 2}
    assert decide(policy).costs == [1, inf, 1]
    assert policy.all_non_finite == 0


def test_round_robin_continues_behind_the_last():
    table = make_table(4)
    policy = make_policy(table, PolicySettings(preset="round_robin"))
    assert chosen(policy, 3) == [0, 1, 2]
    block(table, 3, 0)
    assert chosen(policy, 3) == [1, 2, 1]
    assert decide(policy, pinned_rank=2).rank == 2
    table.is_blocked[:] = [False] * 4
    for rank in range(4):
        table.refresh(rank)
    assert chosen(policy, 5) == [2, 3, 0, 1, 2]
    assert decide(policy).costs is None


def test_p2c_evaluates_the_pair_only():
    table = make_table(8)
    table.in_flight[:] = [7, 6, 5, 4, 3, 2, 1, 0]
    policy = make_policy(table, PolicySettings(preset="p2c"))
    pairs = Counter()
    for _ in range(4000):
        decision = decide(policy)
        pair = tuple(rank for rank, cost in enumerate(decision.costs) if not isnan(cost))
        assert len(pair) == 2
        assert decision.rank == pair[1]
        pairs[pair] += 1
    assert len(pairs) == 28
    expected = 4000 / 28
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 55.5  # 27 degrees, 0.1 %


def test_p2c_with_few_eligible():
    table = make_table(3)
    table.in_flight[:] = [2, 1, 0]
    block(table, 2)
    policy = make_policy(table, PolicySettings(preset="p2c"))
    assert chosen(policy, 20) == [1] * 20
    block(table, 1)
    assert chosen(policy, 3) == [0] * 3


COSTS = ("in_flight", "in_flight * 0.5 + 0.0", "1 / in_flight", "-in_flight * 1.0", "in_flight + 1e308 * 1.5")


@settings(max_examples=300)
@given(
    loads=st.lists(st.integers(0, 3), min_size=2, max_size=14),
    out=st.sets(st.integers(0, 13)),
    cost=st.sampled_from(COSTS),
    objective=st.sampled_from(["min", "max"]),
    tie_break=st.sampled_from(["first", "rotate", "random"]),
    relative=st.sampled_from([0.0, 0.01, 10.0]),
    seed=st.integers(0, 9),
)
def test_a_list_of_eligible_ranks_that_comes_again_changes_nothing(
    loads, out, cost, objective, tie_break, relative, seed
):
    table = make_table(len(loads))
    for rank, load in enumerate(loads):
        for _ in range(load):
            charge(table, rank)
    options = PolicySettings(
        cost=cost, objective=objective, tie_break=tie_break, tie_tolerance=TieTolerance(relative=relative)
    )
    same, fresh = (make_policy(table, options, seed=seed)._picker for _ in range(2))
    eligible = [rank for rank in range(len(loads)) if rank not in out] or [0]
    request = (0.0, 10, 0, 10, 10, 0, 0.0)
    for _ in range(4):
        rank, ties, costs = same.pick(request, eligible)
        assert (rank, ties, costs) == fresh.pick(request, [*eligible])
        assert rank in eligible
        assert ties <= len(eligible)
