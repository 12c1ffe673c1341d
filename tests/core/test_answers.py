"""Stored and shared answers through the whole router: what is a hit, what is kept, who waits for whom."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import AbortAll, CacheFlushed, DrainStarted
from gateway.core.lifecycle import Phase
from gateway.types import Sampling, TokenLogprob
from tests.support.core import Bench, wire_id

MODES = ["direct", "queue", "batch"]
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def caching(ranks=1, mode="direct", *, coalesce=False, slots=None, cache=None, **settings):
    scheduling = {"mode": mode} | ({"queue": {"max_in_flight_per_rank": slots}} if slots is not None else {})
    return Bench(ranks, scheduling=scheduling, response_cache={"coalesce": coalesce} | (cache or {}), **settings)


def ask(bench, prompt=(1, 2), **more):
    return bench.request(list(prompt), **({"sampling": GREEDY} | more))


def texts(bench):
    return [(request.arrived.request_id, tokens) for request, tokens in bench.flush()]


# ---- hits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_second_of_two_equal_requests_needs_no_rank(mode):
    bench = caching(mode=mode)
    bench.finish(ask(bench), [7, 8, 9])
    bench.flush()
    hit = ask(bench, request_id="hit")
    assert hit.is_ended
    assert (hit.error, hit.is_cached, hit.first_token_at, hit.ended_at) == (None, True, bench.now, bench.now)
    assert texts(bench) == [("hit", (7, 8, 9)), ("hit", None)]
    assert len(bench.dispatched) == 1
    bench.assert_quiet()


def test_a_hit_is_replayed_as_it_was_generated():
    bench = caching()
    sampling = Sampling(max_tokens=2, temperature=0.0, logprobs=1)
    first = ask(bench, n=2, sampling=sampling)
    logprobs = [TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-1.0, ((8, -1.0),))]
    for index, finish in enumerate(("stop", "length")):
        bench.batch(0, [(wire_id(first, index), [7, 8], finish)], logprobs=[logprobs], cached_tokens=[index])
    hit = ask(bench, n=2, sampling=sampling)
    assert [sequence.finish for sequence in hit.sequences] == ["stop", "length"]
    assert [sequence.cached_tokens for sequence in hit.sequences] == [0, 1]
    for sequence in hit.sequences:
        tokens, got = sequence.take()
        assert (list(tokens), got) == ([7, 8], logprobs)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": (1, 3)},
        {"tenant": "b"},
        {"cache_salt": "s"},
        {"n": 2},
        {"use_cache": False},
        {"pinned_rank": 0},
        {"sampling": Sampling(max_tokens=9, temperature=0.0)},
        {"sampling": Sampling(max_tokens=8)},
    ],
)
def test_what_may_get_another_answer_is_no_hit(changed):
    bench = caching()
    bench.finish(ask(bench))
    assert not ask(bench, **changed).is_ended


@pytest.mark.parametrize("end", ["cancelled", "deadline", "error", "abort", "lost", "slow", "sent in vain"])
def test_an_answer_that_is_not_complete_is_not_kept(end):
    bench = caching(limits={"max_stream_buffer_bytes": 400})
    request = ask(bench, sampling=Sampling(max_tokens=400, temperature=0.0), deadline_at=bench.now + 5)
    bench.batch(0, [(wire_id(request), [1, 3])])
    if end == "cancelled":
        bench.cancel(request, Reason.CANCELLED)
    elif end == "deadline":
        bench.tick(5.0)
    elif end == "lost":
        bench.lose(0)
        bench.join(0)
    elif end == "slow":
        bench.batch(0, [(wire_id(request), [1] * 300)])
    elif end == "sent in vain":
        bench.batch(0, [], failed_ids=[wire_id(request)], fault="ragged")
    else:
        bench.batch(0, [(wire_id(request), [3], end)])
    assert request.error is not None
    assert bench.router.response_cache.entries == 0
    again = ask(bench, sampling=Sampling(max_tokens=400, temperature=0.0))
    assert not again.is_ended, "a miss"
    bench.finish(again)
    assert ask(bench, sampling=Sampling(max_tokens=400, temperature=0.0)).is_cached


def test_a_request_that_is_cancelled_in_the_queue_leaves_no_answer():
    """It is not executed and not stored: the next one like it is a miss, the one after that a hit."""
    bench = caching(mode="queue", slots=1)
    running = ask(bench, (5,))
    bench.cancel(ask(bench), Reason.CANCELLED)
    bench.finish(running)
    assert len(bench.dispatched) == 1
    miss = ask(bench)
    assert not miss.is_ended
    bench.finish(miss)
    assert ask(bench).is_cached


def test_stored_answers_get_old_and_can_be_flushed():
    bench = caching(cache={"ttl_s": 5.0})
    bench.finish(ask(bench))
    bench.now += 5.0
    again = ask(bench)
    assert not again.is_ended
    bench.finish(again)
    assert bench.router.response_cache.entries == 1
    bench.send(CacheFlushed())
    assert bench.router.response_cache.entries == bench.router.response_cache.nbytes == 0
    assert not ask(bench).is_ended
    assert Bench(1).send(CacheFlushed()) == []


@pytest.mark.parametrize("mode", ["queue", "batch"])
def test_a_hit_takes_nothing_of_any_budget(mode):
    bench = caching(mode=mode, slots=1, admission={"max_in_flight": 2, "max_queue_depth": 1})
    bench.finish(ask(bench))
    ask(bench, (5,))
    ask(bench, (6,))
    assert bench.offer([7]).reason is Reason.GATEWAY_FULL
    assert ask(bench).is_cached


def test_a_hit_needs_no_rank_at_all_but_a_gateway_that_is_not_draining():
    bench = caching()
    bench.finish(ask(bench))
    bench.lose(0)
    assert ask(bench).is_cached
    bench.send(DrainStarted())
    assert bench.offer([1, 2], sampling=GREEDY).reason is Reason.DRAINING


# ---- shared answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_equal_requests_wait_for_the_first_of_them(mode):
    bench = caching(2, mode, coalesce=True)
    leader = ask(bench, request_id="leader")
    followers = [ask(bench, request_id=f"f{number}") for number in (1, 2)]
    other = ask(bench, (3,), request_id="other")
    assert [request.phase for request in followers] == [Phase.ACCEPTED] * 2
    assert len(bench.dispatched) == 2
    assert bench.router.live_count == 4
    bench.finish(leader, [7, 8])
    assert texts(bench) == [
        ("leader", (7, 8)),
        ("leader", None),
        ("f1", (7, 8)),
        ("f1", None),
        ("f2", (7, 8)),
        ("f2", None),
    ]
    assert all(request.is_cached and request.error is None for request in followers)
    bench.finish(other)
    bench.assert_quiet()


def test_followers_count_against_the_budgets_until_they_end():
    bench = caching(coalesce=True, admission={"max_in_flight": 2})
    leader = ask(bench)
    ask(bench)
    assert bench.offer([9]).reason is Reason.GATEWAY_FULL
    bench.finish(leader)
    bench.finish(ask(bench, (9,)))
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["cancelled", "failed", "late"])
def test_when_the_first_gets_no_answer_the_next_one_asks_and_the_rest_wait_for_it(mode, how):
    bench = caching(mode=mode, coalesce=True)
    leader = ask(bench, request_id="leader", deadline_at=bench.now + 5)
    second, third = ask(bench, request_id="second"), ask(bench, request_id="third")
    if how == "cancelled":
        bench.cancel(leader, Reason.CANCELLED)
    elif how == "failed":
        bench.batch(0, [(wire_id(leader), [1], "error")])
    else:
        bench.tick(5.0)
    assert leader.error is not None
    assert (second.phase, third.phase) == (Phase.IN_FLIGHT, Phase.ACCEPTED)
    bench.finish(second, [7])
    assert texts(bench)[-2:] == [("third", (7,)), ("third", None)]
    bench.assert_quiet()


def test_a_follower_that_leaves_is_forgotten_at_once_and_disturbs_nobody():
    bench = caching(coalesce=True)
    leader = ask(bench)
    stays = ask(bench)
    for _ in range(20):
        bench.cancel(ask(bench), Reason.CANCELLED)
    assert [len(waiting) for waiting in bench.router._answers._followers.values()] == [1]
    bench.cancel(stays, Reason.CANCELLED)
    assert bench.router._answers._followers == {}
    bench.finish(leader)
    assert leader.error is None
    assert len(bench.dispatched) == 1
    bench.assert_quiet()


def test_a_follower_has_a_deadline_of_its_own():
    bench = caching(coalesce=True)
    leader = ask(bench, deadline_at=bench.now + 9)
    follower = ask(bench, deadline_at=bench.now + 1)
    bench.tick(1.0)
    assert follower.error.reason is Reason.DEADLINE_EXCEEDED
    assert bench.aborted == [], "it had nothing to abort"
    bench.finish(leader)
    bench.assert_quiet()


def test_followers_of_one_that_finds_no_rank_get_their_own_refusals_as_ends():
    bench = caching(coalesce=True)
    ask(bench)
    followers = [ask(bench) for _ in range(3)]
    bench.lose(0)
    assert [request.error.reason for request in followers] == [Reason.NO_ELIGIBLE_RANK] * 3
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_nobody_is_sent_out_in_the_place_of_one_that_is_aborted_with_all(mode):
    bench = caching(mode=mode, coalesce=True)
    for _ in range(4):
        ask(bench)
    bench.send(AbortAll(Reason.DRAINING))
    assert len(bench.dispatched) == 1
    assert [request.error.reason for request in bench.ended] == [Reason.DRAINING] * 4
    bench.assert_quiet()


def test_an_answer_that_is_too_large_to_store_is_not_shared_either():
    bench = caching(coalesce=True, cache={"max_entry_bytes": 8})
    leader, follower = ask(bench), ask(bench)
    bench.finish(leader, [1, 2, 3])
    assert follower.phase is Phase.IN_FLIGHT, "it asks for itself"
    bench.finish(follower, [1, 2, 3])
    assert bench.router.response_cache.entries == 0
    bench.assert_quiet()


def test_followers_keep_their_places_in_a_preserved_order():
    bench = caching(2, coalesce=True, ordering="preserve", limits={"default_deadline_s": 60})
    leader = ask(bench, request_id="leader")
    other = ask(bench, (3,), request_id="other")
    ask(bench, request_id="follower")
    bench.finish(leader, [7])
    assert texts(bench) == [("leader", (7,)), ("leader", None)]
    bench.finish(other, [5])
    assert texts(bench) == [("other", (5,)), ("other", None), ("follower", (7,)), ("follower", None)]
    bench.assert_quiet()


def test_without_sharing_equal_requests_go_each_to_a_rank():
    bench = caching(2)
    ask(bench)
    ask(bench)
    assert len(bench.dispatched) == 2
