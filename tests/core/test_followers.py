"""Requests that wait for another one's answer (`coalesce`): each has the wait that it would have on its own."""

import pytest

from gateway.core.errors import Reason
from gateway.types import Sampling
from tests.support.core import Bench, wire_id

GREEDY = Sampling(max_tokens=4, temperature=0.0)


def make(**queue):
    """One rank, which is busy."""
    queue = {"max_in_flight_per_rank": 1, "order": "fcfs"} | queue
    bench = Bench(1, scheduling={"mode": "queue", "queue": queue}, response_cache={"coalesce": True})
    bench.running = bench.request([1] * 5)
    return bench


def alike(bench, **more):
    return bench.request([9] * 5, sampling=GREEDY, **more)


def test_the_queues_time_out_is_everyones_from_its_own_acceptance():
    bench = make(timeout_s=1.0)
    together = [alike(bench) for _ in range(20)]
    bench.tick(0.6)
    late = alike(bench)
    bench.tick(0.4)
    assert [request.error.reason for request in together] == [Reason.QUEUE_TIMEOUT] * 20
    assert not late.is_ended
    assert bench.router.counters.queue_timeouts == 20
    bench.tick(0.6)
    assert late.error.reason is Reason.QUEUE_TIMEOUT
    assert {request.error.facts["timeout_of"] for request in (*together, late)} == {"queue"}


def test_so_is_the_wait_for_a_rank():
    bench = make(no_rank_wait_s=1.0)
    bench.lose(0)
    together = [alike(bench) for _ in range(20)]
    bench.tick(0.6)
    late = alike(bench)
    bench.tick(0.4)
    assert [request.error.reason for request in together] == [Reason.NO_ELIGIBLE_RANK] * 20
    assert not late.is_ended
    bench.tick(0.6)
    assert late.error.reason is Reason.NO_ELIGIBLE_RANK
    bench.assert_quiet()


def test_what_a_follower_asks_for_ends_its_wait_and_no_other():
    bench = make()
    leader, follower, other = alike(bench), alike(bench, queue_timeout_s=0.5), alike(bench)
    bench.tick(0.4)
    assert not follower.is_ended
    bench.tick(0.1)
    assert follower.error.reason is Reason.QUEUE_TIMEOUT
    assert (follower.error.facts["timeout_of"], follower.error.facts["timeout_s"]) == ("call", 0.5)
    bench.finish(bench.running)
    bench.finish(leader)
    assert (leader.error, other.error, other.is_cached) == (None, None, True)
    bench.assert_quiet()


def test_a_follower_whose_answer_is_being_made_waits_for_no_rank():
    bench = make(timeout_s=1.0)
    leader, follower = alike(bench), alike(bench, queue_timeout_s=0.5)
    bench.finish(bench.running)
    bench.tick(50)
    assert not follower.is_ended
    bench.finish(leader)
    assert follower.error is None


def test_who_has_waited_too_long_for_an_answer_does_not_begin_to_wait_for_a_rank():
    bench = make(timeout_s=1.0)
    leader, old = alike(bench), alike(bench)
    bench.finish(bench.running)
    bench.tick(5.0)
    young = alike(bench)
    bench.cancel(leader, Reason.CANCELLED)
    assert old.error.reason is Reason.QUEUE_TIMEOUT
    assert young.last_rank == 0
    bench.finish(young)
    bench.assert_quiet()


def test_a_time_out_that_only_delays_ends_no_follower():
    bench = make(timeout_s=1.0, timeout_action="delay")
    leader, follower = alike(bench), alike(bench)
    bench.tick(5.0)
    bench.finish(bench.running)
    bench.finish(leader)
    assert (follower.error, follower.is_cached) == (None, True)


@pytest.mark.parametrize("count", [1, 40])
def test_what_is_watched_is_forgotten(count):
    bench = make(timeout_s=1000.0)
    for _ in range(5):
        leader = alike(bench)
        for _ in range(count):
            bench.cancel(alike(bench), Reason.CANCELLED)
        bench.cancel(leader, Reason.CANCELLED)
        bench.tick(0.1)
    assert len(bench.router._pump._patience._following) <= 2 * bench.router.live_count + 64


def test_a_call_that_says_how_long_it_waits_is_not_put_behind_all_others():
    bench = make(timeout_action="delay", timeout_s=1.0)
    quick, patient = (bench.request([1] * 5, queue_timeout_s=asked) for asked in (0.5, 5.0))
    bench.tick(1.0)
    assert (quick.error.reason, patient.is_ended) == (Reason.QUEUE_TIMEOUT, False)
    bench.tick(4.0)
    assert patient.error.reason is Reason.QUEUE_TIMEOUT
    bench.batch(0, [(wire_id(bench.running), [1], "stop")])
    bench.assert_quiet()
