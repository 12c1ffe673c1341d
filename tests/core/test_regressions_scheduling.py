"""Bugs that load balancers of this kind have had in batching, queues and errors, each pinned by one test.

`test_regressions_table.py` maps each of them to its test, here or elsewhere, or says why it can't happen here.
"""

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import SendFailed
from tests.support.core import Bench, make_info, wire_id

WINDOW_S = 0.1


def batching(ranks=1, *, slots=64, queue=None, **settings):
    batch = {"max_requests": 4, "window_ms": WINDOW_S * 1e3} | settings.pop("batch", {})
    queue = {"max_in_flight_per_rank": slots, "order": "fcfs", "fair": False} | (queue or {})
    return Bench(ranks, scheduling={"mode": "batch", "queue": queue, "batch": batch}, **settings)


def queueing(ranks=1, slots=1, **settings):
    queue = {"max_in_flight_per_rank": slots} | settings.pop("queue", {})
    return Bench(ranks, scheduling={"mode": "queue", "queue": queue}, **settings)


def started(bench, rank=0):
    """Every attempt of the rank gets its first token."""
    bench.batch(rank, [(attempt.wire_id, [9]) for attempt in bench.router._attempts.ledger.of_rank(rank)])


# ---- batching and queues ---------------------------------------------------------------------------------


def test_a_slow_rank_is_not_flooded_with_batches():
    bench = batching(batch={"window_ms": 0, "max_in_flight_batches": 2, "release_at": "finish"})
    most = 0
    for _ in range(100):
        bench.request()
        most = max(most, bench.router.batches.count(0))
    assert most == 2
    assert bench.router.queue_depth == 98
    assert bench.router.ranks.in_flight == [2]


def test_arrivals_within_one_window_are_one_batch():
    bench = batching()
    bench.request()
    for _ in range(3):
        bench.now += 0.005
        bench.request()
    bench.tick(WINDOW_S)
    assert bench.router.counters.batch_sizes == {1: 1, 3: 1}


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_an_idle_rank_is_preferred_to_a_busy_one(mode):
    bench = Bench(2, scheduling={"mode": mode})
    bench.request(pinned_rank=0)
    assert bench.request().last_rank == 1


def test_the_predicted_wait_grows_with_the_queue():
    bench = queueing(2, predictor={"prefill_ms": "total_new_tokens"})
    waits = []
    for _ in range(100):
        bench.request([1] * 10)
        waits.append(bench.router._arrivals._least_wait_us(None, bench.now))
    assert waits == sorted(waits)
    assert waits[-1] == 10_000 + 98 * 10_000 // 2


def test_urgent_newcomers_do_not_renew_the_window_for_ever():
    bench = batching(batch={"max_requests": 8})
    bench.request()
    started(bench)
    patient = bench.request(priority=5)
    waited = 0.0
    while patient.last_rank is None:
        bench.now += WINDOW_S / 4
        waited += WINDOW_S / 4
        bench.request(priority=0)
        assert waited <= WINDOW_S


def test_equal_priorities_leave_in_order_of_arrival():
    bench = queueing(queue={"order": "fcfs", "fair": True})
    bench.request()
    requests = [bench.request(priority=3) for _ in range(200)]
    order = []
    bench.router.check = lambda: None
    for request in requests:
        bench.finish(next(iter(bench.router._attempts.ledger.live.values())).sequence.request)
        order.append(next(iter(bench.router._attempts.ledger.live.values())).sequence.request)
        assert order[-1] is request


@pytest.mark.parametrize("formula", ["1 / (total_new_tokens - 10)", "log(total_new_tokens - 10)"])
def test_a_predictor_that_fails_fails_no_request(formula):
    bench = batching(predictor={"prefill_ms": formula}, batch={"max_predicted_ms": 5.0, "window_ms": 0})
    for _ in range(5):
        request = bench.request([1] * 10)
        assert request.last_rank == 0
        bench.finish(request)
    assert bench.router.predictor.faults > 0
    bench.assert_quiet()


