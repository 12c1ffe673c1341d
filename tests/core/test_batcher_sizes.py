"""What sizes the batches come to: the cases of Triton's batcher tests, with one sequence where they have one row.

Each case says which sizes were sent how often, as Triton's own checks do. One sequence at a time differs from
requests of several rows in two points: no size can be jumped over, and no single member is larger than a preferred
size.
"""

import pytest

from tests.support.batching import Rig

WINDOW_S = 0.1


def busy(**settings):
    """A rank with work of others: there is something to wait for."""
    return Rig(others=1, **({"max_requests": 8, "window_ms": 100, "max_in_flight_batches": 100} | settings))


@pytest.mark.parametrize(
    ("preferred", "queued", "sizes"),
    [
        ((2, 6), 6, {6: 1}),  # preferred
        ((2, 6), 2, {2: 1}),
        ((2, 6), 1, {1: 1}),  # below all preferred ones
        ((4, 6), 3, {3: 1}),
        ((2, 6), 5, {2: 2, 1: 1}),  # between two preferred ones
        ((2, 6), 7, {6: 1, 1: 1}),  # above the largest preferred one
        ((2, 6), 9, {6: 1, 2: 1, 1: 1}),  # above the largest batch
        ((4, 6), 4, {4: 1}),  # aligned
        ((4, 6), 5, {4: 1, 1: 1}),  # not aligned
        ((4, 6), 10, {6: 1, 4: 1}),  # the biggest first
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_without_a_window_preferred_sizes_go_first_and_the_rest_goes_too(preferred, queued, sizes, others):
    rig = busy(window_ms=0, preferred_sizes=preferred)
    rig.others = others
    rig.arrive(queued)
    rig.step(0.0)
    assert rig.sizes == sizes
    assert not rig.queue


@pytest.mark.parametrize(
    ("preferred", "queued", "at_once", "after_window"),
    [
        ((2, 6), 6, {6: 1}, {6: 1}),  # the biggest preferred one
        ((2, 6), 3, {2: 1}, {2: 1, 1: 1}),  # the best preferred one, the rest later
        ((2, 6), 7, {6: 1}, {6: 1, 1: 1}),  # a sum above the largest preferred one
        ((4, 6), 3, {}, {3: 1}),  # none preferred: late, but it goes
        ((4, 6), 5, {4: 1}, {4: 1, 1: 1}),
        ((), 7, {}, {7: 1}),  # a window only
        ((), 12, {8: 1}, {8: 1, 4: 1}),
        ((8,), 8, {8: 1}, {8: 1}),  # preferred and full are one
    ],
)
def test_a_busy_rank_gets_preferred_sizes_at_once_and_the_rest_after_the_window(
    preferred, queued, at_once, after_window
):
    rig = busy(preferred_sizes=preferred)
    rig.arrive(queued)
    rig.step(0.0)
    rig.step(WINDOW_S - 0.001)
    assert rig.sizes == at_once
    rig.step(WINDOW_S)
    assert rig.sizes == after_window
    assert not rig.queue


def test_after_the_window_a_batch_grows_beyond_the_preferred_sizes():
    rig = busy(preferred_sizes=(2, 6))
    rig.arrive(1)
    assert rig.step(0.0) == []
    rig.arrive(6, at=WINDOW_S)
    (batch,) = rig.step(WINDOW_S)
    assert batch.reason == "window"
    assert rig.sizes == {7: 1}, "6 would be preferred, but the first is late and goes with all"


def test_after_the_window_the_largest_batch_is_full():
    rig = busy(preferred_sizes=(2, 6))
    rig.arrive(9)
    (full, rest) = rig.step(WINDOW_S)
    assert (full.reason, rest.reason) == ("batch_full", "window")
    assert rig.sizes == {8: 1, 1: 1}


def test_a_preferred_size_that_is_the_largest_batch_is_full():
    rig = busy(preferred_sizes=(2, 8))
    rig.arrive(8)
    assert rig.peek(0.0).reason == "batch_full"


def test_an_idle_rank_does_not_wait_for_a_preferred_size():
    rig = busy(preferred_sizes=(4,))
    rig.others = 0
    rig.arrive(3)
    assert [batch.reason for batch in rig.step(0.0)] == ["idle_rank"]
    assert rig.sizes == {3: 1}


def test_an_idle_rank_gets_the_largest_preferred_size_and_then_is_busy():
    rig = busy(preferred_sizes=(2, 4), max_requests=16)
    rig.others = 0
    rig.arrive(5)
    assert [batch.reason for batch in rig.step(0.0)] == ["preferred_size"]
    assert rig.sizes == {4: 1}
    assert [batch.reason for batch in rig.step(WINDOW_S)] == ["window"]


def test_one_that_does_not_match_closes_a_batch_of_any_size():
    rig = busy(preferred_sizes=(4, 6), fits=lambda entry, tokens: entry.number != 4)
    rig.arrive(5)
    (batch,) = rig.step(0.0)
    assert batch.reason == "closed"
    assert rig.sizes == {3: 1}
    assert rig.step(WINDOW_S)[0].reason == "window"
    assert rig.sizes == {3: 1, 2: 1}


def test_a_closed_batch_is_cut_to_its_preferred_size():
    rig = busy(preferred_sizes=(2, 6), fits=lambda entry, tokens: entry.number != 4)
    rig.arrive(5)
    batch = rig.peek(0.0)
    assert len(batch.entries) == 2
    assert batch.reason == "preferred_size"
    assert batch.predicted_us == 20_000, "of the two that go"


def test_preferred_sizes_above_the_largest_batch_never_occur():
    rig = busy(max_requests=4, preferred_sizes=(3, 9))
    rig.arrive(10)
    rig.step(0.0)
    assert rig.sizes == {3: 3}
    rig.step(WINDOW_S)
    assert rig.sizes == {3: 3, 1: 1}


def test_a_burst_behind_a_shut_gate_is_one_batch():
    rig = busy(max_in_flight_batches=1, window_ms=0)
    rig.arrive(1)
    rig.step(0.0)
    for _ in range(5):
        rig.arrive(1)
        rig.step(0.0)
    assert rig.sizes == {1: 1}
    rig.finish_oldest()
    rig.step(0.0)
    assert rig.sizes == {1: 1, 5: 1}


def test_a_trickle_is_collected_by_the_window_alone():
    rig = busy()
    for index in range(12):
        rig.arrive(1, at=index * 0.001)
        rig.step(index * 0.001)
    rig.step(WINDOW_S + 0.012)
    assert rig.sizes == {8: 1, 4: 1}


def test_a_slow_rank_never_has_more_batches_than_its_gate_allows():
    rig = Rig(max_requests=3, max_in_flight_batches=2)
    for index in range(100):
        rig.arrive(1, at=index * 0.01)
        rig.step(index * 0.01)
        if index % 7 == 6:
            rig.finish_oldest()
    assert rig.most_in_flight == 2
    now = 1.0
    while rig.queue:
        rig.finish_oldest()
        now += 0.01
        rig.step(now)
    assert rig.most_in_flight == 2
    assert sum(size * count for size, count in rig.sizes.items()) == 100
