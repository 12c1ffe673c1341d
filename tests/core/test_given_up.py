"""A rank gives up by itself what it has: a vLLM rank that ends in order does, and takes nothing more to an end."""

import pytest

from gateway.core.errors import Reason
from gateway.core.events import SendFailed
from gateway.types import Sampling
from tests.support.core import Bench, wire_id

ON = {"reroute": True, "resume": True, "max_attempts": 3}
MODES = ["direct", "queue", "batch"]


def make(ranks=2, mode="direct", protocol="vllm"):
    # The cheapest rank is the one with the least in flight: the one that gave everything up.
    policy = {"cost": "in_flight", "tie_break": "first"}
    return Bench(ranks, protocol, scheduling={"mode": mode}, failure=ON, policy=policy)


def greedy(max_tokens=6):
    return Sampling(max_tokens=max_tokens, temperature=0.0)


def give_up(bench, request, tokens=()):
    rank = request.sequences[0].attempt.rank
    bench.batch(rank, [(wire_id(request), list(tokens), "abort")])
    return rank


@pytest.mark.parametrize("mode", MODES)
def test_it_starts_again_at_another_rank(mode):
    bench = make(mode=mode)
    request = bench.request()
    assert give_up(bench, request) == 0
    second = request.sequences[0].attempt
    assert (second.rank, second.number) == (1, 2)
    assert bench.router.ranks.failures == [0, 0]
    bench.finish(request)
    bench.assert_quiet()


@pytest.mark.parametrize("mode", MODES)
def test_it_goes_on_there_with_what_it_has(mode):
    bench = make(mode=mode)
    request = bench.request([1, 2, 3], sampling=greedy(6))
    bench.batch(0, [(wire_id(request), [10, 11])])
    give_up(bench, request, [12])
    sent = bench.dispatched[-1]
    assert sent.rank == 1
    assert (sent.request.prompt_token_ids, sent.request.sampling.max_tokens) == ([1, 2, 3, 10, 11, 12], 3)
    bench.finish(request)
    bench.assert_quiet()


def test_what_cannot_go_on_elsewhere_ends_as_before():
    bench = make()
    request = bench.request(sampling=Sampling(max_tokens=6, temperature=1.0))
    give_up(bench, request, [10])
    assert (request.error.reason, request.error.retryable) == (Reason.ENGINE_REJECTED, True)
    bench.assert_quiet()


def test_a_pinned_one_stays_with_its_rank():
    bench = make()
    request = bench.request(pinned_rank=1)
    give_up(bench, request)
    assert request.error.reason is Reason.ENGINE_REJECTED
    bench.assert_quiet()


def test_where_there_is_no_other_rank_it_goes_back_so_many_times():
    bench = make(ranks=1)
    request = bench.request()
    for _ in range(3):
        assert request.error is None
        give_up(bench, request)
    assert request.error.reason is Reason.ENGINE_REJECTED
    assert bench.router.counters.relaxed_filters["tried"] == 2
    bench.assert_quiet()


def test_a_decision_says_why_the_cheaper_rank_was_left_out():
    bench = make()
    busy = bench.request(pinned_rank=1)
    request = bench.request()
    give_up(bench, request)
    decision = bench.router.decisions.latest(1)[0]
    assert decision.reasons() == ["tried", "eligible"]
    bench.finish(request)
    bench.finish(busy)


def test_in_a_queue_it_is_not_kept_back_for_the_rank_that_gave_it_up():
    scheduling = {"mode": "queue", "queue": {"hold_ratio": 0.9, "max_hold_s": 1.0}}
    bench = Bench(2, scheduling=scheduling, failure=ON, policy={"cost": "1 + in_flight", "tie_break": "first"})
    busy = bench.request(pinned_rank=1)
    request = bench.request()
    assert give_up(bench, request) == 0
    assert (request.sequences[0].entry, request.sequences[0].attempt.rank) == (None, 1)
    assert bench.router.decisions.latest(1)[0].gates() == ["tried", "open"]
    bench.finish(request)
    bench.finish(busy)
    bench.assert_quiet()


def test_an_abort_of_the_other_family_may_be_a_refusal_and_is_final():
    bench = make(protocol="tokenspeed")
    request = bench.request()
    give_up(bench, request)
    assert request.error.reason is Reason.ENGINE_REJECTED
    bench.assert_quiet()


def test_a_send_that_failed_is_not_tried_where_it_failed():
    bench = make()
    busy = bench.request(pinned_rank=1)
    request = bench.request()
    attempt = request.sequences[0].attempt
    bench.send(SendFailed(attempt.rank, attempt.incarnation, attempt.wire_id, "refused"))
    assert request.sequences[0].attempt.rank == 1
    bench.finish(request)
    bench.finish(busy)
    bench.assert_quiet()
