"""What is refused at the door, with the facts that a caller needs; and objectives for the first token."""

import pytest

from gateway.core.errors import GatewayError, Reason
from tests.support.core import Bench, wire_id

PREDICTOR = {"prefill_ms": "0.1 * total_new_tokens"}


def queued(slots=1, **settings):
    scheduling = {"mode": "queue", "queue": {"max_in_flight_per_rank": slots} | settings.pop("queue", {})}
    return Bench(1, scheduling=scheduling, **settings)


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
@pytest.mark.parametrize(
    ("limits", "facts"),
    [
        ({"max_in_flight": 2}, {"budget": "sequences", "in_flight": 2, "wanted": 1, "limit": 2}),
        ({"max_prompt_tokens": 50}, {"budget": "prompt_tokens", "in_flight": 40, "wanted": 20, "limit": 50}),
        ({"max_kv_tokens": 70}, {"budget": "kv_tokens", "in_flight": 50, "wanted": 25, "limit": 70}),
    ],
)
def test_a_budget_of_the_gateway_counts_what_is_queued_and_in_flight(mode, limits, facts):
    bench = Bench(1, scheduling={"mode": mode}, admission=limits)
    live = [bench.request([1] * 20, max_tokens=5) for _ in range(2)]
    error = bench.offer([1] * 20, max_tokens=5)
    assert (error.reason, error.retryable, error.facts) == (Reason.GATEWAY_FULL, True, facts)
    assert error.retry_after_s > 0
    bench.finish(live[0])
    assert not isinstance(bench.offer([1] * 20, max_tokens=5), GatewayError)


@pytest.mark.parametrize("how", ["end", "cancel", "deadline", "loss", "timeout"])
def test_every_end_gives_the_budget_back(how):
    bench = queued(admission={"max_in_flight": 2}, queue={"timeout_s": 5.0})
    running = bench.request(deadline_at=bench.now + 3)
    waiting = bench.request(deadline_at=bench.now + 3)
    assert bench.offer().reason is Reason.GATEWAY_FULL
    if how == "end":
        bench.finish(running)
        bench.finish(waiting)
    elif how == "cancel":
        bench.cancel(waiting, Reason.CANCELLED)
        bench.cancel(running, Reason.CANCELLED)
    elif how == "deadline":
        bench.tick(3.0)
    elif how == "loss":
        bench.lose(0)
        bench.tick(6.0)
    else:
        bench.tick(5.0)
    bench.assert_quiet()


def test_a_request_gives_back_what_each_of_its_sequences_held_as_they_end():
    bench = Bench(1, admission={"max_in_flight": 3})
    request = bench.request(n=3)
    bench.batch(0, [(wire_id(request, 1), [9], "stop")])
    one = bench.request()
    assert bench.offer().reason is Reason.GATEWAY_FULL
    bench.finish(one)
    bench.finish(request)
    bench.assert_quiet()


def test_the_queue_is_bounded_and_says_how_long_it_is():
    bench = queued(admission={"max_queue_depth": 2})
    for _ in range(3):
        bench.request()
    error = bench.offer()
    assert (error.reason, error.retryable) == (Reason.QUEUE_FULL, True)
    assert error.facts == {"queue_depth": 2, "limit": 2}
    assert bench.router.queue_depth == 2


def test_a_level_is_bounded_by_itself():
    bench = queued(queue={"levels": [{"priority": 3, "max_depth": 1}]})
    for priority in (0, 3):
        bench.request(priority=priority)
    error = bench.offer(priority=3)
    assert (error.reason, error.facts) == (Reason.QUEUE_FULL, {"queue_depth": 1, "limit": 1})
    bench.request(priority=2)


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({"max_in_flight": 1}, "sequences"),
        ({"max_queue_depth": 1}, "queue_depth"),
        ({"max_prompt_tokens": 5}, "prompt_tokens"),
    ],
)
def test_a_tenant_is_bounded_by_its_own_budgets_and_others_are_not(limits, budget):
    bench = queued(admission={"tenants": {"named": {"small": limits}}})
    bench.request(tenant="other")
    bench.request(tenant="small")
    error = bench.offer(tenant="small")
    assert (error.reason, error.retryable) == (Reason.TENANT_LIMIT, True)
    assert (error.facts["tenant"], error.facts["budget"]) == ("small", budget)
    bench.request(tenant="other")


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_refusals_change_nothing_and_are_counted_by_reason(mode):
    bench = Bench(1, scheduling={"mode": mode}, admission={"max_in_flight": 1})
    live = bench.request()
    before = [list(column) for column in (bench.router.ranks.in_flight, bench.router.ranks.own_tokens)]
    for request in ({"n": 0}, {"pinned_rank": 7}, {"deadline_at": bench.now}, {}):
        assert isinstance(bench.offer(**request), GatewayError)
    assert before == [bench.router.ranks.in_flight, bench.router.ranks.own_tokens]
    assert bench.router.counters.refused == {
        Reason.INVALID_REQUEST: 1,
        Reason.INVALID_RANK: 1,
        Reason.DEADLINE_EXCEEDED: 1,
        Reason.GATEWAY_FULL: 1,
    }
    bench.finish(live)
    bench.assert_quiet()


