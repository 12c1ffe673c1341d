"""Modes queue and batch when ranks are shut, gone, blocked, too small or worth waiting for; and pins."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import AbortAll, DrainStarted, RankLost, SendBlocked, SendFailed, SendUnblocked
from tests.support.core import Bench, make_info, wire_id

MODES = ["queue", "batch"]


def scheduled(ranks=1, slots=1, mode="queue", *, info=None, join=True, batch=None, **settings):
    scheduling = {"mode": mode, "queue": {"max_in_flight_per_rank": slots} | settings.pop("queue", {})}
    if mode == "batch":
        scheduling["batch"] = {"window_ms": 0} | (batch or {})
    return Bench(ranks, scheduling=scheduling, info=info, join=join, **settings)


def drain(bench):
    while bench.router.live_count:
        attempt = next(iter(bench.router._attempts.ledger.live.values()))
        bench.batch(attempt.rank, [(attempt.wire_id, [9], "stop")])
    bench.assert_quiet()


# ---- pins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_pin_to_a_shut_rank_is_in_nobodys_way(mode):
    bench = scheduled(2, mode=mode)
    bench.request(pinned_rank=0)
    pinned = bench.request(pinned_rank=0)
    other = bench.request()
    assert (pinned.last_rank, other.last_rank) == (None, 1)
    drain(bench)
    assert pinned.last_rank == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_is_queued_for_a_rank_ends_with_it_and_is_never_moved(mode):
    bench = scheduled(2, mode=mode)
    running, kept = bench.request(pinned_rank=0), bench.request(pinned_rank=1)
    pinned, free = bench.request(pinned_rank=0), bench.request()
    bench.lose(0)
    assert pinned.error.reason is Reason.RANK_LOST
    assert pinned.error.retryable
    assert running.error.reason is Reason.RANK_LOST
    assert pinned.last_rank is None
    refused = bench.offer(pinned_rank=0)
    assert refused.reason is Reason.PINNED_RANK_UNAVAILABLE
    bench.finish(kept)
    assert free.last_rank == 1
    drain(bench)


def test_a_rank_that_is_replaced_takes_no_pin_that_was_meant_for_the_old_one():
    bench = scheduled()
    bench.request(pinned_rank=0)
    pinned = bench.request(pinned_rank=0)
    bench.join(0)
    assert pinned.error.reason is Reason.RANK_LOST
    assert len(bench.dispatched) == 1
    bench.assert_quiet()


# ---- no rank at all ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_requests_outlast_a_rolling_restart(mode):
    bench = scheduled(2, mode=mode, queue={"no_rank_wait_s": 5.0})
    for rank in (0, 1):
        bench.lose(rank)
    waiting = [bench.request() for _ in range(3)]
    bench.tick(4.9)
    assert [request.is_ended for request in waiting] == [False] * 3
    bench.join(1)
    assert waiting[0].last_rank == 1
    drain(bench)
    assert bench.router.counters.ended["OK"] == 3


def test_a_request_waits_for_any_rank_as_long_as_the_setting_says_and_no_longer():
    bench = scheduled(queue={"no_rank_wait_s": 2.0})
    bench.lose(0)
    bench.now += 10
    first = bench.request()
    bench.tick(1.0)
    second = bench.request()
    bench.tick(1.0)
    assert first.error.reason is Reason.NO_ELIGIBLE_RANK
    assert first.error.retryable
    assert not second.is_ended
    bench.tick(1.0)
    assert second.error.reason is Reason.NO_ELIGIBLE_RANK
    bench.assert_quiet()


def test_the_wait_counts_from_the_loss_not_from_the_arrival():
    bench = scheduled(queue={"no_rank_wait_s": 2.0})
    bench.request()
    waiting = bench.request()
    bench.tick(10.0)
    bench.lose(0)
    bench.tick(1.9)
    assert not waiting.is_ended
    bench.tick(0.2)
    assert waiting.error.reason is Reason.NO_ELIGIBLE_RANK
    bench.assert_quiet()


def test_while_one_rank_is_ready_nobody_waits_for_ranks():
    bench = scheduled(2, queue={"no_rank_wait_s": 2.0})
    bench.lose(0)
    running, waiting = bench.request(), bench.request()
    bench.tick(60.0)
    assert not waiting.is_ended
    bench.finish(running)
    drain(bench)
    assert waiting.error is None


def test_requests_before_the_first_rank_wait_too():
    bench = scheduled(join=False, queue={"no_rank_wait_s": 2.0})
    early, patient = bench.request(), bench.request()
    bench.tick(1.0)
    bench.join(0)
    assert early.last_rank == 0
    drain(bench)
    assert patient.error is None


def test_with_no_time_to_wait_it_is_refused_at_once():
    bench = scheduled(queue={"no_rank_wait_s": 0})
    bench.lose(0)
    error = bench.offer()
    assert error.reason is Reason.NO_ELIGIBLE_RANK
    assert error.retryable
    assert bench.router.decisions.latest(1)[0].refusal is Reason.NO_ELIGIBLE_RANK
    bench.assert_quiet()


# ---- what no wait can help -----------------------------------------------------------------------------


def test_a_prompt_that_no_rank_can_hold_is_refused_not_queued():
    bench = scheduled(2, info=make_info(kv_capacity_tokens=100))
    error = bench.offer([1] * 100)
    assert (error.reason, error.retryable) == (Reason.KV_TOO_SMALL, False)
    assert bench.router.queue_depth == 0
    bench.assert_quiet()


def test_what_only_a_lost_rank_could_hold_waits_for_it_for_a_while_and_lets_the_others_go():
    bench = scheduled(2, join=False, queue={"order": "fcfs", "no_rank_wait_s": 5.0})
    bench.join(0, info=make_info(kv_capacity_tokens=1000))
    bench.join(1, info=make_info(kv_capacity_tokens=50))
    bench.request([1] * 500)
    small_one, large = bench.request(), bench.request([1] * 500)
    small = bench.request()
    bench.lose(0)
    bench.finish(small_one)
    assert small.last_rank == 1
    late = bench.request([1] * 500)
    bench.tick(4.9)
    assert not large.is_ended
    later = bench.request([1] * 500)
    bench.tick(0.1)
    assert (large.error.reason, large.error.retryable) == (Reason.NO_ELIGIBLE_RANK, True)
    assert late.error.reason is Reason.NO_ELIGIBLE_RANK
    bench.join(0, info=make_info(kv_capacity_tokens=1000))
    assert later.last_rank == 0
    drain(bench)


def test_a_budget_of_a_group_that_is_full_makes_requests_wait_not_fail():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 2, "budget": {"max_requests": 1}}
    bench = scheduled(2, slots=4, groups=[group])
    running = bench.request()
    waiting = bench.request()
    assert bench.router.queue_depth == 1
    bench.finish(running)
    assert waiting.last_rank is not None
    drain(bench)


# ---- the link ------------------------------------------------------------------------------------------


def test_a_rank_whose_send_queue_is_full_is_sent_nothing_until_it_drains():
    bench = scheduled(slots=4)
    bench.send(SendBlocked(0, 1))
    waiting = bench.request()
    assert bench.sent == []
    bench.send(SendUnblocked(0, 1))
    assert waiting.last_rank == 0
    drain(bench)


@pytest.mark.parametrize("mode", MODES)
def test_a_send_that_fails_frees_the_slot_for_the_next(mode):
    bench = scheduled(mode=mode, batch={"max_in_flight_batches": 1})
    failed, waiting = bench.request(), bench.request()
    bench.send(SendFailed(0, 1, wire_id(failed), "overflow"))
    assert failed.error.reason is Reason.SEND_FAILED
    assert waiting.last_rank == 0
    assert bench.aborted == []
    drain(bench)


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_rank_gets_nothing_although_its_slots_are_free(mode):
    bench = scheduled(2, slots=2, mode=mode)
    for _ in range(6):
        bench.request()
    bench.send(RankLost(0, 1, "disconnected"))
    assert bench.router.ranks.in_flight == [0, 2]
    assert bench.router.queue_depth == 2
    drain(bench)


@pytest.mark.parametrize("mode", MODES)
def test_a_drain_lets_in_nobody_and_serves_what_is_queued(mode):
    bench = scheduled(mode=mode)
    running, waiting, aborted = bench.request(), bench.request(), bench.request()
    bench.send(DrainStarted())
    assert bench.offer().reason is Reason.DRAINING
    bench.finish(running)
    assert waiting.last_rank == 0
    bench.send(AbortAll(Reason.DRAINING))
    assert (waiting.error.reason, aborted.error.reason) == (Reason.DRAINING, Reason.DRAINING)
    assert len(bench.dispatched) == 2
    bench.assert_quiet()


# ---- kept back for a better rank -------------------------------------------------------------------------


def uneven(*capacities, **queue):
    """Ranks with one sequence in flight each. Those with room for more than 500 tokens cost 1, the others 100."""
    queue = {"order": "fcfs", "hold_ratio": 0.7, "gate_tokens": 10} | queue
    cost = "1 if kv_capacity_tokens > 500 else 100"
    bench = scheduled(len(capacities), slots=2, policy={"cost": cost}, queue=queue, join=False)
    for rank, capacity in enumerate(capacities):
        bench.join(rank, info=make_info(kv_capacity_tokens=capacity))
        # A cheap rank's gate is shut by ten tokens that it has not started.
        bench.request([1] * (10 if capacity > 500 else 1), pinned_rank=rank)
    return bench


@pytest.mark.parametrize("max_hold_s", [0.5, 2.0])
def test_it_is_kept_back_for_a_shut_rank_that_costs_less_but_not_for_ever(max_hold_s):
    bench = uneven(1000, 400, max_hold_s=max_hold_s)
    held = bench.request()
    bench.tick(max_hold_s - 0.01)
    assert held.last_rank is None
    bench.tick(0.02)
    assert held.last_rank == 1
    drain(bench)


def test_it_goes_where_it_was_kept_back_for_as_soon_as_that_opens():
    bench = uneven(1000, 400)
    held = bench.request()
    bench.finish(bench.router._attempts.ledger.of_rank(0)[0].sequence.request)
    assert held.last_rank == 0
    drain(bench)


def test_without_a_ratio_nothing_is_kept_back():
    bench = uneven(1000, 400, hold_ratio=None)
    assert bench.request().last_rank == 1
    drain(bench)


def test_an_idle_rank_is_never_left_idle_for_a_better_one():
    bench = uneven(1000, 400)
    bench.finish(bench.router._attempts.ledger.of_rank(1)[0].sequence.request)
    assert bench.request().last_rank == 1
    drain(bench)


def test_an_idle_rank_takes_the_first_that_it_can_although_one_before_it_is_kept_back():
    """Of two that are kept back, the idle rank is too small for the first: the second goes."""
    bench = uneven(1000, 400, 50)
    large, small = bench.request([1] * 100), bench.request([1] * 10)
    assert (large.last_rank, small.last_rank) == (None, None)
    bench.finish(bench.router._attempts.ledger.of_rank(2)[0].sequence.request)
    assert large.last_rank is None
    assert small.last_rank in (1, 2), "they cost the same"
    drain(bench)
