"""What becomes of sequences whose rank is lost: re-routed, resumed, or ended."""

import pytest

from gateway.core.effects import AbortOnRank, Dispatch, RankStateChanged
from gateway.core.errors import Reason
from gateway.core.events import (
    DrainStarted,
    RankDrained,
    RankLost,
    RankUndrained,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    Tick,
)
from gateway.core.lifecycle import Phase
from gateway.types import Sampling, TokenLogprob
from tests.support.core import Bench, wire_id

ON = {"reroute": True, "resume": True}
MODES = ["direct", "queue", "batch"]


def make(ranks=2, mode="direct", failure=None, **more):
    return Bench(ranks, scheduling={"mode": mode}, failure=ON | (failure or {}), **more)


def greedy(max_tokens=6, **more):
    return Sampling(max_tokens=max_tokens, temperature=0.0, **more)


def attempt_of(request, index=0):
    return request.sequences[index].attempt


def lose(bench, rank):
    return bench.send(RankLost(rank, bench.router.ranks.incarnation[rank], "gone"))


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_without_a_token_starts_again_elsewhere(mode):
    bench = make(mode=mode)
    request = bench.request([1, 2, 3], sampling=Sampling(max_tokens=4, temperature=0.7))
    first = attempt_of(request)
    lose(bench, first.rank)
    second = attempt_of(request)
    assert (second.rank, second.number) == (1 - first.rank, 2)
    assert second.wire_id != first.wire_id
    assert bench.dispatched[-1].request.prompt_token_ids == [1, 2, 3]
    assert bench.dispatched[-1].request.sampling.max_tokens == 4
    bench.finish(request)
    bench.assert_quiet()
    assert (bench.router.counters.reroutes, bench.router.counters.resumes) == (1, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_greedy_sequence_goes_on_with_what_it_has(mode):
    bench = make(mode=mode)
    request = bench.request([1, 2, 3], sampling=greedy(6, min_tokens=4))
    first = attempt_of(request)
    bench.batch(first.rank, [(first.wire_id, [7, 8])])
    request.sequences[0].take()
    lose(bench, first.rank)
    sent = bench.dispatched[-1].request
    assert list(sent.prompt_token_ids) == [1, 2, 3, 7, 8]
    assert (sent.sampling.max_tokens, sent.sampling.min_tokens) == (4, 2)
    second = attempt_of(request)
    assert (second.prompt_tokens, second.max_tokens) == (5, 4)
    bench.batch(first.rank, [(first.wire_id, [99])])
    bench.batch(second.rank, [(second.wire_id, [9, 10, 11, 12], "length")])
    assert list(request.sequences[0].take()[0]) == [9, 10, 11, 12]
    assert (request.error, request.sequences[0].completion_tokens) == (None, 6)
    bench.assert_quiet()
    assert bench.router.counters.resumes == 1


@pytest.mark.parametrize(
    ("sampling", "fields", "failure"),
    [
        (Sampling(max_tokens=6, temperature=1.0), {}, {}),
        (Sampling(max_tokens=6, temperature=1.0, seed=3), {}, {}),
        (greedy(frequency_penalty=0.1), {}, {}),
        (greedy(presence_penalty=0.1), {}, {}),
        (greedy(repetition_penalty=1.1), {}, {}),
        (greedy(), {"allow_resume": False}, {}),
        (greedy(), {"pinned_rank": 0}, {}),
        (greedy(), {}, {"resume": False}),
        (greedy(), {}, {"max_attempts": 1}),
    ],
)
def test_what_another_rank_cannot_continue_ends_with_what_was_delivered(sampling, fields, failure):
    bench = make(failure=failure)
    request = bench.request([1], sampling=sampling, **fields)
    attempt = attempt_of(request)
    bench.batch(attempt.rank, [(attempt.wire_id, [7, 8])])
    lose(bench, attempt.rank)
    assert request.error.reason is Reason.RANK_LOST
    assert (request.error.facts["delivered_tokens"], request.error.facts["attempts"]) == (2, 1)
    bench.assert_quiet()


def test_attempts_are_bounded_over_all_losses():
    bench = make(4, failure={"max_attempts": 3})
    request = bench.request(sampling=greedy())
    for number in (1, 2):
        lose(bench, attempt_of(request).rank)
        assert attempt_of(request).number == number + 1
    lose(bench, attempt_of(request).rank)
    assert request.error.reason is Reason.RANK_LOST
    bench.assert_quiet()


def test_without_another_rank_mode_direct_ends_it_and_a_queue_waits():
    bench = make(1)
    request = bench.request(sampling=greedy())
    lose(bench, 0)
    assert request.error.reason is Reason.RANK_LOST
    bench = make(1, "queue")
    request = bench.request(sampling=greedy())
    lose(bench, 0)
    assert (request.is_settled, bench.router.queue_depth) == (False, 1)
    bench.join(0)
    bench.finish(request)
    assert request.error is None
    bench.assert_quiet()


def test_a_queued_retry_stands_where_its_first_attempt_stood():
    slots = {"queue": {"order": "fcfs", "max_in_flight_per_rank": 1}}
    bench = Bench(2, scheduling={"mode": "queue"} | slots, failure=ON)
    requests = [bench.request() for _ in range(4)]
    lost = attempt_of(requests[0])
    lose(bench, lost.rank)
    other = attempt_of(requests[1])
    bench.batch(other.rank, [(other.wire_id, [5], "length")])
    assert attempt_of(requests[0]).rank == other.rank, "before those that came later"
    assert attempt_of(requests[2]) is None


def test_only_the_lost_sequence_of_a_request_moves():
    bench = make(3)
    request = bench.request(n=2, sampling=greedy())
    kept, lost = attempt_of(request, 0), attempt_of(request, 1)
    assert kept.rank != lost.rank
    lose(bench, lost.rank)
    assert attempt_of(request, 0) is kept
    assert attempt_of(request, 1).number == 2
    bench.finish(request)
    bench.assert_quiet()


def test_a_send_that_fails_is_tried_elsewhere():
    bench = make()
    request = bench.request()
    first = attempt_of(request)
    bench.send(SendFailed(first.rank, 1, wire_id(request), "unreachable"))
    assert attempt_of(request).number == 2
    assert not bench.aborted
    bench.finish(request)
    bench.assert_quiet()


def test_a_deadline_holds_for_all_attempts():
    bench = make(3)
    request = bench.request(deadline_at=bench.now + 1, sampling=greedy())
    lose(bench, attempt_of(request).rank)
    bench.now += 2
    bench.send(Tick())
    assert request.error.reason is Reason.DEADLINE_EXCEEDED
    bench.assert_quiet()


def test_a_gateway_that_drains_still_moves_what_it_has():
    bench = make()
    request = bench.request()
    bench.send(DrainStarted())
    lose(bench, attempt_of(request).rank)
    assert request.phase is Phase.IN_FLIGHT


def test_a_coupled_group_is_lost_as_one_and_its_work_goes_to_another_group():
    groups = [
        {"name": name, "protocol": "vllm", "handshake": f"tcp://127.0.0.1:3050{n}", "ranks": 2, "coupled": n == 0}
        for n, name in enumerate("ab")
    ]
    bench = Bench(groups=groups, failure=ON)
    requests = [bench.request([1] * 9) for _ in range(4)]
    before = [attempt_of(request) for request in requests]
    effects = lose(bench, 0)
    assert [effect.new for effect in effects if isinstance(effect, RankStateChanged)] == ["LOST", "LOST"]
    dispatched = [effect.rank for effect in effects if isinstance(effect, Dispatch)]
    assert all(rank in (2, 3) for rank in dispatched)
    assert len(dispatched) == sum(attempt.rank in (0, 1) for attempt in before)
    for request in requests:
        bench.finish(request)
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_a_drained_rank_gets_nothing_new_until_it_is_undrained(mode):
    bench = make(mode=mode)
    held = bench.request(pinned_rank=0)
    bench.send(RankDrained(0))
    assert bench.router.ranks.state[0] == "DRAINING"
    sent = [attempt_of(bench.request()) for _ in range(4)]
    assert {attempt.rank for attempt in sent if attempt is not None} == {1}
    bench.batch(0, [(wire_id(held), [4])])
    assert held.phase is Phase.STREAMING
    before = len(bench.dispatched)
    bench.send(RankUndrained(0))
    assert bench.router.ranks.state[0] == "READY"
    bench.request(pinned_rank=0)
    bench.now += 1  # mode batch: its window
    bench.send(Tick())
    assert 0 in [dispatch.rank for dispatch in bench.dispatched[before:]]


def test_migrating_aborts_here_and_goes_on_there_but_only_what_has_a_way():
    bench = make()
    movable, stuck = bench.request(pinned_rank=None, sampling=greedy()), bench.request(pinned_rank=0)
    rank = attempt_of(movable).rank
    effects = bench.send(RankDrained(rank, migrate=True))
    assert attempt_of(movable).rank == 1 - rank
    assert any(isinstance(effect, AbortOnRank) and effect.rank == rank for effect in effects)
    assert attempt_of(stuck).number == 1
    bench.finish(movable)
    bench.finish(stuck)
    bench.assert_quiet()
    alone = make(1)
    request = alone.request(sampling=greedy())
    alone.send(RankDrained(0, migrate=True))
    assert attempt_of(request).number == 1, "it ends where it is: nobody else could take it"


def test_a_rank_that_is_restarted_while_it_drains_comes_back_ready():
    bench = make()
    bench.send(RankDrained(0))
    lose(bench, 0)
    bench.join(0)
    assert bench.router.ranks.state[0] == "READY"


@pytest.mark.parametrize("cache", [None, {"max_entry_bytes": 1024}, {"max_entry_bytes": 1024, "coalesce": True}])
def test_the_response_cache_has_no_say_in_what_can_be_resumed(cache):
    bench = make(**({} if cache is None else {"response_cache": cache}))
    request = bench.request(sampling=greedy(100, logprobs=0))
    rank = attempt_of(request).rank
    bench.batch(rank, [(wire_id(request), range(20))], logprobs=[[TokenLogprob(-0.1)] * 20])
    lose(bench, rank)
    assert request.error is None
    assert bench.dispatched[-1].request.prompt_token_ids[-20:] == list(range(20))
    record = request.sequences[0].record
    assert (record.is_answer, record.logprobs) == (False, []), "20 x 64 bytes are more than the cache keeps"


def test_what_another_rank_needs_is_kept_no_longer_than_it_may_be_needed():
    bench = make(failure={"resume": False}, response_cache={"max_entry_bytes": 520})
    request = bench.request(sampling=greedy(200))
    bench.batch(attempt_of(request).rank, [(wire_id(request), range(131))])
    assert request.sequences[0].record is None
    bench.finish(request)
    cache = bench.router.response_cache
    assert (cache.entries, cache.too_large) == (0, 1)


def test_only_what_was_sent_counts_as_moved():
    bench = make(1, mode="queue")
    request, resumed = bench.request(), bench.request(sampling=greedy())
    bench.batch(0, [(wire_id(resumed), [9])])
    lose(bench, 0)
    counters = bench.router.counters
    assert (counters.reroutes, counters.resumes) == (0, 0)
    bench.join(0)
    assert (counters.reroutes, counters.resumes) == (1, 1)
    assert len(bench.dispatched) == 4
    lose(bench, 0)
    bench.tick(10.0)
    assert request.error.reason is Reason.RANK_LOST
    assert (counters.reroutes, counters.resumes) == (1, 1)


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_what_a_resumed_sequence_has_generated_counts_once_for_its_groups_budget(mode):
    groups = [
        {"name": "a", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 1, "budget": {"max_kv_tokens": 100}},
        {"name": "b", "protocol": "vllm", "handshake": "ipc:///b", "ranks": 1, "start_index": 1},
    ]
    bench = make(mode=mode, groups=groups)
    bench.send(SendBlocked(0, 1))
    resumed = bench.request([5] * 10, sampling=greedy(60))
    bench.batch(1, [(wire_id(resumed), range(40))])
    lose(bench, 1)
    other = bench.request([5] * 10, max_tokens=20)
    bench.send(SendUnblocked(0, 1))
    assert (resumed.last_rank, other.last_rank) == (0, 0), "70 and 30 KV tokens"
    assert bench.router.ranks.group_kv_tokens[0] == 100
