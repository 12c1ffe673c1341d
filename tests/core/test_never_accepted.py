"""What no idle fleet could take is refused as such: not retryable, with a message that says what to ask for."""

import pytest

from gateway.core.errors import Reason
from gateway.types import Sampling
from tests.support.core import Bench, make_info

GROUP = {"name": "g", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 2}


def fleet(budget, **more):
    return Bench(groups=[GROUP | {"budget": budget}], **more)


@pytest.mark.parametrize(
    ("make", "ask", "most", "reason"),
    [
        (lambda: Bench(1, admission={"max_in_flight_per_rank": 4}), {"n": 8}, 4, Reason.RANKS_FULL),
        (lambda: fleet({"max_requests": 2}), {"n": 3}, 2, Reason.RANKS_FULL),
        (lambda: fleet({"max_prompt_tokens": 100}), {"prompt": [1] * 60, "n": 2}, 1, Reason.RANKS_FULL),
        (lambda: fleet({"max_kv_tokens": 100}), {"max_tokens": 40, "n": 3}, 2, Reason.RANKS_FULL),
        (lambda: Bench(2, info=make_info(kv_capacity_tokens=100)), {"prompt": [1] * 60, "n": 3}, 2, Reason.KV_FULL),
        (lambda: Bench(2, admission={"max_in_flight_per_rank": 2}), {"n": 3, "pinned_rank": 1}, 2, Reason.RANKS_FULL),
    ],
)
def test_more_sequences_than_all_ranks_hold_together(make, ask, most, reason):
    bench = make()
    error = bench.offer(**ask)
    assert (error.reason, error.retryable, error.retry_after_s) == (reason, False, None)
    assert (error.facts["n"], error.facts["limit"]) == (ask["n"], most)
    bench.assert_quiet()
    assert bench.request(**ask | {"n": most}).last_rank is not None


def test_what_only_the_present_load_keeps_out_may_be_sent_again():
    bench = Bench(2, admission={"max_in_flight_per_rank": 2})
    bench.request()
    error = bench.offer(n=4)
    assert (error.reason, error.retryable) == (Reason.RANKS_FULL, True)
    assert error.retry_after_s is not None


def test_ranks_that_are_away_count():
    bench = Bench(2, admission={"max_in_flight_per_rank": 2})
    bench.lose(1)
    assert bench.offer(n=4).retryable
    assert not bench.offer(n=5).retryable


def test_the_free_tokens_of_idle_ranks_count_only_where_they_are_a_filter():
    bench = Bench(1, info=make_info(kv_capacity_tokens=100), filters={"kv_fit": "soft"})
    bench.request([1] * 60, n=3)


def test_with_a_queue_the_sequences_of_a_request_go_one_after_the_other():
    bench = Bench(1, admission={"max_in_flight_per_rank": 4}, scheduling={"mode": "queue"})
    request = bench.request(n=8)
    assert bench.router.queue_depth == 4
    bench.finish(request)


@pytest.mark.parametrize("mode", ["direct", "queue"])
def test_output_that_is_too_much_for_every_group_is_no_long_prompt(mode):
    bench = fleet({"max_kv_tokens": 100}, scheduling={"mode": mode})
    error = bench.offer([1] * 5, max_tokens=200)
    assert (error.reason, error.retryable) == (Reason.KV_TOO_SMALL, False)
    assert "205" in error.message
    assert "max_tokens" in error.message
    assert bench.offer([1] * 101, max_tokens=1).reason is Reason.PROMPT_TOO_LONG
    assert bench.request([1] * 5, max_tokens=95).last_rank is not None


def test_an_answer_larger_than_what_may_be_held_back_is_refused_for_good():
    bench = Bench(1, ordering="preserve", limits={"default_deadline_s": 10}, preserve={"max_held_bytes": 100})
    head = bench.request(max_tokens=1000)
    error = bench.offer(max_tokens=26)
    assert (error.reason, error.retryable, error.retry_after_s) == (Reason.ORDER_FULL, False, None)
    assert "104 bytes" in error.message
    bench.request(max_tokens=20)
    transient = bench.offer(max_tokens=25)
    assert (transient.reason, transient.retryable) == (Reason.ORDER_FULL, True)
    bench.finish(head)


def test_a_hit_that_is_refused_was_not_given():
    greedy = Sampling(max_tokens=4, temperature=0.0)
    bench = Bench(
        1, ordering="preserve", limits={"default_deadline_s": 10}, preserve={"max_places": 1}, response_cache={}
    )
    bench.finish(bench.request([9] * 5, sampling=greedy))
    running = bench.request([4] * 4)
    assert bench.offer([9] * 5, sampling=greedy).reason is Reason.ORDER_FULL
    assert bench.router.response_cache.hits == 0
    bench.finish(running)
    assert bench.request([9] * 5, sampling=greedy).is_cached
    assert bench.router.response_cache.hits == 1
