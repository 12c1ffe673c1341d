"""Running a formula: faults of one rank stay with that rank; aggregates over the eligible ranks."""

import math

import pytest

from gateway.core.costing import CostFunction
from gateway.core.formula import compile_cost
from tests.support.policies import make_table, report

REQUEST = (10.0, 100, 40, 60, 7, 3, 12.5)


def cost_function(text, table, **options):
    return CostFunction(compile_cost(text), table, **{"gateways": 2, "coupled": True, **options})


def loaded(*in_flight):
    table = make_table(len(in_flight))
    table.in_flight[:] = in_flight
    return table


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("12 / in_flight", [0]),
        ("log(in_flight)", [0]),
        ("sqrt(in_flight - 2)", [0, 1]),
        ("exp(in_flight * 300)", [3]),
        ("pow(in_flight - 1, 0.5)", [0]),
        ("(in_flight * 1e200) ^ 2", [1, 2, 3]),
        ("in_flight * 1e308 - in_flight * 1e308", [2, 3]),
        ("12 / in_flight if in_flight < 2 else 1", [0]),
    ],
)
def test_a_rank_without_a_cost_gets_the_worst(text, bad):
    table = loaded(0, 1, 2, 3)
    cost = cost_function(text, table)
    costs = cost.all_ranks(REQUEST, None)
    assert [rank for rank, value in enumerate(costs) if value == math.inf] == bad
    assert all(math.isfinite(value) for rank, value in enumerate(costs) if rank not in bad)
    assert cost.non_finite == len(bad)
    assert cost.some_ranks(REQUEST, None, range(4)) == costs
    worst = cost_function(text, table, is_maximised=True).all_ranks(REQUEST, None)
    assert [rank for rank, value in enumerate(worst) if value == -math.inf] == bad


def test_only_eligible_ranks_are_counted():
    cost = cost_function("1 / in_flight", loaded(0, 0, 1))
    assert cost.all_ranks(REQUEST, [1, 2]) == [math.inf, math.inf, 1.0]
    assert cost.non_finite == 1


def test_infinite_variables_are_faults_too():
    table = make_table(2)
    report(table, 1, at=9.0)
    cost = cost_function("snapshot_age_ms", table)
    assert cost.all_ranks(REQUEST, None) == [math.inf, 1000.0]
    assert cost.non_finite == 1


@pytest.mark.parametrize("text", ["min(snapshot_age_ms - snapshot_age_ms, 5)", "min(5, snapshot_age_ms * 0)"])
def test_nan_does_not_hide_behind_an_argument_order(text):
    table = make_table(2)
    report(table, 1, at=10.0)
    assert cost_function(text, table).all_ranks(REQUEST, None) == [math.inf, 0.0]


def test_negative_costs_are_legal():
    assert cost_function("-in_flight", loaded(3, 4)).all_ranks(REQUEST, None) == [-3, -4]


def test_a_sum_that_overflows_costs_nothing():
    cost = cost_function("in_flight * 1e308", loaded(1, 1, 0))
    assert cost.all_ranks(REQUEST, None) == [1e308, 1e308, 0.0]
    assert cost.non_finite == 0


def test_integers_beyond_the_floats_are_faults():
    text = "*".join(["queued_tokens"] * 20)
    table = make_table(2)
    table.queued_tokens[:] = [10**20, 1]
    cost = cost_function(text, table)
    assert cost.all_ranks(REQUEST, None) == [math.inf, 1]
    assert cost.non_finite == 1


def test_fleet_constants_and_request_values():
    table = make_table(3)
    text = "ranks * 100 + gateways * 10 + coupled"
    assert cost_function(text, table).all_ranks(REQUEST, None) == [321] * 3
    assert cost_function(text, table, gateways=1, coupled=False).all_ranks(REQUEST, None) == [310] * 3
    text = "prompt_tokens * 1000 + cached_tokens * 100 + new_tokens * 10 + max_tokens + priority / 10"
    assert cost_function(text, table).all_ranks(REQUEST, None) == [104607.3] * 3
    assert cost_function("prefill_ms", table).all_ranks(REQUEST, None) == [12.5] * 3


def test_aggregates_see_eligible_ranks_only():
    table = loaded(8, 2, 4)
    text = "fleet_min(in_flight) + 10 * fleet_max(in_flight) + 100 * fleet_mean(in_flight)"
    assert cost_function(text, table).all_ranks(REQUEST, None) == pytest.approx([82 + 1400 / 3] * 3)
    assert cost_function(text, table).all_ranks(REQUEST, [1, 2]) == [2 + 40 + 300] * 3
    assert cost_function(text, table).some_ranks(REQUEST, [1, 2], [2])[2] == 2 + 40 + 300


def test_aggregates_nest():
    table = loaded(1, 2, 6)
    text = "fleet_max(abs(in_flight - fleet_mean(in_flight)) + fleet_min(in_flight)) + in_flight"
    assert cost_function(text, table).all_ranks(REQUEST, None) == [5, 6, 10]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("fleet_min(1 / in_flight)", 0.25), ("fleet_max(1 / in_flight)", 0.5), ("fleet_mean(1 / in_flight)", 0.375)],
)
def test_aggregates_leave_out_ranks_without_a_value(text, expected):
    assert cost_function(text, loaded(0, 2, 4)).all_ranks(REQUEST, None) == [expected] * 3
    cost = cost_function(text, loaded(0, 0))
    assert cost.all_ranks(REQUEST, None) == [math.inf] * 2
    assert cost.non_finite == 2


def test_only_the_asked_ranks_are_evaluated():
    cost = cost_function("1 / in_flight", loaded(0, 2, 0))
    costs = cost.some_ranks(REQUEST, None, [1])
    assert costs[1] == 0.5
    assert math.isnan(costs[0])
    assert math.isnan(costs[2])
    assert cost.non_finite == 0


def test_direct_is_offered_for_formulas_that_need_no_care():
    table = loaded(1, 2)
    direct = cost_function("in_flight + new_tokens", table).direct
    assert direct is not None
    assert direct(*REQUEST) == [61, 62]
    assert cost_function("1 / in_flight", table).direct is None
    assert cost_function("fleet_max(in_flight)", table).direct is None