def test_a_defect_while_a_batch_is_formed_loses_nothing(monkeypatch):
    """What is queued leaves the queue only when the whole batch is there."""
    bench = batching(queue={"hold_until_queued": 2})
    bench.request()
    with monkeypatch.context() as patch:
        patch.setattr(bench.router.predictor.__class__, "batch_us", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.request()
    bench.router.check()
    assert bench.router.queue_depth == 2
    bench.tick()
    assert bench.router.queue_depth == 0
    assert len(bench.dispatched) == 2


def test_a_tie_in_the_queue_goes_to_ranks_evenly():
    bench = queueing(4, slots=1, queue={"order": "fcfs"})
    bench.router.check = lambda: None
    counts = [0] * 4
    for _ in range(2000):
        request = bench.request()
        counts[request.last_rank] += 1
        bench.finish(request)
    # Chi-squared with 3 degrees of freedom, p = 1e-4.
    assert sum((count - 500) ** 2 / 500 for count in counts) < 21.1


# ---- bounded work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shut", ["slots", "room", "pin"])
def test_an_event_costs_the_same_however_long_the_queue_is(shut, monkeypatch):
    """While nothing can go, nobody behind the head is looked at; for a pin, nobody with the same one."""
    info, pin = make_info(kv_capacity_tokens=1000), 0 if shut == "pin" else None
    ranks = 2 if shut == "pin" else 1
    bench = queueing(ranks, slots=1 if shut == "slots" else 64, info=info, queue={"order": "fcfs"})
    bench.router.check = lambda: None
    bench.request([1] * 600, pinned_rank=pin)
    for _ in range(500):
        bench.request([1] * 390, pinned_rank=pin)
    assert bench.router.queue_depth == 500
    calls = []
    decide = bench.router._parts.policy.decide_gated
    monkeypatch.setattr(
        bench.router._parts.policy, "decide_gated", lambda *args, **more: calls.append(1) or decide(*args, **more)
    )
    for _ in range(10):
        bench.tick(0.05)
    assert len(calls) == (0 if shut == "slots" else 10)


def test_what_is_kept_back_is_tried_a_bounded_number_of_times(monkeypatch):
    cost = "1 if kv_capacity_tokens > 500 else 100"
    queue = {"order": "fcfs", "hold_ratio": 0.5, "gate_tokens": 10, "max_hold_s": 60}
    bench = queueing(2, slots=64, policy={"cost": cost}, queue=queue, join=False)
    for rank, capacity in enumerate((1000, 400)):
        bench.join(rank, info=make_info(kv_capacity_tokens=capacity))
        bench.request([1] * (10 - 9 * rank), pinned_rank=rank)
    bench.router.check = lambda: None
    for _ in range(100):
        bench.request()
    assert bench.router.queue_depth == 100
    calls = []
    decide = bench.router._parts.policy.decide_gated
    monkeypatch.setattr(
        bench.router._parts.policy, "decide_gated", lambda *args, **more: calls.append(1) or decide(*args, **more)
    )
    bench.tick(0.05)
    assert len(calls) == 17


# ---- errors and retries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_a_cancel_is_an_outcome_of_its_own(mode):
    bench = Bench(1, scheduling={"mode": mode})
    bench.cancel(bench.request(), Reason.CANCELLED)
    assert bench.router.counters.ended == {"OK": 0, "CANCELLED": 1}
    assert bench.router.counters.refused == {}


def test_a_retry_is_accepted_with_the_same_id_and_goes_out_under_another():
    bench = Bench(1, admission={"id_reuse_after_s": 60.0})
    failed = bench.request(request_id="x")
    bench.send(SendFailed(0, 1, wire_id(failed), "overflow"))
    assert failed.error.retryable
    again = bench.request(request_id="x")
    first, second = (effect.request.wire_id for effect in bench.dispatched)
    assert first != second
    bench.batch(0, [(first, [9], "stop")])
    assert not again.is_ended, "the first attempt's row is not the second's"
    bench.finish(again)
    assert bench.offer(request_id="x").reason is Reason.DUPLICATE_REQUEST_ID, "done is done"


@pytest.mark.parametrize(
    ("request_", "reason", "retryable"),
    [
        ({"prompt": [1] * 5000}, Reason.PROMPT_TOO_LONG, False),
        ({"prompt": [1] * 300}, Reason.KV_TOO_SMALL, False),
        ({"n": 0}, Reason.INVALID_REQUEST, False),
        ({"pinned_rank": 9}, Reason.INVALID_RANK, False),
        ({"deadline_at": 0.0}, Reason.DEADLINE_EXCEEDED, False),
        ({"prompt": [1] * 200}, Reason.SLO_UNATTAINABLE, False),
        ({"prompt": [1] * 90}, Reason.SLO_UNATTAINABLE, True),
        ({"pinned_rank": 1}, Reason.PINNED_RANK_UNAVAILABLE, True),
    ],
)
def test_whether_a_retry_can_help_is_said_by_the_error_itself(request_, reason, retryable):
    slo = {"mode": "enforce", "ttft": [{"max_prompt_tokens": 250, "ttft_ms": 100.0}]}
    bench = Bench(2, join=False, predictor={"prefill_ms": "total_new_tokens"}, slo=slo)
    for rank in (0, 1):
        bench.join(rank, info=make_info(kv_capacity_tokens=300))
    bench.lose(1)
    bench.request([1] * 50)
    error = bench.offer(**request_)
    assert isinstance(error, GatewayError)
    assert (error.reason, error.retryable) == (reason, retryable)
    assert (error.retry_after_s is not None) is retryable


def test_routers_of_different_modes_share_nothing():
    direct, queued = Bench(1), queueing()
    for bench in (direct, queued):
        bench.request()
        bench.request()
    assert (len(direct.dispatched), len(queued.dispatched)) == (2, 1)
    assert queued.router.queue_depth == 1
    assert direct.router.queue_depth == 0
