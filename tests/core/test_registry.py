"""Who is live, which ids are taken, and whose time is over."""

import pytest

from gateway.core import registry as module
from gateway.core.errors import GatewayError, Reason
from gateway.core.lifecycle import Phase
from gateway.core.registry import Registry
from gateway.core.request import Request
from tests.support.core import Bench, make_config

BENCH = Bench(1, join=False)


class Desk:
    """A registry, and requests that come and go."""

    def __init__(self, **limits):
        reuse_after_s = limits.pop("id_reuse_after_s", None)
        config = make_config(1, limits=limits, admission={"id_reuse_after_s": reuse_after_s})
        self.registry = Registry(config)

    def add(self, name="x", now=0.0, client="c", deadline_at=None):
        arrived = BENCH.arrived(request_id=name, client_key=client, deadline_at=deadline_at)
        self.registry.check_id(arrived, now)
        request = Request(self.registry.new_handle(), arrived, now)
        self.registry.add(request)
        self.registry.check()
        return request

    def end(self, request, now=0.0):
        request.advance(Phase.SETTLED)
        request.advance(Phase.ENDED)
        self.registry.remove(request, now)
        self.registry.check()

    def expired(self, now):
        return [(request.arrived.request_id, reason) for request, reason in self.registry.expire(now)]


def refusal(desk, *args, **more):
    with pytest.raises(GatewayError) as caught:
        desk.add(*args, **more)
    return caught.value


def test_a_request_is_found_by_its_number_and_by_its_callers_id_while_it_lives():
    desk = Desk()
    first, second = desk.add("x"), desk.add("y")
    assert (len(desk.registry), list(desk.registry)) == (2, [first, second])
    assert desk.registry.get(first.handle) is first
    assert desk.registry.find("c", "y") is second
    assert desk.registry.find("d", "y") is None
    assert desk.registry.oldest() is first
    desk.end(first)
    assert desk.registry.get(first.handle) is None
    assert desk.registry.find("c", "x") is None
    assert desk.registry.oldest() is second


def test_numbers_are_never_used_again():
    desk = Desk()
    first = desk.add()
    desk.end(first)
    assert desk.add().handle > first.handle


def test_an_id_is_unique_among_the_live_requests_of_one_caller():
    desk = Desk()
    original = desk.add("x")
    error = refusal(desk, "x")
    assert (error.reason, error.retryable) == (Reason.DUPLICATE_REQUEST_ID, False)
    assert desk.registry.find("c", "x") is original, "the first one is unaffected"
    desk.add("x", client="d")
    desk.end(original)
    desk.add("x")


def test_an_id_stays_taken_for_the_configured_time_after_its_end():
    desk = Desk(id_reuse_after_s=5.0)
    desk.end(desk.add("x", now=1.0), now=2.0)
    assert refusal(desk, "x", now=6.9).reason is Reason.DUPLICATE_REQUEST_ID
    desk.add("x", now=6.9, client="d")
    desk.add("x", now=7.0)


@pytest.mark.parametrize(
    ("error", "is_taken"),
    [
        (None, True),
        (GatewayError(Reason.CANCELLED, "the caller left"), True),
        (GatewayError(Reason.ENGINE_ERROR, "the engine failed"), True),
        (GatewayError(Reason.RANK_LOST, "try again", retryable=True), False),
    ],
)
def test_who_was_told_to_retry_may_do_so_with_the_same_id(error, is_taken):
    desk = Desk(id_reuse_after_s=5.0)
    request = desk.add("x")
    request.error = error
    desk.end(request)
    if is_taken:
        refusal(desk, "x")
    else:
        desk.add("x")


def test_old_ids_are_forgotten_when_their_time_has_passed():
    desk = Desk(id_reuse_after_s=5.0)
    for number in range(10):
        desk.end(desk.add(str(number)), now=float(number))
    desk.registry.expire(9.0)
    assert len(desk.registry._tombstones) == 5
    desk.registry.expire(14.0)
    assert len(desk.registry._tombstones) == 0


def test_an_id_that_is_used_again_does_not_keep_those_behind_it_in_memory():
    desk = Desk(id_reuse_after_s=5.0)
    desk.end(desk.add("x"), now=0.0)
    desk.end(desk.add("y"), now=1.0)
    desk.end(desk.add("x", now=5.0), now=5.5)
    desk.registry.expire(6.0)
    assert list(desk.registry._tombstones) == [("c", "x")]


def test_the_memory_of_old_ids_is_bounded_and_forgets_the_oldest_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 2)
    desk = Desk(id_reuse_after_s=5.0)
    for name in "xyz":
        desk.end(desk.add(name))
    desk.add("x", now=1.0)
    for name in "yz":
        assert refusal(desk, name, now=1.0).reason is Reason.DUPLICATE_REQUEST_ID


def test_without_the_setting_nothing_is_remembered():
    desk = Desk()
    desk.end(desk.add("x"))
    assert len(desk.registry._tombstones) == 0


def test_deadlines_strike_earliest_first_and_once():
    desk = Desk(max_request_age_s=None)
    for name, at in (("late", 3.0), ("early", 1.0), ("mid", 2.0), ("never", None)):
        desk.add(name, deadline_at=at)
    assert desk.expired(0.9) == []
    assert desk.expired(2.0) == [("early", Reason.DEADLINE_EXCEEDED), ("mid", Reason.DEADLINE_EXCEEDED)]
    assert desk.expired(9.0) == [("late", Reason.DEADLINE_EXCEEDED)]


@pytest.mark.parametrize(
    ("deadline_at", "at", "reason"),
    [
        (None, 10.0, Reason.MAX_AGE_EXCEEDED),
        (50.0, 10.0, Reason.MAX_AGE_EXCEEDED),
        (4.0, 4.0, Reason.DEADLINE_EXCEEDED),
        (10.0, 10.0, Reason.DEADLINE_EXCEEDED),
    ],
)
def test_the_earlier_of_deadline_and_age_strikes(deadline_at, at, reason):
    desk = Desk(max_request_age_s=10.0)
    request = desk.add("x", deadline_at=deadline_at)
    assert desk.registry.why_over(request, at - 0.001) is None
    assert desk.expired(at - 0.001) == []
    assert desk.registry.why_over(request, at) is reason
    assert desk.expired(at)[0] == ("x", reason)


def test_what_has_ended_is_not_over():
    desk = Desk(max_request_age_s=10.0)
    desk.end(desk.add("x", deadline_at=1.0))
    assert desk.expired(20.0) == []


def test_ended_requests_do_not_wait_in_memory_for_their_deadlines():
    desk = Desk()
    kept = desk.add("kept", deadline_at=1e9)
    for number in range(1000):
        desk.end(desk.add(str(number), deadline_at=1e9))
    desk.registry.expire(1.0)
    assert len(desk.registry._deadlines) == 1
    assert desk.expired(2e9)[0][0] == kept.arrived.request_id
