"""Which deadlines have passed, and what is remembered of those that need not pass any more."""

from gateway.core.deadlines import Deadlines


def test_due_requests_come_earliest_first_and_once():
    deadlines, live = Deadlines(), {1, 2, 3}
    for at, handle in ((2.0, 1), (1.0, 2), (3.0, 3)):
        deadlines.add(at, handle)
    assert deadlines.expired(0.9, live) == []
    assert deadlines.expired(2.0, live) == [2, 1]
    assert deadlines.expired(2.0, live) == []
    assert len(deadlines) == 1


def test_equal_deadlines_keep_the_order_of_arrival():
    deadlines = Deadlines()
    for handle in (3, 2, 1):
        deadlines.add(1.0, handle)
    assert deadlines.expired(1.0, {1, 2, 3}) == [1, 2, 3]


def test_what_has_ended_is_dropped_when_it_surfaces():
    deadlines = Deadlines()
    deadlines.add(1.0, 1)
    deadlines.add(1.0, 2)
    assert deadlines.expired(1.0, {2}) == [2]
    assert len(deadlines) == 0


def test_ended_requests_pile_up_only_so_far():
    deadlines, live = Deadlines(), set(range(10))
    for handle in range(10):
        deadlines.add(9.0, handle)
    for handle in range(10, 84):
        deadlines.add(8.0, handle)
    deadlines.compact(live)
    assert len(deadlines) == 84, "not worth it yet"
    deadlines.add(8.0, 99)
    deadlines.compact(live)
    assert len(deadlines) == 10
    assert deadlines.expired(9.0, live) == list(range(10)), "still a heap"
