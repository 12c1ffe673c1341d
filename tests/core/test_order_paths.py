"""Preserved order on every path through the router: stored answers, direct, queued, batched, cancelled, lost, late."""

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankLost
from gateway.types import Sampling
from tests.support.core import Bench, wire_id

GREEDY = Sampling(max_tokens=8, temperature=0.0)
ASKED, OTHER = [1, 2, 3], [4, 5, 6]


def ordered(ranks=1, mode="queue", *, slots=1, domain="gateway", queue=None, **settings):
    """A router that keeps the order, with ranks that take `slots` sequences each."""
    scheduling = {"mode": mode}
    if mode != "direct":
        scheduling["queue"] = {"order": "fcfs", "max_in_flight_per_rank": slots} | (queue or {})
    if "batch" in settings:
        scheduling["batch"] = settings.pop("batch")
    order = {"ordering": "preserve", "preserve": {"domain": domain} | settings.pop("preserve", {})}
    return Bench(ranks, scheduling=scheduling, **({"limits": {"default_deadline_s": 60}} | order | settings))


def cached(*args, **settings):
    return ordered(*args, response_cache={}, **settings)


def remember(bench, tokens=(7, 8)):
    """Let `ASKED` be answered once, so that the next one like it is a hit."""
    bench.finish(bench.request(ASKED, sampling=GREEDY), tokens)
    bench.flush()
    return list(tokens)


def left(bench):
    """What leaves now: `(request id, tokens)`, and the request id alone for an end."""
    return [request.arrived.request_id if tokens is None else (request.arrived.request_id, *tokens)
            for request, tokens in bench.flush()]  # fmt: skip


def test_a_fast_rank_does_not_overtake_a_slow_one():
    """Three batches of four on two ranks, one four times as slow: what leaves is in the order of arrival, exactly."""
    batch = {"max_requests": 4, "max_in_flight_batches": 1, "release_at": "finish"}
    bench = ordered(2, "batch", slots=8, queue={"hold_until_queued": 12}, batch=batch)
    requests = [bench.request() for _ in range(12)]
    assert bench.router.counters.batch_sizes == {4: 2}
    slow, fast = requests[:4], requests[4:8]
    out = []
    for group in (fast, requests[8:], slow):
        bench.now += 0.1
        assert {request.last_rank for request in group} == (
            {slow[0].last_rank} if group is slow else {fast[0].last_rank}
        )
        for request in group:
            bench.finish(request)
            out += [request for request, tokens in bench.flush() if tokens is None]
        assert out == ([] if group is not slow else requests)
    bench.assert_quiet()


def test_without_preserved_order_the_fast_rank_does_overtake():
    bench = Bench(2)
    slow, fast = bench.request(request_id="slow"), bench.request(request_id="fast")
    bench.finish(fast)
    bench.finish(slow)
    assert left(bench) == [("fast", 9), "fast", ("slow", 9), "slow"]


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_a_hit_waits_for_the_miss_that_is_queued_before_it(mode):
    bench = cached(mode=mode)
    remember(bench)
    running = bench.request(OTHER, request_id="running")
    miss = bench.request(OTHER, request_id="miss")
    hit = bench.request(ASKED, sampling=GREEDY, request_id="hit")
    assert bench.router.queue_depth == 1
    assert hit.is_settled
    assert not hit.is_ended
    assert left(bench) == []
    bench.finish(running)
    assert left(bench) == [("running", 9), "running"]
    bench.finish(miss)
    assert left(bench) == [("miss", 9), "miss", ("hit", 7, 8), "hit"]
    bench.assert_quiet()


def test_a_hit_at_the_head_leaves_at_once_and_nothing_after_it_is_stuck():
    bench = cached()
    remember(bench)
    bench.request(ASKED, sampling=GREEDY, request_id="hit")
    assert left(bench) == [("hit", 7, 8), "hit"]
    bench.assert_quiet()
    later = bench.request(OTHER, request_id="later")
    bench.finish(later)
    assert left(bench) == [("later", 9), "later"]
    bench.assert_quiet()


def test_a_direct_request_waits_for_the_one_before_it_on_another_rank():
    bench = ordered(2, "direct")
    first, second = bench.request(request_id="first"), bench.request(request_id="second")
    assert first.last_rank != second.last_rank
    bench.finish(second)
    assert left(bench) == []
    bench.finish(first)
    assert left(bench) == [("first", 9), "first", ("second", 9), "second"]
    bench.assert_quiet()


