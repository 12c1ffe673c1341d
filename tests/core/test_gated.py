"""Late binding: who may be chosen behind gates, when a sequence waits, when it is held, and what is written down."""

from math import isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Policy as PolicySettings
from gateway.core.decisions import GATE_KV
from gateway.core.errors import Reason
from gateway.core.policy import Held
from gateway.core.ranks import RankState
from tests.support.gates import block, decide, gate_of, loaded
from tests.support.policies import make_policy, make_table, report
from tests.support.states import any_policy, shaken

PICKERS = [
    PolicySettings(cost="in_flight"),
    PolicySettings(cost="in_flight", tie_break="rotate"),
    PolicySettings(cost="in_flight", picker="p2c"),
    PolicySettings(cost="in_flight", objective="max"),
    PolicySettings(preset="random"),
    PolicySettings(preset="round_robin"),
]

# ---- who may be chosen --------------------------------------------------------------------------


@pytest.mark.parametrize("settings", PICKERS)
def test_only_open_ranks_with_room_are_chosen(settings):
    table = loaded(0, 1, 2, 1, 0)
    policy = make_policy(table, settings)
    asked = set()

    def fits(rank, prompt_tokens):
        asked.add((rank, prompt_tokens))
        return rank != 2

    for _ in range(40):
        assert decide(policy, gate_of(table, 0, 4), kv_fits=fits).rank in (1, 3)
    assert asked == {(1, 10), (2, 10), (3, 10)}, "only open ranks are asked"


@pytest.mark.parametrize("settings", PICKERS)
@pytest.mark.parametrize("eligible", [4, 3])
def test_with_every_gate_open_it_decides_like_the_immediate_way(settings, eligible):
    table = loaded(2, 0, 1, 0)
    block(table, *range(eligible, 4))
    gated, immediate = make_policy(table, settings), make_policy(table, settings)
    for _ in range(20):
        one = decide(gated, gate_of(table))
        other = immediate.decide(5.0, prompt_tokens=10, max_tokens=10)
        assert (one.rank, one.ties, one.eligible, one.codes) == (other.rank, other.ties, other.eligible, other.codes)
        assert str(one.costs) == str(other.costs)  # NaN is NaN here
        assert (one.gate, other.gate) == (bytes(4), None)


@pytest.mark.parametrize("settings", PICKERS)
def test_without_a_passing_rank_it_waits_and_leaves_no_trace(settings):
    table = loaded(0, 0, 0)
    policy = make_policy(table, settings)
    assert decide(policy, gate_of(table, 0, 1, 2)) is None
    assert decide(policy, gate_of(table), kv_fits=lambda *_: False) is None
    fresh = make_policy(table, settings)
    assert [decide(policy, gate_of(table)).rank for _ in range(5)] == [
        decide(fresh, gate_of(table)).rank for _ in range(5)
    ]


def test_costs_and_aggregates_look_at_all_eligible_ranks():
    table = loaded(0, 3, 5, 1)
    block(table, 3)
    policy = make_policy(table, PolicySettings(cost="in_flight - fleet_min(in_flight) + 10 * fleet_max(in_flight)"))
    decision = decide(policy, gate_of(table, 0, 2))
    assert decision.rank == 1
    assert decision.costs[:3] == [50, 53, 55]
    assert decision.reasons() == ["eligible", "eligible", "eligible", "blocked"]


def test_p2c_draws_its_pair_among_the_passing():
    table = loaded(0, 1, 2, 3)
    policy = make_policy(table, PolicySettings(preset="p2c"))
    pairs = set()
    for _ in range(60):
        decision = decide(policy, gate_of(table, 0))
        pairs.add(tuple(rank for rank, cost in enumerate(decision.costs) if not isnan(cost)))
    assert pairs == {(1, 2), (1, 3), (2, 3)}
    assert decide(policy, gate_of(table, 0, 1, 2)).rank == 3


def test_round_robin_goes_on_behind_the_last_chosen():
    policy = make_policy(make_table(4), PolicySettings(preset="round_robin"))
    gates = [bytes([1, 0, 0, 0]), bytes([0, 0, 1, 0]), bytes(4), bytes(4)]
    assert [decide(policy, gate).rank for gate in gates] == [1, 3, 0, 1]


def test_faults_of_the_formula_fall_back_to_the_least_in_flight_of_the_passing():
    table = loaded(0, 3, 1, 2)
    policy = make_policy(table, PolicySettings(cost="1 / (waiting - waiting)"))
    assert decide(policy, gate_of(table, 0, 2)).rank == 3
    assert policy.all_non_finite == 1
    assert policy.non_finite_costs == 4, "of all eligible ranks"


