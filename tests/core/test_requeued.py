"""Modes queue and batch: sequences that have lost their rank and wait for another one, and how they end if none comes."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import RankDrained, SendBlocked, SendFailed, SendUnblocked
from gateway.types import Sampling
from tests.support.core import Bench, make_info, wire_id

GREEDY = Sampling(max_tokens=50, temperature=0.0)
MODES = ["queue", "batch"]


def make(ranks=2, mode="queue", queue=None, **more):
    scheduling = {"mode": mode, "queue": queue or {}}
    if mode == "batch":
        scheduling["batch"] = {"max_in_flight_batches": 4}
    return Bench(ranks, failure={"reroute": True, "resume": True}, scheduling=scheduling, **more)


def started(bench, tokens=range(10), **more):
    request = bench.request(sampling=GREEDY, **more)
    if tokens:
        bench.batch(request.last_rank, [(wire_id(request), list(tokens))])
    return request


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(), range(10)])
def test_a_time_out_is_a_loss_with_what_was_delivered_and_counts_from_the_loss(mode, tokens):
    bench = make(mode=mode, queue={"timeout_s": 1.0, "max_in_flight_per_rank": 1})
    request, _ = started(bench, tokens), started(bench)
    bench.tick(100.0)
    bench.lose(request.last_rank)
    bench.tick(0.9)
    assert not request.is_settled
    bench.tick(0.11)
    error = request.error
    assert (error.reason, error.retryable) == (Reason.RANK_LOST, True)
    assert error.message.startswith(
        "rank 0 was lost (disconnected), and no other rank could go on: no rank had room for 1.0"
    )
    assert error.facts["delivered_tokens"] == len(tokens)
    assert (error.facts["attempts"], error.facts["rank"]) == (1, 0)
    assert error.facts["waited_ms"] == pytest.approx(1010)
    assert bench.router.counters.queue_timeouts == 1


@pytest.mark.parametrize("mode", MODES)
def test_so_is_a_wait_without_any_rank(mode):
    bench = make(1, mode, {"no_rank_wait_s": 1.0})
    request = started(bench)
    bench.lose(0)
    bench.tick(1.0)
    assert request.error.reason is Reason.RANK_LOST
    assert (request.error.facts["delivered_tokens"], request.error.facts["waited_s"]) == (10, 1.0)
    bench.assert_quiet()


def test_its_wait_for_a_rank_begins_with_its_loss_however_long_others_were_away():
    bench = make(queue={"no_rank_wait_s": 3.0})
    request = started(bench)
    bench.lose(1 - request.last_rank)
    bench.send(RankDrained(request.last_rank))
    for _ in range(4):
        bench.tick(10.0)
        bench.batch(request.last_rank, [(wire_id(request), [5])])
    bench.lose(request.last_rank)
    bench.tick(2.9)
    assert not request.is_settled
    bench.tick(0.2)
    assert request.error.reason is Reason.RANK_LOST


@pytest.mark.parametrize("mode", MODES)
def test_so_is_one_that_has_become_too_long_for_every_rank(mode):
    bench = make(mode=mode, join=False)
    bench.join(0)
    bench.join(1, info=make_info(max_model_len=40))
    bench.send(SendBlocked(1, 1))
    request = started(bench, prompt=[5] * 35)
    bench.send(SendUnblocked(1, 1))
    bench.lose(0)
    assert not request.is_settled, "rank 0 could, if it came back"
    bench.join(0, info=make_info(max_model_len=40))
    assert request.error.reason is Reason.RANK_LOST
    assert request.error.facts["delivered_tokens"] == 10
    bench.assert_quiet()


def test_what_never_left_the_gateway_ends_as_that():
    bench = make(1, queue={"timeout_s": 1.0})
    request = started(bench, ())
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))
    bench.tick(1.0)
    assert request.error.reason is Reason.SEND_FAILED
    assert request.error.facts["attempts"] == 1


def test_what_never_had_a_rank_ends_as_before():
    bench = make(queue={"timeout_s": 1.0, "max_in_flight_per_rank": 1})
    started(bench), started(bench)
    waiting = bench.request()
    bench.tick(1.0)
    assert waiting.error.reason is Reason.QUEUE_TIMEOUT
    assert "delivered_tokens" not in waiting.error.facts


def test_its_decision_tells_how_long_it_waited_for_that_rank():
    bench = make(1)
    request = started(bench)
    bench.tick(50.0)
    bench.lose(0)
    bench.tick(2.0)
    bench.join(0)
    decision = request.sequences[0].attempt.decision
    assert decision.queued_ms == pytest.approx(2000.0)


@pytest.mark.parametrize("mode", ["direct", *MODES])
def test_a_refused_send_goes_to_another_rank_and_the_refusing_one_is_shut(mode):
    bench = make(mode=mode, queue={"max_in_flight_per_rank": 9})
    busy = bench.request(pinned_rank=1)
    bench.tick(0.1)
    bench.batch(1, [(wire_id(busy), [3])])
    request = bench.request()
    assert request.last_rank == 0, "the idle one"
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))
    bench.tick(0.1)
    assert request.sequences[0].attempt.rank == 1
    assert bench.router.ranks.is_open == [False, True]
    assert bench.request().last_rank in (1, None)
    bench.tick(1.0)
    assert bench.sent.count(0) == 1
    bench.send(SendUnblocked(0, 1))
    assert bench.router.ranks.is_open == [True, True]


def test_a_stale_refusal_shuts_nobody():
    bench = make()
    request = bench.request()
    old = wire_id(request)
    bench.lose(0)
    bench.join(0)
    bench.send(SendFailed(0, 1, old, "unreachable"))
    assert bench.router.ranks.is_open == [True, True]


def test_a_rank_that_refuses_does_not_draw_the_queue():
    bench = make(queue={"max_in_flight_per_rank": 1})
    first = [bench.request() for _ in range(2)]
    queued = [bench.request() for _ in range(50)]
    bench.finish(next(request for request in first if request.last_rank == 0))
    (sent,) = bench.dispatched[2:]
    bench.send(SendFailed(0, 1, sent.request.wire_id, "unreachable"))
    assert len(bench.dispatched) == 3
    assert not any(request.is_settled for request in queued)
    assert bench.router.queue_depth == 50


@pytest.mark.parametrize("mode", MODES)
def test_room_is_kept_for_what_is_left_of_a_resumed_one(mode):
    groups = [
        {"name": "a", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 1, "budget": {"max_kv_tokens": 100}},
        {"name": "b", "protocol": "vllm", "handshake": "ipc:///b", "ranks": 1, "start_index": 1},
    ]
    bench = make(mode=mode, groups=groups, queue={"order": "fcfs"})
    bench.send(SendBlocked(0, 1))
    resumed = bench.request([5] * 10, sampling=Sampling(max_tokens=60, temperature=0.0))
    bench.batch(1, [(wire_id(resumed), range(40))])
    bench.send(SendUnblocked(0, 1))
    before = bench.request([5] * 20, max_tokens=20, pinned_rank=0)
    bench.tick(1.0)
    bench.lose(1)
    later = bench.request([5] * 20, max_tokens=20)
    assert (resumed.sequences[0].entry is not None, later.last_rank) == (True, None), "70 KV tokens go first"
    bench.finish(before)
    assert resumed.last_rank == 0