def test_a_slow_head_streams_alone_and_the_next_one_leaves_in_the_step_that_ends_it():
    bench = ordered(2, "direct")
    head, fast = bench.request(max_tokens=200, request_id="head"), bench.request(max_tokens=200, request_id="fast")
    for number in range(100):
        bench.batch(head.last_rank, [(wire_id(head), [number])])
        bench.batch(fast.last_rank, [(wire_id(fast), [number])])
        assert left(bench) == [("head", number)]
    bench.batch(head.last_rank, [(wire_id(head), [100], "stop")])
    assert left(bench) == [("head", 100), "head", ("fast", *range(100))]
    bench.batch(fast.last_rank, [(wire_id(fast), [100])])
    assert left(bench) == [("fast", 100)]
    bench.finish(fast)
    bench.flush()
    bench.assert_quiet()


def test_two_that_end_in_one_batch_leave_in_order_whatever_the_order_of_the_rows():
    bench = ordered(1, slots=2)
    first, second = bench.request(request_id="first"), bench.request(request_id="second")
    bench.batch(0, [(wire_id(second), [2], "stop"), (wire_id(first), [1], "stop")])
    assert left(bench) == [("first", 1), "first", ("second", 2), "second"]
    bench.assert_quiet()


@pytest.mark.parametrize("when", ["queued", "streaming", "complete"])
def test_a_request_whose_caller_is_gone_holds_nobody_back(when):
    bench = ordered(2, slots=1)
    others = [bench.request(request_id=f"other{number}") for number in (0, 1)]
    gone = bench.request(request_id="gone")
    assert bench.router.queue_depth == 1
    if when != "queued":
        bench.finish(others[1])
        bench.batch(gone.last_rank, [(wire_id(gone), [5])])
    if when == "complete":
        bench.finish(gone)
        assert gone.is_settled
    behind = bench.request(request_id="behind")
    bench.finish(others[0])
    if when == "queued":
        bench.finish(others[1])
    bench.flush()
    if when == "complete":
        # It left with the others.
        assert gone.is_ended
    else:
        bench.cancel(gone, Reason.CANCELLED)
        assert gone.error.reason is Reason.CANCELLED
    bench.finish(behind)
    out = left(bench)
    assert out[-2:] == [("behind", 9), "behind"]
    assert ("gone", 5) not in out
    bench.assert_quiet()


def test_a_complete_answer_whose_caller_leaves_before_its_turn_is_dropped():
    bench = ordered(2, "direct")
    head, gone = bench.request(request_id="head"), bench.request(request_id="gone")
    bench.finish(gone)
    held = bench.router.ordering.held_bytes
    assert held == 4
    bench.cancel(gone, Reason.CANCELLED)
    assert bench.router.ordering.held_bytes == 0, "its bytes are free now, not when its turn comes"
    assert left(bench) == ["gone"]
    assert gone.error.reason is Reason.CANCELLED
    assert bench.router.counters.double_ends == 0
    bench.finish(head)
    assert left(bench) == [("head", 9), "head"]
    bench.assert_quiet()


def test_the_bytes_of_a_caller_that_is_gone_are_free_at_once_behind_a_head_that_goes_on():
    bench = ordered(2, "direct", preserve={"max_held_bytes": 64})
    head, gone = bench.request(request_id="head"), bench.request(max_tokens=16)
    bench.batch(gone.last_rank, [(wire_id(gone), [1] * 8)])
    assert bench.router.ordering.held_bytes == 64
    full = bench.offer(max_tokens=1)
    assert (full.reason, full.facts["bound"]) == (Reason.ORDER_FULL, "bytes")
    assert full.retryable
    bench.cancel(gone, Reason.CANCELLED)
    assert bench.router.ordering.held_bytes == 0
    bench.finish(bench.request(max_tokens=16))
    bench.finish(head)
    bench.flush()
    bench.assert_quiet()


def test_the_head_of_a_lost_rank_is_an_error_in_its_place():
    bench = ordered(2, "direct")
    head, second = bench.request(request_id="head"), bench.request(request_id="second")
    bench.batch(head.last_rank, [(wire_id(head), [1])])
    bench.finish(second)
    bench.send(RankLost(head.last_rank, 1, "disconnected"))
    assert head.error.reason is Reason.RANK_LOST
    assert left(bench) == [("head", 1), "head", ("second", 9), "second"]
    bench.assert_quiet()


