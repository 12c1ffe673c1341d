"""What a decision record says of the queue, the gate, the batch and the prediction."""

import pytest

from gateway.core.decisions import GATE_KV
from gateway.types import Sampling
from tests.support.core import Bench, make_info, wire_id

PREDICTOR = {"prefill_ms": "0.1 * total_new_tokens"}


def record(bench, request):
    return bench.router.decisions.get(request.decision_id)


def queued(ranks=1, slots=1, mode="queue", **settings):
    queue = {"max_in_flight_per_rank": slots, "order": "fcfs"} | settings.pop("queue", {})
    scheduling = {"mode": mode, "queue": queue}
    if mode == "batch":
        scheduling["batch"] = {"window_ms": 20.0} | settings.pop("batch", {})
    return Bench(ranks, scheduling=scheduling, **settings)


def test_a_record_of_the_queue_has_the_wait_the_depth_the_gates_and_the_reason():
    bench = queued(3)
    running = [bench.request(pinned_rank=rank) for rank in (0, 1, 2)]
    waiting, another = bench.request(), bench.request()
    bench.now += 0.25
    bench.finish(running[1])
    decision = record(bench, waiting)
    assert decision.rank == 1
    assert decision.queued_ms == pytest.approx(250.0)
    assert decision.queue_depth == 2, "it was still one of them"
    assert decision.gates() == ["in_flight", "open", "in_flight"]
    assert decision.dispatch_reason == "idle_rank"
    assert decision.batch is None
    assert another.decision_id is None
    rendered = decision.render()
    assert rendered["queue"] == {"queued_ms": pytest.approx(250.0), "depth": 2, "reason": "idle_rank"}
    assert rendered["batch"] is rendered["prediction"] is None
    assert [rank["gate"] for rank in rendered["ranks"]] == ["in_flight", "open", "in_flight"]


def test_a_busy_rank_that_takes_more_is_a_reason_of_its_own():
    bench = queued(slots=2)
    first, second = bench.request(), bench.request()
    assert [record(bench, request).dispatch_reason for request in (first, second)] == ["idle_rank", "gate_open"]
    assert bench.router.counters.dispatch_reasons["gate_open"] == 1


def test_a_rank_without_room_for_the_prompt_is_shown_as_such():
    bench = queued(2, slots=4, info=make_info(kv_capacity_tokens=1000))
    bench.request([1] * 600, pinned_rank=0)
    assert record(bench, bench.request([1] * 370)).gate == bytes([GATE_KV, 0])


def test_a_batch_is_in_the_records_of_all_its_members_with_numbers_of_their_own():
    bench = queued(slots=8, mode="batch", queue={"hold_until_queued": 3})
    requests = [bench.request([1] * length, max_tokens=length, priority=length) for length in (3, 5, 7)]
    decisions = [record(bench, request) for request in requests]
    assert [decision.batch for decision in decisions] == [(1, 3, "idle_rank")] * 3
    assert [decision.label for decision in decisions] == [request.arrived.request_id for request in requests]
    assert [decision.request[1] for decision in decisions] == [3, 5, 7]
    assert [decision.request[4] for decision in decisions] == [3, 5, 7]
    assert [decision.request[5] for decision in decisions] == [3, 5, 7]
    assert len({decision.id for decision in decisions}) == 3
    assert decisions[1].render()["batch"] == {"number": 1, "size": 3, "reason": "idle_rank"}
    assert bench.router.counters.dispatch_reasons["idle_rank"] == 3


def test_a_pinned_member_of_a_batch_shows_its_pin():
    bench = queued(slots=8, mode="batch", queue={"hold_until_queued": 2})
    free, pinned = bench.request(), bench.request(pinned_rank=0)
    assert [record(bench, request).pinned for request in (free, pinned)] == [None, 0]


def test_a_direct_decision_has_no_queue():
    bench = Bench(2)
    decision = record(bench, bench.request())
    assert decision.gate is None
    assert decision.gates() == [None, None]
    assert decision.render()["queue"] is None
    assert bench.router.counters.dispatch_reasons["direct"] == 1


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_the_prediction_is_on_record_and_then_what_it_took(mode):
    bench = Bench(1, scheduling={"mode": mode}, predictor=PREDICTOR)
    request = bench.request([1] * 50)
    decision = record(bench, request)
    assert (decision.predicted_ms, decision.actual_ms) == (5.0, None)
    bench.now += 0.008
    bench.batch(0, [(wire_id(request), [9])])
    assert decision.actual_ms == pytest.approx(8.0)
    assert decision.render()["prediction"] == {"predicted_ms": 5.0, "actual_ms": pytest.approx(8.0)}
    bench.batch(0, [(wire_id(request), [9])])
    assert decision.actual_ms == pytest.approx(8.0), "later tokens are no prefill"


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_without_a_model_nothing_is_claimed_to_be_predicted(mode):
    bench = Bench(1, scheduling={"mode": mode})
    request = bench.request()
    bench.batch(0, [(wire_id(request), [9])])
    decision = record(bench, request)
    assert decision.predicted_ms is None
    assert decision.render()["prediction"] is None


@pytest.mark.parametrize(("actual", "scale"), [(0.010, 2.0), (0.0025, 0.5)])
def test_predictions_move_to_what_prefills_take_and_stay_there(actual, scale):
    """The ratio is taken to what the formula says: one taken to scaled predictions would undo itself."""
    bench = Bench(1, predictor=PREDICTOR | {"calibrate": True})
    for _ in range(200):
        request = bench.request([1] * 50)
        bench.now += actual
        bench.batch(0, [(wire_id(request), [9], "stop")])
    assert bench.router.predictor.scale == pytest.approx(scale, rel=0.02)
    assert record(bench, bench.request([1] * 50)).predicted_ms == pytest.approx(5.0 * scale, rel=0.02)


def test_a_refusal_is_on_record_with_the_reason_for_each_rank():
    bench = queued(2, info=make_info(kv_capacity_tokens=100))
    error = bench.offer([1] * 200)
    decision = bench.router.decisions.get(error.facts["decision_id"])
    assert decision.rank is None
    assert decision.reasons() == ["kv_capacity", "kv_capacity"]


def test_explain_shows_gates_and_depth_and_leaves_no_trace():
    bench = queued(2)
    bench.request(pinned_rank=0)
    bench.request(pinned_rank=0)
    before = (bench.router.queue_depth, list(bench.router.ranks.in_flight), bench.router.decisions._last_id)
    decision = bench.router.explain(bench.arrived(), bench.now)
    assert decision.gates() == ["in_flight", "open"]
    assert decision.queue_depth == 1
    assert before == (bench.router.queue_depth, bench.router.ranks.in_flight, bench.router.decisions._last_id)


def test_the_first_of_several_sequences_is_the_one_that_the_request_names():
    bench = queued(2)
    request = bench.request(n=2, sampling=Sampling(max_tokens=4, seed=5))
    assert request.decision_id == 1
    assert bench.router.decisions.get(2).label == request.arrived.request_id