# ---- ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
def test_an_id_is_taken_while_its_request_lives_and_as_long_again_as_the_setting_says(mode):
    bench = Bench(1, scheduling={"mode": mode}, admission={"id_reuse_after_s": 2.0})
    request = bench.request(request_id="x")
    assert bench.offer(request_id="x").reason is Reason.DUPLICATE_REQUEST_ID
    bench.request(request_id="x", client_key="another caller")
    bench.finish(request)
    error = bench.offer(request_id="x")
    assert (error.reason, error.retryable, error.facts) == (Reason.DUPLICATE_REQUEST_ID, False, {"request_id": "x"})
    bench.now += 2.0
    bench.request(request_id="x")


# ---- objectives ----------------------------------------------------------------------------------------


def with_objective(mode, ms=10.0, scheduling="direct", ranks=1, **slo):
    return Bench(
        ranks,
        predictor=PREDICTOR,
        scheduling={"mode": scheduling},
        slo={"mode": mode, "ttft": [{"max_prompt_tokens": 1000, "ttft_ms": ms}]} | slo,
    )


@pytest.mark.parametrize("scheduling", ["direct", "queue", "batch"])
def test_what_would_miss_its_objective_is_refused_early(scheduling):
    bench = with_objective("enforce", scheduling=scheduling)
    bench.request([1] * 60)
    error = bench.offer([1] * 60)
    assert (error.reason, error.retryable) == (Reason.SLO_UNATTAINABLE, True)
    assert error.facts == {"predicted_ms": 12.0, "objective_ms": 10.0, "margin_ms": 0.0, "wait_ms": 6.0}
    assert error.retry_after_s == 0.05, "2 ms, and no less than the least hint"
    assert bench.router.counters.slo_rejects == 1
    assert bench.router.live_count == 1
    bench.request([1] * 40)


def test_what_misses_it_on_an_empty_rank_is_told_not_to_come_back():
    bench = with_objective("enforce")
    error = bench.offer([1] * 101)
    assert (error.reason, error.retryable, error.retry_after_s) == (Reason.SLO_UNATTAINABLE, False, None)
    bench.request([1] * 100)


def test_time_that_a_rank_has_worked_is_not_waited_for_again():
    bench = with_objective("enforce")
    bench.request([1] * 60)
    bench.now += 0.003
    bench.request([1] * 60)


def test_in_the_shadow_nothing_is_refused_but_counted():
    bench = with_objective("shadow")
    for _ in range(3):
        bench.request([1] * 60)
    assert (bench.router.counters.slo_shadow_rejects, bench.router.counters.slo_rejects) == (2, 0)
    assert bench.router.counters.refused == {}


def test_the_margin_and_the_priority_count():
    bench = with_objective("enforce", margin_ms=4.0, priorities=[{"priority": 1, "factor": 2.0}])
    assert bench.offer([1] * 61).reason is Reason.SLO_UNATTAINABLE
    bench.request([1] * 61, priority=1)


def test_prompts_without_an_objective_are_let_in():
    bench = with_objective("enforce", ms=0.1)
    bench.request([1] * 1001)


def test_the_least_loaded_rank_counts_and_for_a_pin_its_own():
    bench = with_objective("enforce", ranks=2)
    bench.request([1] * 60, pinned_rank=0)
    assert bench.offer([1] * 60, pinned_rank=0).reason is Reason.SLO_UNATTAINABLE
    bench.request([1] * 60)
    bench.finish(bench.router._attempts.ledger.of_rank(0)[0].sequence.request)
    bench.request([1] * 60, pinned_rank=0)


def test_what_is_queued_counts_too():
    bench = with_objective("enforce", scheduling="queue")
    bench.router._dispatcher._waits_for = 99
    bench.request([1] * 60)
    assert bench.router.queue_depth == 1
    assert bench.offer([1] * 60).facts["wait_ms"] == 6.0
