"""The order of service: keys, ties, priorities, pins, and removal in any state."""

import pytest

from tests.support.queueing import ANY, Waiting


def test_fcfs_serves_by_arrival_whatever_the_length():
    waiting = Waiting(order="fcfs")
    entries = [waiting.push(prefill_ms=prefill) for prefill in (900.0, 1.0, 50.0)]
    assert waiting.order() == entries


def test_aging_gives_short_prompts_a_head_start_of_alpha_times_their_prefill():
    waiting = Waiting(order="aging", alpha=10)
    long = waiting.push(prefill_ms=100.0)
    waiting.now += 0.5
    short = waiting.push(prefill_ms=10.0)
    waiting.now += 0.75
    too_late = waiting.push(prefill_ms=10.0)
    # Keys: arrival + 1.0 s for the long one, + 0.1 s for the others.
    assert waiting.order() == [short, long, too_late]


def test_aging_with_alpha_zero_is_fcfs():
    waiting = Waiting(order="aging", alpha=0)
    entries = [waiting.push(prefill_ms=prefill) for prefill in (900.0, 1.0, 50.0)]
    assert waiting.order() == entries


def test_spf_serves_the_shortest_prefill_however_late_it_came():
    waiting = Waiting(order="spf")
    long = waiting.push(prefill_ms=100.0)
    waiting.now += 20.0
    short = waiting.push(prefill_ms=99.0)
    assert waiting.order() == [short, long]


def test_edf_serves_by_deadline_from_the_objective_of_the_length_and_the_priority():
    slo = {
        "ttft": [{"max_prompt_tokens": 100, "ttft_ms": 500}, {"max_prompt_tokens": 1000, "ttft_ms": 3000}],
        "priorities": [{"priority": 0, "factor": 2}],
    }
    waiting = Waiting(order="edf", slo=slo)
    long = waiting.push(prompt=500, priority=0)
    waiting.now += 4.0
    short = waiting.push(prompt=50, priority=0)
    waiting.now += 1.5
    late = waiting.push(prompt=50, priority=0)
    # Due after 6, 1 and 1 s: at 106, 105 and 106.5.
    assert waiting.order() == [short, long, late]


def test_edf_without_an_objective_goes_by_a_multiple_of_the_prefill():
    waiting = Waiting(order="edf")
    long = waiting.push(prefill_ms=200.0)
    waiting.now += 0.75
    short = waiting.push(prefill_ms=10.0)
    waiting.now += 0.1
    late = waiting.push(prefill_ms=10.0)
    # Due after 5 x 200 ms, and after 200 ms at least: at 101, 100.95 and 101.05.
    assert waiting.order() == [short, long, late]


def test_hrrn_serves_the_highest_ratio_of_response_to_prefill():
    waiting = Waiting(order="hrrn")
    long = waiting.push(prefill_ms=90.0)
    waiting.now += 1.0
    short = waiting.push(prefill_ms=10.0)
    waiting.now += 0.1
    # (1.1 + .01) / .1 = 11.1 and (.1 + .01) / .02 = 5.5.
    assert waiting.order() == [long, short]
    waiting.now += 0.2
    # 13.1 and 15.5: the short one's ratio grows faster.
    assert waiting.order() == [short, long]


def test_hrrn_finds_an_entry_whose_key_has_changed_since_it_came():
    waiting = Waiting(order="hrrn")
    entries = [waiting.push(prefill_ms=prefill) for prefill in (300.0, 10.0, 50.0)]
    waiting.now += 2.0
    late = waiting.push(prefill_ms=5.0)
    assert waiting.order() == [entries[1], entries[2], entries[0], late]
    waiting.now += 9.0
    waiting.queue.remove(entries[1])
    waiting.queue.check()
    newest = waiting.push(prefill_ms=1.0)
    # Ratios 1274, 184, 35.5, and 0.91 for the one that has not waited yet.
    assert waiting.order() == [late, entries[2], entries[0], newest]


@pytest.mark.parametrize("order", ["fcfs", "aging", "spf", "edf", "hrrn"])
def test_equal_keys_are_served_in_order_of_arrival(order):
    waiting = Waiting(order=order)
    entries = [waiting.entry() for _ in range(20)]
    for entry in reversed(entries):
        waiting.queue.push(entry, waiting.now)
    assert waiting.order() == entries


@pytest.mark.parametrize("order", ["fcfs", "aging", "spf", "edf", "hrrn"])
def test_a_smaller_priority_number_goes_first_whatever_the_key(order):
    waiting = Waiting(order=order)
    third = waiting.push(priority=2, prefill_ms=1.0)
    waiting.now += 1.0
    second = waiting.push(priority=0, prefill_ms=500.0)
    first = waiting.push(priority=-7, prefill_ms=900.0)
    assert waiting.order() == [first, second, third]


def test_an_infinite_alpha_is_an_order_by_prefill():
    waiting = Waiting(order="aging", alpha=float("inf"))
    long, instant, short = (waiting.push(prefill_ms=prefill) for prefill in (9.0, 0.0, 1.0))
    assert waiting.order() == [instant, short, long]


def test_an_entry_that_is_pinned_to_a_shut_rank_is_in_nobodys_way():
    waiting = Waiting(order="fcfs")
    shut = [waiting.push(pin=3) for _ in range(3)]
    free, pinned = waiting.push(), waiting.push(pin=1)
    assert waiting.order({None, 1}) == [free, pinned]
    assert waiting.order({None}) == [free]
    assert waiting.order({3}) == shut
    assert waiting.order({2}) == []
    assert waiting.order({3, None, 1}) == [*shut, free, pinned]


