"""The whole choice: filters before every picker, pins, balance, determinism, dry runs."""

from math import isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Filters
from gateway.config.schema import Policy as PolicySettings
from gateway.core.errors import Reason
from gateway.core.events import RankLost
from gateway.core.formula import FormulaError
from gateway.core.presets import PolicyError
from gateway.core.ranks import RankState
from tests.support.core import Bench
from tests.support.policies import charge, make_policy, make_table, report
from tests.support.states import PRESETS, any_policy, shaken

COUNTING = ["lmetric", "smg", "vllm", "least_in_flight"]


def decide(policy, **options):
    return policy.decide(5.0, **{"prompt_tokens": 10, "max_tokens": 10, **options})


# ---- balance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("preset", [*COUNTING, "vllm_4w_r", "round_robin"])
def test_a_burst_on_silent_ranks_is_even(preset, ranks):
    table = make_table(ranks)
    policy = make_policy(table, PolicySettings(preset=preset))
    for _ in range(512):
        charge(table, decide(policy).rank, prompt_tokens=10)
    assert sum(table.in_flight) == 512
    assert max(table.in_flight) - min(table.in_flight) <= 1


def test_lmetric_weighs_tokens_where_counting_does_not():
    table = make_table(2)
    charge(table, 0, prompt_tokens=10_000)
    charge(table, 1, prompt_tokens=1000)
    charge(table, 1, prompt_tokens=1000)
    assert decide(make_policy(table)).rank == 1
    assert decide(make_policy(table, PolicySettings(preset="least_in_flight"))).rank == 0


@pytest.mark.parametrize("preset", ["smg", "vllm"])
def test_an_emptied_rank_is_preferred_to_a_busy_one(preset):
    table = make_table(2)
    charge(table, 1)
    report(table, 0, running=0, waiting=0, kv=0.75)  # as the clamp leaves it
    report(table, 1, running=1, waiting=0, kv=0.1)
    policy = make_policy(table, PolicySettings(preset=preset))
    assert [decide(policy).rank for _ in range(3)] == [0, 0, 0]


# ---- filters come first -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_filters_apply_to_every_preset(preset):
    table = make_table(5)
    table.state[0] = RankState.LOST
    table.is_blocked[1] = True
    table.in_flight[2] = table.max_in_flight[2]
    charge(table, 3)
    report(table, 3, kv=0.97)
    for rank in range(5):
        table.refresh(rank)
    policy = make_policy(table, PolicySettings(preset=preset))
    for _ in range(20):
        decision = decide(policy)
        assert decision.rank == 4
        assert decision.eligible == 1
        assert decision.reasons() == ["lost", "blocked", "full", "kv_usage", "eligible"]


@pytest.mark.parametrize("preset", PRESETS)
def test_soft_filter_is_relaxed_only_without_another_rank(preset):
    table = make_table(2)
    for rank in range(2):
        charge(table, rank)
        report(table, rank, kv=0.97)
    policy = make_policy(table, PolicySettings(preset=preset))
    decision = decide(policy)
    assert decision.rank is not None
    assert decision.relaxed == ("kv_usage",)
    assert decision.reasons() == ["eligible", "eligible"]
    report(table, 1, kv=0.5)
    decision = decide(policy)
    assert (decision.rank, decision.relaxed) == (1, ())


@pytest.mark.parametrize("preset", COUNTING)
def test_an_idle_rank_with_a_full_snapshot_gets_work(preset):
    table = make_table(2)
    report(table, 0, kv=0.98)
    charge(table, 1)
    report(table, 1, kv=0.97)
    assert decide(make_policy(table, PolicySettings(preset=preset))).rank == 0


def test_kv_fit_follows_the_settings():
    table = make_table(1)
    charge(table, 0, prompt_tokens=199_000)
    assert decide(make_policy(table), prompt_tokens=2000).refusal is Reason.KV_FULL
    soft = decide(make_policy(table, filters=Filters(kv_fit="soft")), prompt_tokens=2000)
    assert (soft.rank, soft.relaxed) == (0, ("kv_fit",))
    off = decide(make_policy(table, filters=Filters(kv_fit="off")), prompt_tokens=2000)
    assert (off.rank, off.relaxed) == (0, ())


@pytest.mark.parametrize("preset", PRESETS)
def test_nobody_is_eligible(preset):
    table = make_table(3)
    for rank in range(3):
        table.is_blocked[rank] = True
        table.refresh(rank)
    decision = decide(make_policy(table, PolicySettings(preset=preset)))
    assert decision.rank is None
    assert decision.costs is None
    assert (decision.eligible, decision.ties) == (0, 0)
    assert decision.refusal is Reason.RANKS_FULL