# ---- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", PICKERS)
def test_without_an_eligible_rank_it_is_refused_whatever_the_gates(settings):
    table = loaded(0, 0)
    block(table, 0, 1)
    decision = decide(make_policy(table, settings), gate_of(table, 0), hold_ratio=0.7)
    assert (decision.rank, decision.refusal, decision.gate) == (None, Reason.RANKS_FULL, None)
    too_long = decide(make_policy(table, settings), gate_of(table, 0, 1), prompt_tokens=10**6)
    assert too_long.refusal is Reason.PROMPT_TOO_LONG


def test_a_soft_filter_is_not_relaxed_because_gates_are_closed():
    table = loaded(1, 1)
    report(table, 0, kv=0.97)
    policy = make_policy(table)
    assert decide(policy, gate_of(table, 1)) is None, "rank 1 will open"
    report(table, 1, kv=0.97)
    decision = decide(policy, gate_of(table, 1))
    assert (decision.rank, decision.relaxed) == (0, ("kv_usage",))


def test_ineligible_ranks_are_not_asked_for_room():
    table = loaded(0, 0)
    block(table, 0)
    decision = decide(make_policy(table), gate_of(table), kv_fits=lambda rank, _: rank == 1 or 1 / 0)
    assert decision.rank == 1


# ---- pins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", PICKERS)
def test_a_pin_waits_for_its_own_rank(settings):
    table = loaded(0, 9, 0)
    policy = make_policy(table, settings)
    assert decide(policy, gate_of(table, 1), pinned_rank=1) is None
    assert decide(policy, gate_of(table), pinned_rank=1, kv_fits=lambda *_: False) is None
    decision = decide(policy, gate_of(table, 0, 2), pinned_rank=1, hold_ratio=0.9)
    assert (decision.rank, decision.pinned, decision.eligible, decision.ties) == (1, 1, 1, 1)
    table.state[1] = RankState.LOST
    table.refresh(1)
    lost = decide(policy, gate_of(table), pinned_rank=1)
    assert (lost.rank, lost.refusal) == (None, Reason.PINNED_RANK_UNAVAILABLE)


# ---- the record ---------------------------------------------------------------------------------


def test_the_record_shows_each_gate_and_who_lacked_room():
    table = loaded(0, 1, 1, 1)
    decision = decide(make_policy(table), bytes([0, 2, 4, 0]), kv_fits=lambda rank, _: rank != 3)
    assert decision.gate == bytes([0, 2, 4, GATE_KV])
    assert decision.gates() == ["open", "in_flight", "batches", "kv"]
    assert [row["gate"] for row in decision.render()["ranks"]] == decision.gates()


def test_request_values_reach_formula_and_record():
    policy = make_policy(make_table(2), PolicySettings(cost="new_tokens + max_tokens * 100 + priority + prefill_ms"))
    decision = decide(
        policy, bytes(2), prompt_tokens=9, cached_tokens=9, max_tokens=2, priority=-3, prefill_ms=0.5, label="x"
    )
    assert decision.costs == [198.5, 198.5]
    assert decision.request == (5.0, 9, 9, 1, 2, -3, 0.5)
    assert (decision.at, decision.label) == (5.0, "x")


# ---- properties ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(any_policy(), st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([0.0, 0.7, 1.0]), st.data())
def test_it_never_chooses_behind_a_gate_and_never_waits_for_nothing(policy_settings, seed, ranks, ratio, data):
    table = shaken(seed, ranks)
    gate = bytes(data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=ranks, max_size=ranks)))
    room = data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks))
    pin = data.draw(st.one_of(st.none(), st.integers(0, ranks - 1)))
    policy = make_policy(table, policy_settings)
    immediate = make_policy(table, policy_settings).decide(5.0, prompt_tokens=10, max_tokens=10, pinned_rank=pin)
    found = decide(policy, gate, kv_fits=lambda rank, _: room[rank], hold_ratio=ratio, pinned_rank=pin)
    eligible = [rank for rank, reason in enumerate(immediate.reasons()) if reason == "eligible"]
    passing = [rank for rank in eligible if not gate[rank] and room[rank]]
    if not eligible:
        assert (found.rank, found.refusal) == (None, immediate.refusal)
    elif not passing:
        assert found is None
    elif isinstance(found, Held):
        assert ratio > 0
        assert pin is None
        assert found.best in passing
        assert found.ranks
        assert set(found.ranks) <= set(eligible) - set(passing)
        assert found.is_idle == any(not table.in_flight[rank] for rank in passing)
    else:
        assert found.rank in passing
        assert found.codes == immediate.codes
        assert 1 <= found.ties <= len(passing)
        assert [name == "open" for rank, name in enumerate(found.gates()) if rank in eligible] == [
            rank in passing for rank in eligible
        ]
