"""Another configuration in the place of the running one: settings hold at once, also for what is queued and in flight."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import Reconfigured
from gateway.core.ranks import RankState
from tests.support.core import Bench, load, make_config, wire_id
from tests.support.reconfigure import FAR, finish_all, reconfigure

READY = RankState.READY


# ---- settings --------------------------------------------------------------------------------------


def test_the_policy_changes_and_its_counts_go_on():
    bench = Bench(2, policy={"preset": None, "cost": "1 / in_flight"})
    requests = [bench.request() for _ in range(2)]
    faults = bench.router.counters.non_finite_costs
    assert faults > 0
    reconfigure(bench, policy={"preset": "round_robin"})
    requests += [bench.request() for _ in range(4)]
    assert bench.sent[2:] in ([0, 1, 0, 1], [1, 0, 1, 0])
    reconfigure(bench, policy={"preset": None, "cost": "1 / (in_flight - in_flight)"})
    requests.append(bench.request())
    assert bench.router.counters.non_finite_costs == faults + 2
    assert bench.router.decisions.latest(1)[0].formula == "1 / (in_flight - in_flight)"
    finish_all(bench, requests)


@pytest.mark.parametrize(
    "bad", [{"policy": {"preset": None, "cost": "in_flight +"}}, {"predictor": {"prefill_ms": "nonsense"}}]
)
def test_a_formula_that_cant_be_used_changes_nothing(bad):
    bench = Bench(2)
    requests = [bench.request() for _ in range(2)]
    layout, resolved = bench.router.layout, bench.router._parts.policy.resolved
    with pytest.raises(ValueError):
        bench.router.handle(Reconfigured(make_config(1, admission={"max_in_flight": 1}, **bad)), bench.now)
    assert (bench.router.layout, bench.router._parts.policy.resolved) == (layout, resolved)
    bench.router.check()
    assert bench.router.ranks.state == [READY, READY]
    finish_all(bench, [*requests, bench.request()])


def test_filters_change_at_once():
    bench = Bench(2)
    request = bench.request(pinned_rank=0)
    bench.batch(0, [(wire_id(request), [9])], load(1, 0, 0.9))
    assert bench.router.ranks.over_kv_count == 0
    reconfigure(bench, filters={"max_kv_usage": 0.5})
    assert bench.router.ranks.over_kv_count == 1
    reconfigure(bench, filters={"max_kv_usage": None})
    assert bench.router.ranks.over_kv_count == 0
    finish_all(bench, [request])


def test_the_predictor_comes_and_goes_with_work_in_flight():
    bench = Bench(2)
    first = bench.request([5] * 50)
    reconfigure(bench, predictor={"prefill_ms": "2 * total_new_tokens", "calibrate": True})
    assert bench.router.predictor.prefill_us(10) == 20_000
    second = bench.request([5] * 50)
    bench.now += 0.05
    bench.batch(first.last_rank, [(wire_id(first), [9])])
    bench.batch(second.last_rank, [(wire_id(second), [9])])
    learnt = bench.router.predictor._calibration
    reconfigure(bench, predictor={"prefill_ms": "2 * total_new_tokens", "calibrate": True, "mean_out_tokens": 3})
    assert bench.router.predictor._calibration is learnt, "the formula is the same"
    reconfigure(bench)
    assert not bench.router.predictor.has_model
    finish_all(bench, [first, second])


def test_limits_hold_for_what_comes_next():
    bench = Bench(1)
    old = bench.request(n=4)
    reconfigure(bench, limits={"max_n": 2, "max_request_age_s": 5.0})
    assert bench.offer(n=3).reason is Reason.INVALID_REQUEST
    bench.tick(6.0)
    assert old.error is not None
    assert old.error.reason is Reason.MAX_AGE_EXCEEDED
    request = bench.request(max_tokens=4000)
    reconfigure(bench, limits={"max_stream_buffer_bytes": 64})
    for _ in range(2):
        bench.batch(0, [(wire_id(request), list(range(100)))])
    assert request.error is not None
    assert request.error.reason is Reason.SLOW_READER
    bench.tick(2.0)
    bench.assert_quiet()


def test_failure_settings_are_live():
    bench = Bench(2)
    reconfigure(bench, failure={"reroute": True})
    request = bench.request(pinned_rank=None)
    bench.lose(request.last_rank)
    assert not request.is_settled
    finish_all(bench, [request])


def test_a_gateway_more_scales_what_is_its_own():
    bench = Bench(1, predictor={"prefill_ms": "2 * total_new_tokens"})
    request = bench.request([5] * 50)
    assert bench.router.ranks.head_credit_us == [100_000]
    reconfigure(bench, gateways=2, predictor={"prefill_ms": "2 * total_new_tokens"})
    assert bench.router.ranks.head_credit_us == [0]
    finish_all(bench, [request])


# ---- the queue -------------------------------------------------------------------------------------


def queued(order="fcfs", **settings):
    return {"mode": "queue", "queue": {"order": order, "max_in_flight_per_rank": 1} | FAR | settings}


def test_what_waits_is_served_in_the_new_order():
    bench = Bench(1, scheduling=queued())
    blocker = bench.request()
    long, short = bench.request([5] * 200), bench.request([5] * 20)
    reconfigure(bench, scheduling=queued("spf"))
    bench.finish(blocker)
    assert bench.dispatched[-1].request.prompt_token_ids == [5] * 20
    reconfigure(bench, scheduling=queued("hrrn", fair=False))
    finish_all(bench, [short, long])


def test_a_wider_gate_lets_go_at_once():
    bench = Bench(1, scheduling=queued())
    requests = [bench.request() for _ in range(4)]
    assert bench.router.queue_depth == 3
    reconfigure(bench, scheduling=queued(max_in_flight_per_rank=3))
    assert bench.router.queue_depth == 1
    finish_all(bench, requests)


def test_time_outs_stay_those_that_a_request_came_with():
    bench = Bench(1, scheduling=queued(timeout_s=1.0, timeout_action="delay"))
    blocker = bench.request()
    early = bench.request()
    bench.tick(1.5)  # delayed by now
    late = bench.request()
    reconfigure(bench, scheduling=queued(timeout_s=100.0))
    after = bench.request()
    bench.tick(1.5)
    assert late.error is not None, "it came with one second, and they are refused now"
    assert late.error.reason is Reason.QUEUE_TIMEOUT
    bench.finish(blocker)
    assert bench.dispatched[-1].request.wire_id == wire_id(after), "what was delayed stays behind"
    finish_all(bench, [after, early])


def test_fairness_can_be_switched_under_a_backlog():
    bench = Bench(1, scheduling=queued())
    requests = [bench.request(tenant=name) for name in "aaaab"]
    reconfigure(bench, scheduling=queued(fair=False))
    requests.append(bench.request(tenant="c"))
    bench.finish(requests[0])
    assert bench.dispatched[-1].request.wire_id == wire_id(requests[1])
    reconfigure(bench, scheduling=queued(fair=True))
    finish_all(bench, requests)


def test_batches_in_flight_are_those_of_before():
    def settings(**batch):
        return {"mode": "batch", "queue": {"max_in_flight_per_rank": 8}, "batch": {"window_ms": 0.0} | batch}

    bench = Bench(2, scheduling=settings(max_in_flight_batches=1, release_at="finish"))
    requests = [bench.request() for _ in range(4)]
    assert bench.router.queue_depth == 2
    bench.batch(requests[0].last_rank, [(wire_id(requests[0]), [9])])
    reconfigure(bench, 3, scheduling=settings(max_in_flight_batches=1, release_at="first_token"))
    assert bench.router.queue_depth == 2
    bench.join(2)
    assert bench.router.queue_depth == 0, "both fit one batch of the new rank"
    reconfigure(bench, 1, scheduling=settings(max_in_flight_batches=2))
    finish_all(bench, requests)