def test_lanes_merge_into_one_order():
    waiting = Waiting(order="spf")
    entries = [
        waiting.push(pin=pin, prefill_ms=prefill) for pin, prefill in ((None, 4.0), (0, 3.0), (1, 1.0), (0, 5.0))
    ]
    late = waiting.push(prefill_ms=2.0)
    assert waiting.order({None, 0, 1}) == [entries[2], late, entries[1], entries[0], entries[3]]


def test_lanes_merge_across_priorities():
    waiting = Waiting(order="fcfs")
    low, high = waiting.push(priority=5), waiting.push(priority=1, pin=0)
    assert waiting.order({None, 0}) == [high, low]


def test_a_tenants_overdue_entries_go_first_in_its_turn_oldest_first_whatever_their_priority():
    waiting = Waiting(order="spf", max_wait_s=30)
    oldest = waiting.push(prefill_ms=900.0, priority=5, pin=1)
    waiting.now += 2.0
    second = waiting.push(prefill_ms=800.0, priority=7)
    third = waiting.push(prefill_ms=1.0, priority=6, pin=1)
    waiting.now = oldest.enqueued_at + 29.75
    young = waiting.push(prefill_ms=1.0)
    assert waiting.order() == [young, oldest, third, second], "nothing is overdue yet"
    waiting.now += 0.25
    assert waiting.order() == [oldest, young, third, second]
    waiting.now += 2.0
    assert waiting.order() == [oldest, second, third, young]


def test_without_fairness_overdue_entries_go_first_oldest_first_across_tenants():
    waiting = Waiting(order="spf", max_wait_s=30, fair=False)
    oldest = waiting.push("a", prefill_ms=900.0, priority=5)
    waiting.now += 1.0
    second = waiting.push("b", prefill_ms=800.0, priority=9)
    waiting.now += 1.0
    third = waiting.push("a", prefill_ms=1.0, priority=6)
    waiting.now = oldest.enqueued_at + 30.0
    young = waiting.push("c", prefill_ms=1.0)
    assert waiting.order() == [oldest, young, third, second]
    waiting.now += 2.0
    assert waiting.order() == [oldest, second, third, young]


def test_an_overdue_entry_in_a_lane_that_was_not_asked_for_waits():
    waiting = Waiting(max_wait_s=1)
    pinned = waiting.push(pin=0)
    waiting.now += 2.0
    young = waiting.push()
    assert waiting.order({None}) == [young]
    assert waiting.order({None, 0}) == [pinned, young]


def test_without_max_wait_nothing_is_overdue():
    waiting = Waiting(order="spf", max_wait_s=None)
    old = waiting.push(prefill_ms=2.0)
    waiting.now += 1e6
    young = waiting.push(prefill_ms=1.0)
    assert waiting.order() == [young, old]


@pytest.mark.parametrize("order", ["fcfs", "hrrn"])
def test_the_order_is_lazy_and_reading_it_changes_nothing(order):
    waiting = Waiting(order=order)
    entries = [waiting.push(tenant) for tenant in "aabb"]
    before = waiting.order()
    assert next(waiting.queue.in_order(waiting.now, ANY)) is before[0]
    assert waiting.order() == before
    assert set(before) == set(entries)
    assert len(waiting.queue) == 4


def test_what_left_is_gone_and_leaving_twice_is_nothing():
    waiting = Waiting(order="fcfs")
    first, second, third = waiting.push(pin=0), waiting.push(priority=1), waiting.push(priority=1)
    assert [waiting.queue.depth_of(priority) for priority in (0, 1, 2)] == [1, 2, 0]
    assert waiting.queue.oldest() is first
    for _ in range(2):
        waiting.queue.remove(first)
        waiting.queue.check()
    assert not first.is_queued
    for _ in range(2):
        waiting.queue.taken(second)
        waiting.queue.check()
    assert waiting.queue.entries() == [third]
    assert [waiting.queue.depth_of(priority) for priority in (0, 1, 2)] == [0, 1, 0]
    assert len(waiting.queue) == 1
    waiting.queue.remove(third)
    assert waiting.queue.oldest() is None
    assert waiting.order() == waiting.queue.entries() == waiting.queue.pinned_to(0) == []
    waiting.queue.remove(waiting.entry())


def test_pushing_a_queued_entry_again_changes_nothing():
    waiting = Waiting(timeout_s=5)
    entry = waiting.push()
    due = entry.expires_at
    waiting.now += 1.0
    waiting.queue.push(entry, waiting.now)
    waiting.queue.check()
    assert len(waiting.queue) == 1
    assert entry.expires_at == due


def test_an_entry_that_comes_back_keeps_its_place():
    waiting = Waiting(order="fcfs")
    first = waiting.push()
    waiting.queue.taken(first)
    second = waiting.push()
    waiting.now += 3.0
    waiting.queue.push(first, waiting.now)
    waiting.queue.check()
    assert waiting.order() == waiting.queue.entries() == [first, second]
    assert waiting.queue.oldest() is first


def test_lists_are_in_order_of_arrival():
    waiting = Waiting(order="spf")
    entries = [
        waiting.push(pin=pin, prefill_ms=prefill) for pin, prefill in ((1, 9.0), (None, 1.0), (1, 2.0), (0, 3.0))
    ]
    assert waiting.queue.entries() == entries
    assert waiting.queue.pinned_to(1) == [entries[0], entries[2]]
    assert waiting.queue.pinned_to(2) == []
