"""What predicted and measured times look like in a formula; `test_formula.py` has the other variables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Policy as PolicySettings
from gateway.core.rank_row import RankRow
from gateway.core.ranks import RankTable
from gateway.core.variables import HEAD_CREDIT_US_PER_S, VARIABLES
from tests.support.core import make_config
from tests.support.policies import make_policy

NOW = 1000.0


def make_table(*rows, gateways=1):
    table = RankTable(make_config(len(rows), gateways=gateways))
    for rank, row in enumerate(rows):
        table.restore(RankRow(rank=rank, **row), NOW, 4096)
    return table


def values(text, table, **options):
    policy = make_policy(table, PolicySettings(cost=text))
    decision = policy.decide(NOW, **{"prompt_tokens": 10, "max_tokens": 10, **options})
    assert [row.get(text, cost) for row, cost in zip(decision.variables(), decision.costs, strict=True)] == (
        decision.costs
    ), "the record shows what the cost saw"
    return decision.costs


def queued_ms(*, gateways=1, **row):
    return values("queued_ms", make_table(row, gateways=gateways))[0]


@pytest.mark.parametrize(
    ("age_ms", "expected"),
    [(0, 130.0), (20, 120.0), (199, 30.5), (200, 30.0), (201, 30.0), (1e6, 30.0)],
)
def test_half_of_the_heads_time_counts_as_done_up_to_its_prediction(age_ms, expected):
    row = {"pending_ms": 130.0, "head_ms": 100.0, "head_age_ms": age_ms}
    assert queued_ms(**row) == pytest.approx(expected, abs=1e-3)


def test_an_overrunning_head_takes_nothing_off_what_waits_behind_it():
    assert queued_ms(pending_ms=400.0, head_ms=100.0, head_age_ms=500.0) >= 300.0
    assert queued_ms(pending_ms=400.0, head_ms=100.0, head_age_ms=1e7) == 300.0


def test_the_head_itself_is_never_less_than_nothing():
    assert queued_ms(pending_ms=100.0, head_ms=100.0, head_age_ms=1e7) == 0.0


@pytest.mark.parametrize("age_ms", [0, 100, 1e6])
def test_with_other_gateways_on_the_ranks_no_time_counts_as_done(age_ms):
    assert queued_ms(gateways=2, pending_ms=130.0, head_ms=100.0, head_age_ms=age_ms) == 130.0


def test_a_rank_with_nothing_unstarted_has_nothing_queued():
    assert values("queued_ms", make_table({"in_flight": 3, "in_flight_decode": 3}, {})) == [0.0, 0.0]


def test_the_bound_of_the_credit_is_the_one_of_the_research():
    assert HEAD_CREDIT_US_PER_S == 0.5 * 1e6


@settings(deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([1, 4])
)
def test_more_queued_work_never_costs_less(head_us, behind_us, more_us, age_us, gateways):
    row = {"head_ms": head_us / 1e3, "head_age_ms": age_us / 1e3}
    less = queued_ms(gateways=gateways, pending_ms=(head_us + behind_us) / 1e3, **row)
    more = queued_ms(gateways=gateways, pending_ms=(head_us + behind_us + more_us) / 1e3, **row)
    assert more == pytest.approx(less + more_us / 1e3, abs=1e-6)
    assert behind_us / 1e3 - 1e-6 <= less <= (head_us + behind_us) / 1e3 + 1e-6
    later = queued_ms(
        gateways=gateways, pending_ms=(head_us + behind_us) / 1e3, head_ms=head_us / 1e3, head_age_ms=age_us / 1e3 + 1
    )
    assert later <= less + 1e-9, "time only takes off"


def test_measured_times():
    table = make_table({"step_ms": 12.5, "mean_out_tokens": 40.5}, {})
    assert values("step_ms", table) == [12.5, 0.0], "0 when unknown"
    assert values("mean_out_tokens", table) == [40.5, 128.0]


def test_the_requests_own_prefill():
    table = make_table({}, {})
    assert values("prefill_ms", table, prefill_ms=7.25) == [7.25, 7.25]
    assert values("prefill_ms", table) == [0.0, 0.0], "0 when nobody said so"


@pytest.mark.parametrize("name", ["queued_ms", "prefill_ms", "step_ms", "mean_out_tokens"])
def test_times_are_no_whole_numbers_to_the_tie_break(name):
    assert not VARIABLES[name].is_integer