# ---- pins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pin_is_honoured_whatever_the_cost(preset):
    table = make_table(4)
    for _ in range(50):
        charge(table, 2)
    policy = make_policy(table, PolicySettings(preset=preset))
    decision = decide(policy, pinned_rank=2)
    assert (decision.rank, decision.pinned, decision.eligible, decision.ties) == (2, 2, 1, 1)
    assert decision.reasons() == ["not_pinned", "not_pinned", "eligible", "not_pinned"]
    if decision.costs is not None:
        assert [isnan(cost) for cost in decision.costs] == [True, True, False, True]


def test_a_pin_to_a_lost_rank_goes_nowhere_else():
    table = make_table(2)
    table.state[1] = RankState.LOST
    table.refresh(1)
    decision = decide(make_policy(table), pinned_rank=1)
    assert decision.rank is None
    assert decision.refusal is Reason.PINNED_RANK_UNAVAILABLE
    assert decision.reasons() == ["not_pinned", "lost"]


# ---- request values -----------------------------------------------------------------------------


def test_request_values_reach_the_formula():
    policy = make_policy(
        make_table(1),
        PolicySettings(cost="new_tokens * 1000 + cached_tokens * 10 + max_tokens + priority + ranks + gateways"),
        gateways=2,
    )
    assert decide(policy, prompt_tokens=9, cached_tokens=4, max_tokens=7, priority=-2).costs == [5048]
    assert decide(policy, prompt_tokens=9, cached_tokens=9).costs[0] // 1000 == 1


def test_coupled_reaches_the_formula():
    table = make_table(1)
    settings = PolicySettings(cost="1 if coupled else 2")
    assert decide(make_policy(table, settings, coupled=True)).costs == [1]
    assert decide(make_policy(table, settings)).costs == [2]


@pytest.mark.parametrize(
    ("settings", "error"), [(PolicySettings(cost="nope"), FormulaError), (PolicySettings(), PolicyError)]
)
def test_bad_settings_are_refused(settings, error):
    with pytest.raises(error):
        make_policy(make_table(1), settings)


# ---- properties ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(any_policy(), st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([1, 1000, 150_000, 10**6]))
def test_never_an_ineligible_rank_and_always_one_if_there_is_any(policy_settings, seed, ranks, prompt):
    table = shaken(seed, ranks)
    policy = make_policy(table, policy_settings, seed=seed)
    for _ in range(4):
        decision = decide(policy, prompt_tokens=prompt)
        reasons = decision.reasons()
        assert decision.eligible == reasons.count("eligible")
        if decision.rank is None:
            assert "eligible" not in reasons
            assert decision.refusal is not None
            return
        assert reasons[decision.rank] == "eligible"
        assert table.is_open[decision.rank]
        assert decision.refusal is None
        assert 1 <= decision.ties <= decision.eligible
        charge(table, decision.rank)


@settings(deadline=None)
@given(any_policy(), st.integers(0, 10**6), st.integers(1, 9))
def test_the_same_seed_gives_the_same_decisions(policy_settings, seed, ranks):
    def play(dry_runs):
        table = shaken(seed, ranks)
        policy = make_policy(table, policy_settings, seed=seed)
        chosen = []
        for _ in range(8):
            if dry_runs:
                with policy.dry_run():
                    decide(policy)
                    decide(policy)
            decision = decide(policy)
            chosen.append(decision.rank)
            if decision.rank is not None:
                charge(table, decision.rank)
        return chosen, policy.non_finite_costs, policy.all_non_finite

    assert play(dry_runs=False) == play(dry_runs=True)


@settings(deadline=None)
@given(any_policy(), st.integers(0, 10**6), st.integers(1, 9), st.data())
def test_pins_are_honoured_or_refused(policy_settings, seed, ranks, data):
    table = shaken(seed, ranks)
    policy = make_policy(table, policy_settings)
    pin = data.draw(st.integers(0, ranks - 1))
    decision = decide(policy, pinned_rank=pin)
    assert decision.rank in (pin, None)
    assert (decision.rank is None) == (decision.refusal is not None)
    assert decision.rank == pin or not table.is_open[pin]


@pytest.mark.parametrize("cost", ["in_flight", "in_flight * kv_usage + fleet_mean(waiting)", "1 / in_flight"])
def test_deciding_changes_nothing_in_the_table(cost):
    table = shaken(11, 6)
    before = {name: list(value) for name, value in vars(table).items() if isinstance(value, list)}
    policy = make_policy(table, PolicySettings(cost=cost))
    decide(policy)
    decide(policy, pinned_rank=2)
    assert {name: value for name, value in vars(table).items() if isinstance(value, list)} == before


@pytest.mark.parametrize(("preset", "has_costs"), [("lmetric", True), ("random", False)])
def test_displayed_costs_cover_ranks_that_are_not_eligible_and_leave_no_trace(preset, has_costs):
    bench = Bench(2, policy={"preset": preset})
    bench.send(RankLost(1, 1, "test"))
    views = bench.router.rank_views(bench.now)
    assert [view.cost is not None for view in views] == [has_costs, has_costs]
    assert bench.router.decisions.latest(1) == []
    assert bench.router.counters.decisions == [0, 0]