def test_an_error_behind_the_head_waits_for_its_turn_like_an_answer():
    bench = ordered(2, "direct")
    head, lost = bench.request(request_id="head"), bench.request(request_id="lost")
    bench.send(RankLost(lost.last_rank, 1, "disconnected"))
    assert lost.is_settled
    assert not lost.is_ended
    assert left(bench) == []
    bench.finish(head)
    assert left(bench) == [("head", 9), "head", "lost"]
    assert lost.error.reason is Reason.RANK_LOST
    bench.assert_quiet()


def test_a_head_that_times_out_in_the_queue_is_an_error_in_its_place():
    bench = ordered(slots=1, queue={"timeout_s": 1.0})
    running = bench.request(request_id="running")
    waiting = bench.request(request_id="waiting")
    bench.tick(1.0)
    assert waiting.error.reason is Reason.QUEUE_TIMEOUT
    assert left(bench) == []
    bench.finish(running)
    assert left(bench) == [("running", 9), "running", "waiting"]
    bench.assert_quiet()


def test_a_hung_head_is_an_error_at_its_deadline_and_the_others_move_on():
    bench = ordered(2, "direct")
    bench.request(request_id="hung", deadline_at=bench.now + 5)
    second = bench.request(request_id="second", deadline_at=bench.now + 50)
    bench.finish(second)
    assert left(bench) == []
    bench.tick(5.0)
    assert left(bench) == ["hung", ("second", 9), "second"]
    bench.assert_quiet()


@pytest.mark.parametrize("settings", [{"admission": {"max_queue_depth": 1}}, {"preserve": {"max_places": 2}}])
def test_a_refused_request_leaves_no_place(settings):
    bench = ordered(**settings)
    first, second = bench.request(request_id="first"), bench.request(request_id="second")
    places = bench.router.ordering.places
    assert isinstance(bench.offer(), GatewayError)
    assert bench.router.ordering.places == places == 2
    bench.finish(first)
    bench.finish(second)
    assert left(bench) == [("first", 9), "first", ("second", 9), "second"]
    bench.assert_quiet()


def test_a_direct_request_that_finds_no_rank_leaves_no_place():
    bench = ordered(1, "direct", admission={"max_in_flight_per_rank": 1})
    head = bench.request()
    assert bench.offer().reason is Reason.RANKS_FULL
    assert bench.router.ordering.places == 1
    bench.finish(head)
    bench.flush()
    bench.assert_quiet()


def test_an_end_without_tokens_frees_the_place():
    bench = ordered(2, "direct")
    head, second = bench.request(request_id="head"), bench.request(request_id="second")
    bench.finish(second)
    bench.batch(head.last_rank, [(wire_id(head), [], "stop")])
    assert [item for item in left(bench) if item != ("head",)] == ["head", ("second", 9), "second"]
    bench.assert_quiet()


def test_a_second_end_and_late_chunks_change_nothing():
    bench = ordered(2, "direct")
    head, second = bench.request(request_id="head"), bench.request(request_id="second")
    row = (wire_id(second), [1], "stop")
    bench.batch(second.last_rank, [row, row])
    bench.batch(second.last_rank, [row])
    bench.batch(second.last_rank, [(wire_id(second), [2])])
    bench.finish(head)
    assert left(bench) == [("head", 9), "head", ("second", 1), "second"]
    bench.batch(head.last_rank, [(wire_id(head), [3], "stop")])
    assert left(bench) == []
    bench.assert_quiet()


def test_a_hit_that_is_asked_for_while_output_is_being_sent_comes_after_it():
    """A sink may submit from within a flush: between two turns, with more to come."""
    bench = cached(2, "direct")
    remember(bench)
    head = bench.request(OTHER, request_id="head")
    bench.batch(head.last_rank, [(wire_id(head), [1])])
    assert left(bench) == [("head", 1)]
    bench.request(ASKED, sampling=GREEDY, request_id="hit")
    assert left(bench) == []
    bench.finish(head)
    bench.request(ASKED, sampling=GREEDY, request_id="another")
    assert left(bench) == [("head", 9), "head", ("hit", 7, 8), "hit", ("another", 7, 8), "another"]
    bench.assert_quiet()
