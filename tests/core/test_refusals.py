"""Wording, retry advice and facts of the errors that the router makes."""

import pytest

from gateway.core import refusals
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankDrained
from gateway.core.request import Attempt, Request
from tests.support.core import Bench, make_info


def make_attempt(tokens_out=0):
    request = Request(1, Bench(1).arrived(max_tokens=7), now=0.0)
    attempt = Attempt(request.sequences[0], "id", 1, rank=3, incarnation=1, sent_at=0.0)
    attempt.tokens_out = tokens_out
    return attempt


@pytest.mark.parametrize("reason", list(refusals._ENDINGS))
def test_an_ending_keeps_its_reason_and_only_a_drain_is_worth_a_retry(reason):
    error = refusals.ended_by(reason)
    assert error.reason is reason
    assert error.message
    assert error.retryable is (reason is Reason.DRAINING)


@pytest.mark.parametrize(
    ("finish", "tokens", "reason", "is_retryable"),
    [
        ("abort", 0, Reason.ENGINE_REJECTED, True),
        ("abort", 2, Reason.ENGINE_REJECTED, True),
        ("error", 0, Reason.ENGINE_ERROR, False),
        ("error", 2, Reason.ENGINE_ERROR, False),
    ],
)
def test_an_engine_that_gives_up_is_worth_a_retry_and_one_that_fails_is_not(finish, tokens, reason, is_retryable):
    error = refusals.refused_by_engine(make_attempt(tokens), finish)
    assert (error.reason, error.retryable, error.facts["rank"]) == (reason, is_retryable, 3)
    assert (error.retry_after_s is not None) is is_retryable


@pytest.mark.parametrize(
    ("make", "reason"), [(refusals.rank_lost, Reason.RANK_LOST), (refusals.send_failed, Reason.SEND_FAILED)]
)
def test_another_rank_can_take_it(make, reason):
    error = make(3, "some cause")
    assert (error.reason, error.retryable, error.facts) == (reason, True, {"rank": 3})
    assert "some cause" in error.message
    assert error.retry_after_s > 0


def test_an_overrun_names_the_limit():
    error = refusals.overrun(make_attempt(7))
    assert (error.reason, error.retryable) == (Reason.ENGINE_ERROR, False)
    assert error.facts == {"rank": 3, "max_tokens": 7}


def refused(bench, *args, **request):
    with pytest.raises(GatewayError) as caught:
        bench.request(*args, **request)
    return caught.value


def test_a_rank_that_is_not_ready_is_named_with_its_state():
    bench = Bench(3)
    pinned = {"pinned_rank": 1}
    bench.lose(1)
    assert refused(bench, **pinned).message == "rank 1 is not READY (LOST); retry later or drop the pin"
    bench.send(RankDrained(0))
    assert "rank 0 is not READY (DRAINING); " in refused(bench, pinned_rank=0).message
    bench.lose(2)
    assert refused(bench).message == ("no rank that could take the request is READY (1 DRAINING, 2 LOST); retry later")
    absent = Bench(2, join=False)
    assert "rank 1 is not READY (ABSENT); " in refused(absent, **pinned).message
    assert "is READY (2 ABSENT); " in refused(absent).message
    assert "is READY (ABSENT); " in refused(Bench(1, join=False)).message


def test_no_rank_says_why_and_names_its_record():
    small = make_info(kv_capacity_tokens=100)
    full = Bench(1, admission={"max_in_flight_per_rank": 1})
    full.request()
    used = Bench(1, info=small)
    used.request([1] * 60)
    cases = (
        (Bench(1, info=small), [1] * 100, {}, Reason.KV_TOO_SMALL),
        (Bench(1, info=make_info(max_model_len=100)), [1] * 100, {}, Reason.PROMPT_TOO_LONG),
        (used, [1] * 60, {}, Reason.KV_FULL),
        (full, [1], {}, Reason.RANKS_FULL),
        (Bench(1, join=False), [1], {}, Reason.NO_ELIGIBLE_RANK),
        (Bench(2, join=False), [1], {"pinned_rank": 1}, Reason.PINNED_RANK_UNAVAILABLE),
    )
    for bench, prompt, more, reason in cases:
        error = refused(bench, prompt, **more)
        assert error.reason is reason
        assert error.retryable is (reason not in (Reason.PROMPT_TOO_LONG, Reason.KV_TOO_SMALL))
        assert (error.retry_after_s is not None) is error.retryable
        assert bench.router.decisions.get(error.facts["decision_id"]).refusal is reason
        assert error.facts.get("rank") == more.get("pinned_rank")
