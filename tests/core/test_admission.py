"""Budgets of the gateway and of tenants: what is reserved, refused and given back, and the hint to the refused."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission import MAX_RETRY_S, MIN_RETRY_S, Admission
from gateway.core.errors import GatewayError, Reason
from gateway.core.request import Request
from tests.support.core import Bench, make_config


class Desk:
    """An admission with requests that come and go."""

    def __init__(self, mode="direct", **settings):
        self.bench = Bench(1, join=False)
        self.admission = Admission(make_config(1, scheduling={"mode": mode}, admission=settings))
        self.live = []

    def check(self, prompt=10, *, max_tokens=10, n=1, tenant="", queued=0, at_level=0, now=0.0, priority=0):
        arrived = self.bench.arrived([1] * prompt, max_tokens=max_tokens, n=n, tenant=tenant, priority=priority)
        return arrived, self.admission.check(arrived, now, queued=queued, queued_at_level=at_level)

    def accept(self, *args, **more):
        arrived, account = self.check(*args, **more)
        request = Request(len(self.live), arrived, 0.0)
        self.admission.reserve(request, account)
        self.live.append(request)
        return request

    def end(self, request, now=0.0):
        self.admission.give_back(request, request.unfinished, now)
        self.live.remove(request)

    def refuse(self, *args, **more):
        with pytest.raises(GatewayError) as caught:
            self.check(*args, **more)
        return caught.value


def test_a_request_is_charged_with_all_of_its_sequences():
    desk = Desk(max_kv_tokens=1000)
    request = desk.accept(prompt=7, max_tokens=5, n=3)
    admission, account = desk.admission, request.account
    assert (admission.sequences, admission.prompt_tokens, admission.kv_tokens) == (3, 21, 36)
    assert (account.in_flight, account.prompt_tokens, account.kv_tokens) == (3, 21, 36)
    desk.admission.check_sums(desk.live)
    desk.end(request)
    assert (admission.sequences, admission.prompt_tokens, admission.kv_tokens) == (0, 0, 0)
    assert (account.in_flight, account.prompt_tokens, account.kv_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 0),
        ({"max_prompt_tokens": 1000}, 7),
        ({"tenants": {"default": {"max_prompt_tokens": 1000}}}, 7),
        ({"tenants": {"named": {"a": {"max_kv_tokens": 1000}}}}, 7),
    ],
)
def test_tokens_are_counted_where_somebody_has_a_budget_of_them(settings, tokens):
    desk = Desk(**settings)
    request = desk.accept(prompt=7)
    assert (desk.admission.sequences, desk.admission.prompt_tokens) == (1, tokens)
    assert (request.account.in_flight, request.account.prompt_tokens) == (1, tokens)
    desk.admission.check_sums(desk.live)


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({"max_in_flight": 4}, "sequences"),
        ({"max_prompt_tokens": 40}, "prompt_tokens"),
        ({"max_kv_tokens": 80}, "kv_tokens"),
    ],
)
def test_every_budget_is_filled_to_its_bound_and_no_further(limits, budget):
    desk = Desk(**limits)
    first = [desk.accept() for _ in range(4)]
    error = desk.refuse()
    assert (error.reason, error.retryable, error.facts["budget"]) == (Reason.GATEWAY_FULL, True, budget)
    assert error.retry_after_s == 1.0, "nothing ended yet, so nothing is known"
    desk.end(first[0])
    desk.accept()
    error = desk.refuse(n=2)
    assert error.reason is Reason.GATEWAY_FULL, "all or nothing: not one of two"


@pytest.mark.parametrize("limits", [{"max_in_flight": 4}, {"max_prompt_tokens": 40}, {"max_kv_tokens": 80}])
def test_what_exceeds_a_bound_alone_is_told_not_to_come_back(limits):
    error = Desk(**limits).refuse(n=5)
    assert (error.reason, error.retryable, error.retry_after_s) == (Reason.GATEWAY_FULL, False, None)
    assert "never" in error.message


@pytest.mark.parametrize("limit", ["max_in_flight", "max_prompt_tokens", "max_kv_tokens", "max_queue_depth"])
def test_a_tenant_has_bounds_of_its_own(limit):
    amount = {"max_in_flight": 1, "max_prompt_tokens": 10, "max_kv_tokens": 20, "max_queue_depth": 1}[limit]
    desk = Desk("queue", tenants={"named": {"small": {limit: amount}}})
    request = desk.accept(tenant="small")
    request.account.queued = 1
    error = desk.refuse(tenant="small")
    assert (error.reason, error.retryable, error.facts["tenant"]) == (Reason.TENANT_LIMIT, True, "small")
    desk.accept(tenant="other")
    request.account.queued = 0
    desk.end(request)
    desk.accept(tenant="small")


def test_tenants_share_the_queue_by_weight_while_both_are_there():
    desk = Desk("queue", max_queue_depth=40, tenants={"named": {"a": {"weight": 3}, "b": {"weight": 1}}})
    only = desk.accept(tenant="a").account
    only.queued = 39
    desk.check(tenant="a", queued=39)
    other = desk.accept(tenant="b", queued=39).account
    error = desk.refuse(tenant="a", queued=39)
    assert (error.reason, error.facts["budget"], error.facts["limit"]) == (Reason.TENANT_LIMIT, "queue_share", 30)
    other.queued = 9
    desk.check(tenant="b", queued=30)
    other.queued = 10
    assert desk.refuse(tenant="b", queued=30).facts["limit"] == 10
    # Less than half of the queue is used: nobody is held to a share.
    desk.check(tenant="b", queued=19)


def test_the_queue_is_bounded_as_a_whole_and_by_level():
    desk = Desk("queue", max_queue_depth=10)
    desk.check(queued=9)
    error = desk.refuse(queued=10)
    assert (error.reason, error.retryable) == (Reason.QUEUE_FULL, True)
    assert error.facts == {"queue_depth": 10, "limit": 10}
    assert not desk.refuse(n=11).retryable, "more sequences than the queue can ever hold"
    levels = {"queue": {"levels": [{"priority": 2, "max_depth": 3}]}}
    config = make_config(1, scheduling={"mode": "queue"} | levels)
    desk.admission = Admission(config)
    desk.check(queued=9, at_level=3, priority=1)
    assert desk.refuse(queued=9, at_level=3, priority=2).facts["limit"] == 3


def test_direct_mode_has_no_queue_to_fill():
    Desk(max_queue_depth=1).check(queued=10**6)


def test_the_hint_follows_the_rate_of_ends():
    desk = Desk(max_in_flight=30)
    requests = [desk.accept() for _ in range(20)]
    for number in range(10):
        desk.end(requests[number], number * 0.2)
    admission = desk.admission
    assert admission.retry_after_s(1) == pytest.approx(0.2)
    assert admission.retry_after_s(4) == pytest.approx(0.8)
    error = desk.refuse(n=22)
    assert error.retry_after_s == pytest.approx(0.4), "two more than there is room for"


def test_a_single_gap_changes_the_hint_a_little():
    desk = Desk()
    requests = [desk.accept() for _ in range(3)]
    for request, at in zip(requests, (0.0, 1.0, 1.0), strict=True):
        desk.end(request, at)
    assert desk.admission.retry_after_s(1) == pytest.approx(0.95)


@pytest.mark.parametrize(("gap", "bound"), [(1e-6, MIN_RETRY_S), (100.0, MAX_RETRY_S)])
def test_the_hint_is_bounded(gap, bound):
    desk = Desk()
    requests = [desk.accept() for _ in range(2)]
    desk.end(requests[0], 0.0)
    desk.end(requests[1], gap)
    assert desk.admission.retry_after_s(1) == bound


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4), st.sampled_from("abc"), st.booleans()),
        max_size=60,
    )
)
def test_sums_equal_the_live_requests_whatever_comes_and_goes(steps):
    desk = Desk(max_in_flight=12, max_prompt_tokens=200, max_kv_tokens=350)
    for number, (prompt, max_tokens, n, tenant, is_end) in enumerate(steps):
        if is_end and desk.live:
            desk.end(desk.live[number % len(desk.live)], float(number))
            continue
        with suppress(GatewayError):
            desk.accept(prompt, max_tokens=max_tokens, n=n, tenant=tenant, now=float(number))
        desk.admission.check_sums(desk.live)
        assert desk.admission.sequences <= 12
        assert desk.admission.prompt_tokens <= 200
        assert desk.admission.kv_tokens <= 350
    for request in list(desk.live):
        desk.end(request)
    assert (desk.admission.sequences, desk.admission.prompt_tokens, desk.admission.kv_tokens) == (0, 0, 0)
