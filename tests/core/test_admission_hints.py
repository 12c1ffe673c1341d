"""When the refused are told to come back: one after the other, at the rate at which there is room."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import MAX_RETRY_S, MIN_RETRY_S
from gateway.core.errors import GatewayError, Reason
from tests.support.core import Bench

GAP_S = 0.1
LIMIT = 8


def busy(**config):
    """Full, after releases that came every `GAP_S`."""
    bench = Bench(2, admission={"max_in_flight": LIMIT} | config.pop("admission", {}), **config)
    bench.live = [bench.request() for _ in range(LIMIT)]
    for _ in range(4):
        release(bench)
    return bench


def release(bench, *, refill=True):
    bench.now += GAP_S
    bench.finish(bench.live.pop(0))
    if refill:
        bench.live.append(bench.request())


def refuse(bench, **more):
    error = bench.offer(**more)
    assert isinstance(error, GatewayError)
    return error


def end(bench):
    for request in bench.live:
        bench.finish(request)
    bench.assert_quiet()


def test_callers_that_are_refused_together_come_back_one_by_one():
    bench = busy()
    hints = [refuse(bench).retry_after_s for _ in range(10)]
    assert [after - before for before, after in pairwise(hints)] == pytest.approx([GAP_S] * 9)
    assert hints[0] == pytest.approx(GAP_S)
    end(bench)


def test_each_release_takes_one_of_them_back():
    bench = busy()
    for _ in range(6):
        refuse(bench)
    before = bench.router._admission.retry_after_s(1)
    release(bench)
    assert bench.router._admission.retry_after_s(1) == pytest.approx(before - GAP_S)
    end(bench)


def test_ten_times_the_load_is_told_to_stay_away_for_long():
    bench = busy()
    for _ in range(60):
        for _ in range(9):
            error = refuse(bench)
        release(bench)
    assert error.retry_after_s > MAX_RETRY_S * 0.9
    assert bench.router._admission._expected_back <= MAX_RETRY_S / GAP_S
    end(bench)


def test_a_gateway_that_was_empty_has_forgotten_them():
    bench = busy()
    for _ in range(20):
        refuse(bench)
    while bench.live:
        release(bench, refill=False)
    assert bench.router._admission.retry_after_s(1) == pytest.approx(GAP_S)
    end(bench)


def test_a_full_tenant_makes_nobody_else_wait():
    bench = busy(admission={"max_in_flight": 2 * LIMIT, "tenants": {"named": {"greedy": {"max_in_flight": 1}}}})
    bench.live.append(bench.request(tenant="greedy"))
    for _ in range(5):
        assert refuse(bench, tenant="greedy").reason is Reason.TENANT_LIMIT
    assert bench.router._admission.retry_after_s(1) == pytest.approx(GAP_S)
    end(bench)


def test_what_can_never_be_accepted_is_not_expected_back():
    bench = busy()
    assert refuse(bench, n=LIMIT + 1).retry_after_s is None
    assert bench.router._admission.retry_after_s(1) == pytest.approx(GAP_S)
    end(bench)


@given(st.lists(st.booleans(), max_size=120))
def test_hints_are_bounded_and_grow_with_refusals_only(steps):
    bench = busy()
    admission = bench.router._admission
    for is_release in steps:
        before = admission.retry_after_s(1)
        if is_release:
            release(bench)
            assert admission.retry_after_s(1) <= before + 1e-9
        else:
            refuse(bench)
            assert admission.retry_after_s(1) >= before
        assert MIN_RETRY_S <= admission.retry_after_s(1) <= MAX_RETRY_S
        assert 0 <= admission._expected_back <= MAX_RETRY_S / GAP_S + 1
    end(bench)


def test_sequences_that_end_together_are_counted_one_by_one():
    bench = Bench(4, admission={"max_in_flight": 16})
    live = [bench.request(n=8), bench.request(n=8)]
    for _ in range(200):
        bench.now += 1.0
        bench.cancel(live.pop(0), Reason.CANCELLED)
        live.append(bench.request(n=8))
    first, second = (refuse(bench, n=8).retry_after_s for _ in range(2))
    assert first == pytest.approx(1.0, rel=0.01), "8 sequences end per second"
    assert second == pytest.approx(2.0, rel=0.01), "those of the first are expected back before"
    bench.now += 1.0
    bench.cancel(live.pop(0), Reason.CANCELLED)
    live.append(bench.request(n=8))
    assert refuse(bench, n=8).retry_after_s == pytest.approx(2.0, rel=0.01)
