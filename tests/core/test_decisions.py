"""Decision records: what they keep, how they read, and the ring that holds the latest."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Policy as PolicySettings
from gateway.core.decisions import DecisionRing
from gateway.core.ranks import RankState
from tests.support.policies import charge, make_policy, make_table, report


def some_decision(**options):
    return make_policy(make_table(2)).decide(1.5, **{"prompt_tokens": 7, "max_tokens": 9, "label": "r1", **options})


def test_a_record_keeps_the_state_of_its_moment():
    table = make_table(2)
    charge(table, 0, prompt_tokens=50)
    decision = make_policy(table).decide(1.5, prompt_tokens=7, max_tokens=9, label="r1")
    charge(table, 0, prompt_tokens=999)
    charge(table, 1, prompt_tokens=999)
    assert (decision.at, decision.label, decision.picker) == (1.5, "r1", "argmin")
    assert decision.formula == "(queued_tokens + new_tokens) * (in_flight + 1)"
    assert decision.rank == 1
    assert decision.costs == [114, 7]
    assert decision.variables() == [{"queued_tokens": 50, "in_flight": 1}, {"queued_tokens": 0, "in_flight": 0}]
    assert decision.reasons() == ["eligible", "eligible"]


def test_render():
    table = make_table(3)
    charge(table, 1)
    report(table, 1, running=1, waiting=2, kv=0.75, at=1.0)
    table.state[2] = RankState.LOST
    table.refresh(2)
    policy = make_policy(table, PolicySettings(cost="kv_usage / reported_waiting + snapshot_age_ms", seed=1))
    decision = policy.decide(1.5, prompt_tokens=7, max_tokens=9, priority=2, cached_tokens=3, label="r1")
    assert DecisionRing(4).add(decision) == 1
    rendered = decision.render()
    assert rendered == {
        "id": 1,
        "at_s": 1.5,
        "label": "r1",
        "rank": 1,
        "refusal": None,
        "preset": None,
        "picker": "argmin",
        "cost": "kv_usage / reported_waiting + snapshot_age_ms",
        "objective": "min",
        "tie_break": "random",
        "pinned_rank": None,
        "eligible": 2,
        "ties": 1,
        "relaxed": [],
        "request": {"prompt_tokens": 7, "cached_tokens": 3, "new_tokens": 4, "max_tokens": 9, "priority": 2},
        "ranks": [
            {
                "rank": 0,
                "reason": "eligible",
                "cost": "inf",
                "variables": {"kv_usage": 0.0, "reported_waiting": 0, "snapshot_age_ms": "inf"},
            },
            {
                "rank": 1,
                "reason": "eligible",
                "cost": 500.375,
                "variables": {"kv_usage": 0.75, "reported_waiting": 2, "snapshot_age_ms": 500.0},
            },
            {
                "rank": 2,
                "reason": "lost",
                "cost": "inf",
                "variables": {"kv_usage": 0.0, "reported_waiting": 0, "snapshot_age_ms": "inf"},
            },
        ],
    }
    assert json.loads(json.dumps(rendered, allow_nan=False)) == rendered


@pytest.mark.parametrize(
    ("settings", "options", "costs"),
    [
        (PolicySettings(cost="1 / in_flight", objective="max"), {}, ["-inf", "-inf"]),
        (PolicySettings(cost="in_flight > 3"), {}, [0, 0]),
        (PolicySettings(preset="round_robin"), {}, [None, None]),
        (PolicySettings(cost="in_flight"), {"pinned_rank": 1}, [None, 0.0]),
        (PolicySettings(cost="in_flight"), {"prompt_tokens": 10**6}, [None, None]),
        (PolicySettings(cost="priority"), {}, [0, 0]),
    ],
)
def test_every_kind_of_record_is_json(settings, options, costs):
    policy = make_policy(make_table(2), settings)
    decision = policy.decide(1.5, **{"prompt_tokens": 7, "max_tokens": 9, **options})
    rendered = json.loads(json.dumps(decision.render(), allow_nan=False))
    assert [rank["cost"] for rank in rendered["ranks"]] == costs
    assert not any(isinstance(rank["cost"], bool) for rank in rendered["ranks"])
    assert rendered["pinned_rank"] == options.get("pinned_rank")
    assert rendered["refusal"] == ("PROMPT_TOO_LONG" if options.get("prompt_tokens") else None)


# ---- the ring -----------------------------------------------------------------------------------


def test_ids_grow_and_the_oldest_goes():
    ring = DecisionRing(3)
    decisions = [some_decision() for _ in range(5)]
    assert [ring.add(decision) for decision in decisions] == [1, 2, 3, 4, 5]
    assert [decision.id for decision in decisions] == [1, 2, 3, 4, 5]
    assert [ring.get(number) for number in range(7)] == [None, None, None, *decisions[2:], None]
    assert ring.get(-1) is None
    assert ring.latest(10) == decisions[:1:-1]
    assert ring.latest(2) == [decisions[4], decisions[3]]
    assert ring.latest(0) == []


def test_latest_of_one_rank():
    ring = DecisionRing(10)
    decisions = [some_decision(pinned_rank=number % 2) for number in range(6)]
    for decision in decisions:
        ring.add(decision)
    assert ring.latest(2, rank=1) == [decisions[5], decisions[3]]
    assert ring.latest(9, rank=0) == [decisions[4], decisions[2], decisions[0]]
    assert ring.latest(9, rank=5) == []


def test_capacity_zero_keeps_none_and_still_numbers():
    ring = DecisionRing(0)
    assert [ring.add(some_decision()) for _ in range(3)] == [1, 2, 3]
    assert ring.get(3) is None
    assert ring.latest(5) == []


@settings(deadline=None)
@given(st.integers(0, 6), st.integers(0, 20), st.integers(0, 8))
def test_the_ring_is_the_tail_of_a_list(capacity, count, limit):
    ring = DecisionRing(capacity)
    decisions = [some_decision(label=str(number)) for number in range(count)]
    for decision in decisions:
        ring.add(decision)
    kept = decisions[-capacity:] if capacity else []
    assert ring.latest(limit) == kept[::-1][:limit]
    assert [ring.get(number + 1) for number in range(count)] == [
        decision if decision in kept else None for decision in decisions
    ]
