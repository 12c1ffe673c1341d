"""Late binding: a sequence is kept back for a rank that costs far less, and the caller can overrule it."""

from math import inf

import pytest

from gateway.config.schema import Policy as PolicySettings
from gateway.core.decisions import Decision
from gateway.core.policy import Held
from tests.support.gates import block, decide, gate_of, loaded
from tests.support.policies import make_policy


def costing(*costs, objective=None, picker=None):
    """A policy whose ranks cost what is said, and all have one request in flight."""
    table = loaded(*[1] * len(costs))
    table.queued_tokens[:] = costs
    return table, make_policy(table, PolicySettings(cost="queued_tokens", objective=objective, picker=picker))


@pytest.mark.parametrize("picker", ["argmin", "p2c"])
@pytest.mark.parametrize(
    ("costs", "closed", "ratio", "held"),
    [
        ([69, 100, 200], (0,), 0.7, (0,)),
        ([70, 100, 200], (0,), 0.7, None),
        ([99, 100, 200], (0,), 1.0, (0,)),
        ([100, 100, 200], (0,), 1.0, None),
        ([10, 100, 20], (0, 2), 0.7, (0, 2)),
        ([10, 100, 90], (0, 2), 0.7, (0,)),
        ([1, 100, 200], (0,), 0.0, None),
        ([1, 100, 200], (), 0.7, None),
        ([0, 100, 200], (0,), 0.7, (0,)),
        ([-5, 100, 200], (0,), 0.7, (0,)),
        ([-5, 0, 200], (0,), 0.7, None),
        ([-8, -10, 200], (0,), 0.7, None),
        ([-20, -10, 200], (0,), 0.7, None),
    ],
)
def test_it_is_held_for_a_closed_rank_that_costs_far_less(picker, costs, closed, ratio, held):
    table, policy = costing(*costs, picker=picker)
    found = decide(policy, gate_of(table, *closed), hold_ratio=ratio)
    if held is None:
        assert isinstance(found, Decision)
        assert found.rank not in closed
    else:
        best = min((rank for rank in range(3) if rank not in closed), key=lambda rank: costs[rank])
        assert found == Held(held, best, is_idle=False)
        assert decide(policy, gate_of(table, *closed), hold_ratio=0.0).rank is not None


@pytest.mark.parametrize(
    ("costs", "held"),
    [([150, 100, 50], (0,)), ([140, 100, 50], None), ([1, 0, -5], None), ([-1, -10, -20], None)],
)
def test_where_the_largest_wins_it_is_held_for_one_that_is_far_larger(costs, held):
    table, policy = costing(*costs, objective="max")
    found = decide(policy, gate_of(table, 0), hold_ratio=0.7)
    assert (found.ranks if isinstance(found, Held) else None) == held


def test_it_is_held_for_a_rank_that_lacks_room_too():
    table, policy = costing(10, 100, 200)
    found = decide(policy, gate_of(table), hold_ratio=0.7, kv_fits=lambda rank, _: rank > 0)
    assert found == Held((0,), 1, is_idle=False)


def test_it_is_not_held_for_a_rank_that_is_not_eligible():
    table, policy = costing(10, 100, 200)
    block(table, 0)
    assert decide(policy, gate_of(table, 0), hold_ratio=0.7).rank == 1


@pytest.mark.parametrize("idle", [1, 2])
def test_the_caller_learns_that_a_rank_would_be_left_idle(idle):
    table, policy = costing(10, 100, 200)
    table.in_flight[idle] = 0
    assert decide(policy, gate_of(table, 0), hold_ratio=0.7) == Held((0,), 1, is_idle=True)
    assert decide(policy, gate_of(table, 0, 1, 2), hold_ratio=0.7) is None


@pytest.mark.parametrize(("floor", "is_held"), [(10, True), (90, False)])
def test_aggregates_look_at_all_eligible_ranks_when_it_may_be_held(floor, is_held):
    table = loaded(1, 1, 1, 1)
    table.queued_tokens[:] = [floor, 100, 200, 0]
    block(table, 3)
    policy = make_policy(table, PolicySettings(cost="queued_tokens - fleet_min(queued_tokens) + 10"))
    found = decide(policy, gate_of(table, 0), hold_ratio=0.4)
    assert isinstance(found, Held) is is_held
    if not is_held:
        assert found.costs[:3] == [10, 20, 120]


def test_a_formula_that_fails_for_the_passing_ranks_holds_nothing():
    table = loaded(1, 0)
    policy = make_policy(table, PolicySettings(cost="1 / in_flight"))
    decision = decide(policy, gate_of(table, 0), hold_ratio=0.7)
    assert (decision.rank, decision.costs) == (1, [1.0, inf])


@pytest.mark.parametrize("preset", ["random", "round_robin"])
def test_without_costs_nothing_is_held(preset):
    table = loaded(0, 5)
    decision = decide(make_policy(table, PolicySettings(preset=preset)), gate_of(table, 0), hold_ratio=1.0)
    assert (decision.rank, decision.costs) == (1, None)


@pytest.mark.parametrize("picker", ["argmin", "p2c"])
def test_holding_leaves_no_trace(picker):
    settings = PolicySettings(cost="queued_tokens if in_flight else 1 / in_flight", picker=picker, tie_break="rotate")
    table = loaded(1, 1, 1, 0)
    table.queued_tokens[:] = [1, 100, 100, 0]
    policy, fresh = make_policy(table, settings), make_policy(table, settings)
    for _ in range(3):
        assert isinstance(decide(policy, gate_of(table, 0), hold_ratio=0.5), Held)
    assert (policy.non_finite_costs, policy.all_non_finite) == (0, 0)
    assert [decide(policy, gate_of(table)).rank for _ in range(6)] == [
        decide(fresh, gate_of(table)).rank for _ in range(6)
    ]
