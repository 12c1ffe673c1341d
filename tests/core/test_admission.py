"""The total bound, and the hint to those whom it turns away."""

import pytest

from gateway.config import schema
from gateway.core.admission import MAX_RETRY_S, MIN_RETRY_S, Admission
from gateway.core.errors import GatewayError, Reason


def make(limit=10):
    return Admission(schema.Admission(max_in_flight=limit))


@pytest.mark.parametrize(("in_flight", "wanted"), [(0, 10), (9, 1), (10, 0)])
def test_up_to_the_bound_everything_goes(in_flight, wanted):
    make().check_total(in_flight, wanted)


@pytest.mark.parametrize(("in_flight", "wanted"), [(10, 1), (9, 2), (0, 11)])
def test_beyond_it_nothing_does(in_flight, wanted):
    with pytest.raises(GatewayError) as caught:
        make().check_total(in_flight, wanted)
    error = caught.value
    assert (error.reason, error.retryable) == (Reason.GATEWAY_FULL, True)
    assert error.facts == {"in_flight": in_flight, "limit": 10}
    assert error.retry_after_s == 1.0, "nothing was released yet, so nothing is known"


def test_the_hint_follows_the_rate_of_releases():
    admission = make()
    for number in range(10):
        admission.released(number * 0.2)
    assert admission.retry_after_s(1) == pytest.approx(0.2)
    assert admission.retry_after_s(4) == pytest.approx(0.8)
    with pytest.raises(GatewayError) as caught:
        admission.check_total(9, 3)
    assert caught.value.retry_after_s == pytest.approx(0.4), "two more than there is room for"


def test_a_single_gap_changes_the_hint_a_little():
    admission = make()
    for at in (0.0, 1.0, 1.0):
        admission.released(at)
    assert admission.retry_after_s(1) == pytest.approx(0.95)


@pytest.mark.parametrize(("gap", "bound"), [(1e-6, MIN_RETRY_S), (100.0, MAX_RETRY_S)])
def test_the_hint_is_bounded(gap, bound):
    admission = make()
    admission.released(0.0)
    admission.released(gap)
    assert admission.retry_after_s(1) == bound
