"""Decision records: what they keep, how they read, and the ring that holds the latest."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.config.schema import Policy as PolicySettings
from gateway.core.decisions import GATE_KV, GATE_TRIED, DecisionRing
from gateway.core.gate import GATE_REASONS
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
    assert (decision.gate, decision.batch, decision.predicted_ms, decision.actual_ms) == (None, None, None, None)
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
        "request": {
            "prompt_tokens": 7,
            "cached_tokens": 3,
            "new_tokens": 4,
            "max_tokens": 9,
            "priority": 2,
            "prefill_ms": 0.0,
        },
        "queue": None,
        "batch": None,
        "prediction": None,
        "ranks": [
            {
                "rank": 0,
                "reason": "eligible",
                "gate": None,
                "cost": "inf",
                "variables": {"kv_usage": 0.0, "reported_waiting": 0, "snapshot_age_ms": "inf"},
            },
            {
                "rank": 1,
                "reason": "eligible",
                "gate": None,
                "cost": 500.375,
                "variables": {"kv_usage": 0.75, "reported_waiting": 2, "snapshot_age_ms": 500.0},
            },
            {
                "rank": 2,
                "reason": "lost",
                "gate": None,
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


def queued_decision(**more):
    policy = make_policy(make_table(3), PolicySettings(cost="in_flight + prefill_ms"))
    decision = policy.decide_gated(
        1.5,
        prompt_tokens=7,
        max_tokens=9,
        prefill_ms=2.5,
        gate=bytes([0, 1, 0]),
        kv_fits=lambda rank, _: rank == 0,
        hold_ratio=0.0,
    )
    for name, value in more.items():
        setattr(decision, name, value)
    return decision


def test_what_happened_in_the_queue_is_rendered():
    decision = queued_decision(
        queued_ms=12.5, queue_depth=4, dispatch_reason="batch_full", batch=(17, 8, "batch_full"), predicted_ms=2.5
    )
    rendered = decision.render()
    assert rendered["queue"] == {"queued_ms": 12.5, "depth": 4, "reason": "batch_full"}
    assert rendered["batch"] == {"number": 17, "size": 8, "reason": "batch_full"}
    assert rendered["prediction"] == {"predicted_ms": 2.5, "actual_ms": None}
    assert rendered["request"]["prefill_ms"] == 2.5
    assert [row["gate"] for row in rendered["ranks"]] == ["open", "not_open", "kv"]
    decision.actual_ms = 3.25  # the first token came
    assert decision.render()["prediction"] == {"predicted_ms": 2.5, "actual_ms": 3.25}
    assert json.loads(json.dumps(rendered, allow_nan=False)) == rendered


def test_without_batches_the_queue_is_rendered_all_the_same():
    rendered = queued_decision(queued_ms=1.5, queue_depth=2, dispatch_reason="gate_open").render()
    assert rendered["queue"] == {"queued_ms": 1.5, "depth": 2, "reason": "gate_open"}
    assert (rendered["batch"], rendered["prediction"]) == (None, None)


def test_every_state_of_a_gate_has_a_name():
    states = bytes([*range(len(GATE_REASONS)), GATE_TRIED, GATE_KV])
    assert structs.replace(queued_decision(), gate=states).gates() == [*GATE_REASONS, "tried", "kv"]
    assert not {"kv", "tried"} & set(GATE_REASONS)
    assert len(GATE_REASONS) < GATE_TRIED


def test_a_prediction_needs_no_queue():
    decision = some_decision(prefill_ms=4.0)
    decision.predicted_ms = 4.0
    rendered = decision.render()
    assert (rendered["queue"], rendered["batch"]) == (None, None)
    assert rendered["prediction"] == {"predicted_ms": 4.0, "actual_ms": None}


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


def test_another_gateway_s_ids_are_unknown():
    rings = [DecisionRing(2), DecisionRing(2)]
    rings[1].begin_at(1001)
    decisions = [[some_decision() for _ in range(3)] for _ in rings]
    assert [[ring.add(each) for each in mine] for ring, mine in zip(rings, decisions, strict=True)] == [
        [1, 2, 3],
        [1001, 1002, 1003],
    ]
    assert rings[1].latest(9) == decisions[1][:0:-1]
    assert rings[1].get(1003) is decisions[1][2]
    assert rings[0].get(1003) is rings[1].get(3) is None


def test_of_a_ring_that_has_room_nothing_older_than_the_first_is_looked_for():
    ring = DecisionRing(8)
    ring.begin_at(1001)
    ring.add(decision := some_decision())
    assert ring.latest(9) == [decision]


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
