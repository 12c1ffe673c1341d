"""Charges: what one attempt adds to its rank, and that it is given back exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.counters import Counters
from gateway.core.ledger import Ledger
from gateway.core.ranks import RankTable
from gateway.core.request import Attempt, Request
from tests.support.core import Bench, make_config, make_info

COLUMNS = ("in_flight", "in_flight_prefill", "in_flight_decode", "queued_tokens", "ctx_tokens", "own_tokens")
RESERVED = ("prompt_tokens_in_flight", "kv_reserved_tokens")
PENDING = ("pending_us", "head_us", "head_credit_us", "head_since")
GROUPS = ("group_in_flight", "group_prompt_tokens", "group_kv_tokens")


class Books:
    def __init__(self, ranks=2, **sections):
        self.table = RankTable(make_config(ranks, **sections))
        self.table.has_budgets = self.table.times_prefill = True
        for rank in range(self.table.size):
            self.table.join(rank, 1, make_info())
        self.counters = Counters(self.table.size)
        self.ledger = Ledger(self.table, self.counters)
        self._bench = Bench(1)
        self._number = 0

    def attempt(self, prompt_tokens=10, rank=0, *, max_tokens=16, prefill_us=0):
        self._number += 1
        arrived = self._bench.arrived([1] * prompt_tokens, max_tokens=max_tokens)
        request = Request(self._number, arrived, now=0.0, prefill_us=prefill_us)
        return Attempt(request.sequences[0], f"id{self._number}", 1, rank, incarnation=1, sent_at=0.0)

    def charged(self, prompt_tokens=10, rank=0, now=0.0, **more):
        attempt = self.attempt(prompt_tokens, rank, **more)
        self.ledger.charge(attempt, now)
        self.ledger.check()
        return attempt

    def add_tokens(self, attempt, count):
        attempt.tokens_out += count
        self.ledger.add_tokens(attempt.rank, count)
        self.ledger.check()

    def start(self, attempt, now):
        self.ledger.start(attempt, now)
        self.ledger.check()
        return attempt.actual_prefill_us

    def columns(self, rank=0, names=COLUMNS):
        return tuple(getattr(self.table, name)[rank] for name in names)


def test_a_charge_moves_from_prefill_to_decode_and_away():
    books = Books()
    attempt = books.charged(10)
    assert books.columns() == (1, 1, 0, 10, 0, 10)
    assert books.table.sent_since_snapshot == [1, 0]
    books.ledger.start(attempt, 1.0)
    books.add_tokens(attempt, 3)
    assert books.columns() == (1, 0, 1, 0, 13, 13)
    assert attempt.first_token_at == 1.0
    assert books.ledger.release(attempt, 2.0)
    assert books.columns() == (0, 0, 0, 0, 0, 0)
    assert books.columns(rank=1) == (0, 0, 0, 0, 0, 0)
    books.ledger.check()


def test_a_release_before_the_first_token():
    books = Books()
    assert books.ledger.release(books.charged(10), 1.0)
    assert books.columns() == (0, 0, 0, 0, 0, 0)
    assert books.table.sent_since_snapshot[0] == 1, "it was sent"


def test_only_the_last_release_empties_the_rank():
    books = Books()
    first, second = books.charged(), books.charged()
    assert not books.ledger.release(first, 1.0)
    assert books.ledger.release(second, 1.0)


def test_a_second_release_is_counted_and_changes_nothing():
    books = Books()
    attempt, other = books.charged(10), books.charged(7)
    books.ledger.release(attempt, 1.0)
    before = books.columns()
    assert not books.ledger.release(attempt, 1.0)
    assert books.columns() == before == (1, 1, 0, 7, 0, 7)
    assert books.counters.double_releases == 1
    assert books.ledger.of_rank(0) == [other]
    books.ledger.check()


def test_what_was_taken_back_was_never_sent():
    books = Books()
    kept, attempt = books.charged(), books.charged()
    assert not books.ledger.take_back(attempt, 1.0)
    assert books.table.sent_since_snapshot[0] == 1
    books.table.sent_since_snapshot[0] = 0  # a snapshot came in between
    assert books.ledger.take_back(kept, 1.0)
    assert books.table.sent_since_snapshot[0] == 0


def test_the_cached_part_of_a_prompt_is_not_queued_but_at_least_one_token_is():
    books = Books()
    for cached, queued in ((4, 6), (10, 1), (12, 1)):
        attempt = books.attempt(10)
        attempt.cached_tokens = cached
        books.ledger.charge(attempt, 0.0)
        assert books.table.queued_tokens[0] == queued
        books.ledger.check()
        books.ledger.release(attempt, 1.0)
    assert books.columns() == (0, 0, 0, 0, 0, 0)


def test_the_head_is_the_oldest_without_a_token_and_waits_since_it_became_so():
    books = Books()
    first, second, third = books.charged(now=1.0), books.charged(now=2.0), books.charged(now=3.0)
    assert books.table.head_since[0] == 1.0
    books.ledger.start(second, 4.0)
    assert books.table.head_since[0] == 1.0, "the head has not moved"
    books.ledger.start(first, 5.0)
    assert books.table.head_since[0] == 5.0, "the third became the head"
    books.ledger.release(third, 6.0)
    assert books.table.head_since[0] is None


def test_live_attempts_are_found_by_id_and_by_rank_in_order():
    books = Books()
    first, other, second = books.charged(rank=0), books.charged(rank=1), books.charged(rank=0)
    assert books.ledger.live == {"id1": first, "id2": other, "id3": second}
    assert books.ledger.of_rank(0) == [first, second]
    assert books.ledger.of_rank(1) == [other]


def test_the_whole_generation_is_reserved_until_the_release():
    books = Books()
    attempt, other = books.charged(10, max_tokens=30), books.charged(5, max_tokens=1)
    assert books.columns(names=RESERVED) == (15, 46)
    books.start(attempt, 1.0)
    books.add_tokens(attempt, 3)
    assert books.columns(names=RESERVED) == (15, 46), "tokens that came were reserved before"
    books.ledger.release(attempt, 2.0)
    assert books.columns(names=RESERVED) == (5, 6)
    books.ledger.take_back(other, 2.0)
    assert books.columns(names=RESERVED) == (0, 0)
    books.ledger.check()


def test_a_group_has_the_sums_of_its_ranks():
    sizes = {"a": 2, "b": 1}
    groups = [{"name": n, "protocol": "vllm", "handshake": f"ipc:///{n}", "ranks": sizes[n]} for n in sizes]
    books = Books(groups=groups)
    first = books.charged(10, rank=0, max_tokens=5)
    books.charged(20, rank=1, max_tokens=5)
    last = books.charged(40, rank=2, max_tokens=5)
    assert [getattr(books.table, name) for name in GROUPS] == [[2, 1], [30, 40], [40, 45]]
    books.start(last, 1.0)
    books.ledger.release(last, 2.0)
    books.ledger.take_back(first, 2.0)
    assert [getattr(books.table, name) for name in GROUPS] == [[1, 0], [20, 0], [25, 0]]
    books.ledger.check()


def test_without_a_budget_nothing_is_counted_for_one():
    books = Books()
    books.table.has_budgets = False
    attempt = books.charged(10, max_tokens=5)
    books.ledger.check()
    assert [getattr(books.table, name) for name in (*RESERVED, *GROUPS)] == [[0, 0], [0, 0], [0], [0], [0]]
    books.ledger.release(attempt, 1.0)
    books.ledger.check()
    assert books.table.in_flight == [0, 0]
    assert not RankTable(make_config(1)).has_budgets


# --- predicted and actual prefill -----------------------------------------------------------------


def test_predicted_prefill_is_pending_until_the_first_token_and_the_oldest_is_the_head():
    books = Books()
    first = books.charged(now=1.0, prefill_us=300)
    second = books.charged(now=2.0, prefill_us=20)
    third = books.charged(now=3.0, prefill_us=1)
    assert books.columns(names=PENDING) == (321, 300, 300, 1.0)
    books.start(second, 4.0)
    assert books.columns(names=PENDING) == (301, 300, 300, 1.0)
    books.ledger.release(first, 5.0)
    assert books.columns(names=PENDING) == (1, 1, 1, 5.0)
    books.ledger.take_back(third, 6.0)
    assert books.columns(names=PENDING) == (0, 0, 0, None)
    assert books.columns(rank=1, names=PENDING) == (0, 0, 0, None)


def test_one_of_several_gateways_gives_the_head_no_credit():
    books = Books(gateways=2)
    first = books.charged(prefill_us=300)
    books.charged(prefill_us=20)
    assert books.columns(names=PENDING) == (320, 300, 0, 0.0)
    books.start(first, 1.0)
    assert books.columns(names=PENDING) == (20, 20, 0, 1.0)


def test_the_actual_prefill_is_the_time_as_head():
    books = Books()
    first = books.charged(now=1.0)
    second = books.charged(now=1.25)
    assert first.actual_prefill_us is None
    assert books.start(first, 1.5) == 500_000
    assert books.start(second, 1.75) == 250_000, "since it became the head, not since it was sent"
    assert books.start(books.charged(now=9.0), 9.125) == 125_000, "the idle time between is nobody's"


def test_of_those_that_start_together_the_first_carries_the_time():
    books = Books()
    attempts = [books.charged(now=1.0) for _ in range(3)]
    assert [books.start(attempt, 3.0) for attempt in attempts] == [2_000_000, 0, 0]


def test_a_start_out_of_order_leaves_the_head_what_is_left():
    books = Books()
    first, second = books.charged(now=1.0), books.charged(now=1.0)
    assert books.start(second, 2.0) == 1_000_000
    assert books.start(first, 2.5) == 500_000


def test_the_time_of_a_head_that_was_cancelled_is_nobodys():
    books = Books()
    first, second = books.charged(now=1.0), books.charged(now=1.0)
    books.ledger.release(first, 2.0)
    assert books.start(second, 2.5) == 500_000


def test_ranks_keep_their_times_apart():
    books = Books()
    first, other = books.charged(rank=0, now=1.0), books.charged(rank=1, now=1.0)
    assert [books.start(first, 2.0), books.start(other, 2.0)] == [1_000_000] * 2


def test_a_clock_that_steps_back_gives_no_negative_time():
    books = Books()
    assert books.start(books.charged(now=2.0), 1.0) == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "charge", "start", "start", "tokens", "release", "take_back", "wait", "wait"]),
        st.integers(0, 9),
        st.integers(0, 5000),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS, st.sampled_from([1, 3]))
def test_columns_are_sums_and_no_time_is_given_twice_whatever_happens(steps, gateways):
    books = Books(gateways=gateways)
    now, busy_s, is_exact = 100.0, 0.0, True
    attempts = []
    for step, pick, amount in steps:
        live = [attempt for attempt in attempts if not attempt.released]
        unstarted = [attempt for attempt in live if attempt.first_token_at is None]
        if step == "wait":
            now += amount * 1e-4
            busy_s += amount * 1e-4 if any(attempt.rank == 0 for attempt in unstarted) else 0.0
        elif step == "charge":
            attempts.append(books.charged(1 + pick, pick % 2, now, max_tokens=1 + amount, prefill_us=amount))
        elif step == "start" and unstarted:
            books.start(unstarted[pick % len(unstarted)], now)
        elif step == "tokens" and len(unstarted) < len(live):
            started = [attempt for attempt in live if attempt not in unstarted]
            books.add_tokens(started[pick % len(started)], 3)
        elif step in ("release", "take_back") and live:
            attempt = live[pick % len(live)]
            is_exact = is_exact and attempt not in unstarted
            getattr(books.ledger, step)(attempt, now)
            books.ledger.check()
    waits = any(attempt.rank == 0 and attempt.first_token_at is None for attempt in attempts)
    times = [attempt.actual_prefill_us for attempt in attempts if attempt.actual_prefill_us is not None]
    mine = sum(attempt.actual_prefill_us or 0 for attempt in attempts if attempt.rank == 0)
    assert all(type(time) is int and time >= 0 for time in times)
    assert mine <= busy_s * 1e6 + 1
    if is_exact and not waits:
        assert mine == pytest.approx(busy_s * 1e6, abs=1)


# --- the check ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [*COLUMNS, *RESERVED, *PENDING])
def test_the_check_sees_a_drift_in_every_column(column):
    books = Books()
    books.charged(prefill_us=3)
    books.start(books.charged(), 1.0)
    assert books.ledger.audit(0) == []
    getattr(books.table, column)[0] = None if column == "head_since" else getattr(books.table, column)[0] + 1
    assert books.ledger.audit(0) == [column]
    assert books.ledger.audit(1) == []
    with pytest.raises(AssertionError):
        books.ledger.check()


@pytest.mark.parametrize("column", GROUPS)
def test_the_check_sees_a_drift_in_every_sum_of_a_group(column):
    books = Books()
    books.charged()
    getattr(books.table, column)[0] += 1
    with pytest.raises(AssertionError):
        books.ledger.check()


@pytest.mark.parametrize("usage", [0.0, 0.5])
def test_the_floor_of_free_tokens_goes_down_with_every_charge(usage):
    """The filters trust it without a look at the ranks, and `check` itself lowers it."""
    books = Books()
    books.table.kv_usage[0] = usage
    for _ in range(3):
        books.charged(150_000)
        assert books.table.kv_floor_tokens == books.table.free_kv_tokens[0]
