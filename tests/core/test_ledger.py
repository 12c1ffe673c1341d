"""Charges: what one attempt adds to its rank, and that it is given back exactly once."""

import pytest

from gateway.core.counters import Counters
from gateway.core.ledger import Ledger
from gateway.core.ranks import RankTable
from gateway.core.request import Attempt, Request
from tests.support.core import Bench, make_config, make_info

COLUMNS = ("in_flight", "in_flight_prefill", "in_flight_decode", "queued_tokens", "ctx_tokens", "own_tokens")


class Books:
    def __init__(self, ranks=2):
        self.table = RankTable(make_config(ranks))
        for rank in range(ranks):
            self.table.join(rank, 1, make_info())
        self.counters = Counters(ranks)
        self.ledger = Ledger(self.table, self.counters)
        self._bench = Bench(1)
        self._number = 0

    def attempt(self, prompt_tokens=10, rank=0):
        self._number += 1
        request = Request(self._number, self._bench.arrived([1] * prompt_tokens), now=0.0)
        return Attempt(request.sequences[0], f"id{self._number}", 1, rank, incarnation=1, sent_at=0.0)

    def charged(self, prompt_tokens=10, rank=0, now=0.0):
        attempt = self.attempt(prompt_tokens, rank)
        self.ledger.charge(attempt, now)
        self.ledger.check()
        return attempt

    def add_tokens(self, attempt, count):
        attempt.tokens_out += count
        self.ledger.add_tokens(attempt.rank, count)
        self.ledger.check()

    def columns(self, rank=0):
        return tuple(getattr(self.table, name)[rank] for name in COLUMNS)


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


@pytest.mark.parametrize("column", [*COLUMNS, "head_since"])
def test_the_check_sees_a_drift_in_every_column(column):
    books = Books()
    books.charged()
    books.ledger.start(books.charged(), 1.0)
    getattr(books.table, column)[0] = None if column == "head_since" else getattr(books.table, column)[0] + 1
    with pytest.raises(AssertionError):
        books.ledger.check()
