"""Time-outs of the queue: whose applies, what happens then, and once."""

import pytest

from tests.support.queueing import Waiting


def test_a_time_out_refuses_by_default_earliest_first_and_once():
    waiting = Waiting(timeout_s=5)
    first = waiting.push(pin=2)
    waiting.now += 1.0
    second, third = waiting.push(), waiting.push()
    waiting.queue.remove(third)
    assert waiting.queue.expired(first.expires_at - 0.001) == []
    waiting.now = 200.0
    young = waiting.push()
    assert waiting.queue.expired(waiting.now) == [first, second]
    waiting.queue.check()
    assert waiting.queue.expired(waiting.now) == []
    assert not first.is_queued
    assert waiting.queue.entries() == [young]
    assert waiting.queue.timeouts_delayed == 0


def test_a_time_out_strikes_at_its_very_moment():
    waiting = Waiting(timeout_s=5)
    entry = waiting.push()
    assert entry.expires_at == waiting.now + 5
    assert waiting.queue.expired(entry.expires_at) == [entry]


def test_without_a_time_out_nothing_expires():
    waiting = Waiting()
    entry = waiting.push()
    assert entry.expires_at is None
    assert waiting.queue.expired(1e12) == []


@pytest.mark.parametrize(("allowed", "asked", "wait"), [(True, 2, 2), (True, 9, 5), (False, 2, 5), (True, None, 5)])
def test_a_call_may_only_shorten_the_time_out_and_only_if_allowed(allowed, asked, wait):
    waiting = Waiting(timeout_s=5, allow_timeout_override=allowed)
    assert waiting.push(timeout_s=asked).expires_at == waiting.now + wait


def test_a_call_may_set_a_time_out_where_the_queue_has_none():
    assert Waiting().push(timeout_s=2).expires_at == 102.0
    assert Waiting(allow_timeout_override=False).push(timeout_s=2).expires_at is None


@pytest.mark.parametrize("asked", [float("nan"), float("inf")])
def test_a_time_out_that_is_no_time_is_ignored(asked):
    assert Waiting(timeout_s=5).push(timeout_s=asked).expires_at == 105.0
    assert Waiting().push(timeout_s=asked).expires_at is None


def test_levels_replace_the_time_out_and_its_action_where_they_say_so():
    levels = [
        {"priority": 1, "timeout_s": 20},
        {"priority": 2, "timeout_action": "delay"},
        {"priority": 3, "timeout_s": 1, "timeout_action": "reject"},
    ]
    waiting = Waiting(timeout_s=5, timeout_action="reject", levels=levels)
    entries = [waiting.push(priority=priority) for priority in range(4)]
    assert [entry.expires_at for entry in entries] == [105.0, 120.0, 105.0, 101.0]
    assert waiting.queue.expired(110.0) == [entries[3], entries[0]]
    assert waiting.queue.timeouts_delayed == 1
    assert entries[2].is_delayed
    waiting.queue.check()
    assert waiting.queue.expired(130.0) == [entries[1]]


def test_a_level_may_refuse_where_the_queue_delays():
    waiting = Waiting(timeout_s=5, timeout_action="delay", levels=[{"priority": 1, "timeout_action": "reject"}])
    kept, refused = waiting.push(), waiting.push(priority=1)
    assert waiting.queue.expired(200.0) == [refused]
    assert waiting.queue.entries() == [kept]


def test_a_delayed_entry_goes_behind_all_that_are_in_time_and_by_arrival_among_its_like():
    levels = [{"priority": 3, "timeout_s": 6}, {"priority": 0, "timeout_s": 5}]
    waiting = Waiting(order="spf", timeout_action="delay", max_wait_s=None, levels=levels)
    second = waiting.push("a", prefill_ms=9.0, priority=3)
    third = waiting.push("b", prefill_ms=1.0, priority=0)
    first = waiting.push("c", prefill_ms=99.0, priority=7, pin=0)
    waiting.now += 10.0
    assert waiting.queue.expired(waiting.now) == []
    waiting.queue.check()
    in_time = waiting.push("a", prefill_ms=50.0, priority=9)
    assert set(waiting.order()[:2]) == {first, in_time}
    assert waiting.order()[2:] == [second, third]
    assert waiting.queue.timeouts_delayed == 2
    assert waiting.queue.expired(waiting.now + 99.0) == []
    assert waiting.queue.timeouts_delayed == 2, "counted once"
    assert waiting.queue.depth_of(0) == 1, "still queued"


