"""Requests that only ranks which are away could take: refused for now or kept waiting for a while, never for ever."""

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankDrained, RankUndrained
from tests.support.core import Bench, make_info

LARGE, SMALL = make_info(kv_capacity_tokens=2000), make_info(kv_capacity_tokens=100)


def make(mode="queue", ranks=2, **more):
    bench = Bench(ranks, scheduling={"mode": mode, **more}, join=False)
    bench.join(0, info=LARGE)
    bench.join(1, info=SMALL)
    return bench


def lose(bench, rank):
    bench.lose(rank)


def drain(bench, rank):
    bench.send(RankDrained(rank))


def silence(bench, rank):
    """Work in flight and no message for longer than a healthy rank takes: SUSPECT."""
    bench.request(pinned_rank=rank)
    bench.pass_time(40.0)
    assert bench.router.ranks.state[rank] == "SUSPECT"


@pytest.mark.parametrize("go", [lose, drain, silence])
def test_what_a_rank_that_is_away_could_hold_is_refused_for_now(go):
    bench = make("direct")
    go(bench, 0)
    error = bench.offer([5] * 500)
    assert isinstance(error, GatewayError)
    assert (error.reason, error.retryable) == (Reason.NO_ELIGIBLE_RANK, True)
    assert "could take" in error.message
    assert bench.router.decisions.get(error.facts["decision_id"]).reasons()[1] == "kv_capacity"


@pytest.mark.parametrize("go", [lose, drain, silence])
@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_with_a_queue_it_waits_for_that_rank_and_gets_it(mode, go):
    bench = make(mode, queue={"no_rank_wait_s": 5.0})
    before = bench.request([5] * 500, max_tokens=9)
    bench.finish(before)
    go(bench, 0)
    waiting, small = bench.request([5] * 500), bench.request()
    assert (waiting.last_rank, small.last_rank) == (None, 1)
    if go is drain:
        bench.send(RankUndrained(0))
    elif go is silence:
        bench.batch(0)
    else:
        bench.join(0, info=LARGE)
    bench.tick(0.1)  # a busy rank's batch has its window
    assert waiting.last_rank == 0


def test_it_waits_no_longer_than_for_any_rank_and_everyone_as_long():
    bench = make(queue={"no_rank_wait_s": 5.0, "max_in_flight_per_rank": 1})
    bench.request([5] * 500)
    queued = bench.request([5] * 500)
    bench.tick(3.0)
    bench.lose(0)
    bench.tick(3.0)
    young = bench.request([5] * 500)
    assert not queued.is_ended, "its rank is away for 3 s, whatever it waited before"
    bench.tick(2.0)
    assert (queued.error.reason, queued.error.retryable) == (Reason.NO_ELIGIBLE_RANK, True)
    assert not young.is_ended
    bench.tick(3.0)
    assert young.error.reason is Reason.NO_ELIGIBLE_RANK
    assert bench.router.queue_depth == 0


def test_draining_a_rank_does_not_condemn_what_waits_for_it():
    bench = make(queue={"max_in_flight_per_rank": 1})
    bench.request([5] * 500)
    queued = bench.request([5] * 500)
    bench.send(RankDrained(0))
    assert not queued.is_ended
    bench.send(RankUndrained(0))
    bench.finish(bench.router.find("c", "r1"))
    assert queued.last_rank == 0


@pytest.mark.parametrize("mode", ["direct", "queue"])
def test_what_is_too_large_for_every_rank_that_ever_came_is_never_taken(mode):
    bench = make(mode)
    bench.lose(0)
    error = bench.offer([5] * 2000)
    assert (error.reason, error.retryable, error.retry_after_s) == (Reason.KV_TOO_SMALL, False, None)
    assert bench.router.decisions.get(error.facts["decision_id"]).reasons() == ["kv_capacity"] * 2


def test_so_it_is_with_a_pin():
    bench = make("direct")
    for rank in (0, 1):
        bench.lose(rank)
    large, small = (bench.offer([5] * 500, pinned_rank=rank) for rank in (0, 1))
    assert (large.reason, large.retryable) == (Reason.PINNED_RANK_UNAVAILABLE, True)
    assert (small.reason, small.retryable) == (Reason.KV_TOO_SMALL, False)


def test_a_rank_that_has_not_joined_yet_may_be_large_enough():
    bench = make("direct", ranks=3)
    error = bench.offer([5] * 2000)
    assert (error.reason, error.retryable) == (Reason.NO_ELIGIBLE_RANK, True)
    bench.join(2, info=make_info(kv_capacity_tokens=4000))
    assert bench.request([5] * 2000).last_rank == 2


def test_no_rank_yet_to_come_is_exempt_from_its_groups_budget():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 2, "budget": {"max_prompt_tokens": 50}}
    bench = Bench(groups=[group], join=False)
    bench.join(0)
    error = bench.offer([5] * 51)
    assert (error.reason, error.retryable) == (Reason.PROMPT_TOO_LONG, False)


def test_what_waits_for_a_rank_that_comes_back_too_small_is_never_taken():
    bench = make(queue={"max_in_flight_per_rank": 1})
    bench.lose(0)
    queued, other = bench.request([5] * 500), bench.request([5] * 500, n=2)
    bench.join(0, info=SMALL)
    assert [request.error.reason for request in (queued, other)] == [Reason.KV_TOO_SMALL] * 2
    bench.assert_quiet()


def test_the_wait_for_a_ready_rank_is_bounded_whatever_happens_to_ranks_that_are_away():
    bench = Bench(8, scheduling={"mode": "queue", "queue": {"no_rank_wait_s": 5.0}})
    for rank in range(8):
        bench.send(RankDrained(rank))
    request = bench.request()
    bench.tick(4.0)
    for rank in range(8):
        bench.lose(rank)
    assert not request.is_ended
    bench.tick(1.0)
    assert request.error.reason is Reason.NO_ELIGIBLE_RANK
