"""Which deadlines have passed, and what is remembered of those that need not pass any more."""

from gateway.core.deadlines import Deadlines
from gateway.core.request import Request
from tests.support.core import Bench

BENCH = Bench(1)


def make_request(handle):
    return Request(handle, BENCH.arrived(), now=0.0)


def test_due_requests_come_earliest_first_and_once():
    deadlines = Deadlines()
    late, early, later = make_request(1), make_request(2), make_request(3)
    for at, request in ((2.0, late), (1.0, early), (3.0, later)):
        deadlines.add(at, request)
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(2.0) == [early, late]
    assert deadlines.expired(2.0) == []
    assert len(deadlines) == 1


def test_equal_deadlines_keep_the_order_of_arrival():
    deadlines = Deadlines()
    requests = [make_request(handle) for handle in (1, 2, 3)]
    for request in reversed(requests):
        deadlines.add(1.0, request)
    assert deadlines.expired(1.0) == requests


def test_what_has_ended_is_dropped_when_it_surfaces():
    deadlines = Deadlines()
    ended, live = make_request(1), make_request(2)
    deadlines.add(1.0, ended)
    deadlines.add(1.0, live)
    ended.is_ended = True
    assert deadlines.expired(1.0) == [live]
    assert len(deadlines) == 0


def test_ended_requests_pile_up_only_so_far():
    deadlines = Deadlines()
    live = [make_request(handle) for handle in range(10)]
    for request in live:
        deadlines.add(9.0, request)
    for handle in range(10, 84):
        ended = make_request(handle)
        ended.is_ended = True
        deadlines.add(8.0, ended)
    deadlines.compact(live=10)
    assert len(deadlines) == 84, "not worth it yet"
    one_more = make_request(99)
    one_more.is_ended = True
    deadlines.add(8.0, one_more)
    deadlines.compact(live=10)
    assert len(deadlines) == 10
    assert deadlines.expired(9.0) == live, "still a heap"