@pytest.mark.parametrize("asked", [2, 5, 9])
def test_what_a_call_asks_for_ends_its_wait_where_the_queue_only_delays(asked):
    waiting = Waiting(timeout_s=5, timeout_action="delay", max_wait_s=None)
    entry, other = waiting.push(timeout_s=asked), waiting.push()
    assert waiting.queue.expired(100.0 + asked - 0.5) == []
    waiting.queue.check()
    assert entry.is_delayed is (asked > 5)
    assert waiting.queue.expired(100.0 + asked) == [entry]
    waiting.queue.check()
    assert waiting.queue.entries() == [other]


def test_a_call_may_not_end_its_wait_where_the_queue_does_not_let_it():
    waiting = Waiting(timeout_action="delay", timeout_s=5, allow_timeout_override=False)
    entry = waiting.push(timeout_s=2)
    assert waiting.queue.expired(200.0) == []
    assert (entry.is_delayed, entry.expires_at) == (True, None)


def test_a_delayed_entry_that_is_pinned_waits_in_its_lane():
    waiting = Waiting(timeout_s=1, timeout_action="delay", max_wait_s=None)
    pinned, free = waiting.push(pin=0), waiting.push()
    waiting.queue.expired(200.0)
    assert waiting.order({None}) == [free]
    assert waiting.order({None, 0}) == [pinned, free]
    assert waiting.queue.pinned_to(0) == [pinned]


def test_delayed_entries_can_be_removed_served_and_pushed_again():
    waiting = Waiting(timeout_s=1, timeout_action="delay", max_wait_s=None)
    entries = [waiting.push() for _ in range(3)]
    waiting.queue.expired(200.0)
    waiting.queue.remove(entries[1])
    waiting.queue.check()
    assert waiting.order() == [entries[0], entries[2]]
    assert waiting.serve() is entries[0]
    waiting.queue.check()
    assert entries[0].account.tag > 0, "a late service is charged, too"
    waiting.queue.push(entries[0], now=300.0)
    waiting.queue.check()
    assert not entries[0].is_delayed
    assert entries[0].expires_at == 301.0
    assert waiting.order() == [entries[0], entries[2]]


@pytest.mark.parametrize("fair", [True, False])
def test_a_delayed_entry_stays_behind_however_long_it_waits(fair):
    waiting = Waiting(timeout_s=5, timeout_action="delay", max_wait_s=30, fair=fair)
    delayed = waiting.push()
    waiting.now += 29.0
    waiting.queue.expired(waiting.now)
    for _ in range(3):
        young = waiting.push()
        assert waiting.order() == [young, delayed]
        waiting.queue.taken(young)
        waiting.now += 10.0
    assert waiting.serve() is delayed


@pytest.mark.parametrize("fair", [True, False])
def test_an_overdue_entry_that_is_delayed_goes_behind_again(fair):
    waiting = Waiting(timeout_s=50, timeout_action="delay", max_wait_s=30, order="spf", fair=fair)
    old = waiting.push(prefill_ms=99.0)
    waiting.now += 40.0
    young = waiting.push(prefill_ms=1.0)
    assert waiting.order() == [old, young]
    waiting.now += 10.0
    waiting.queue.expired(waiting.now)
    assert waiting.order() == [young, old]


def test_times_out_of_overdue_entries_still_strike():
    waiting = Waiting(timeout_s=50, max_wait_s=30)
    entry = waiting.push()
    waiting.now += 40.0
    assert waiting.order() == [entry]
    waiting.now += 10.0
    assert waiting.queue.expired(waiting.now) == [entry]
    assert waiting.order() == []
