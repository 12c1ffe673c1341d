"""Batches in flight: a member leaves once, a batch counts until its last one left."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.batches_in_flight import BatchesInFlight
from tests.support.batching import make_attempt


class Ranks:
    """Two ranks, attempts of 10 tokens."""

    def __init__(self, ranks=2):
        self.batches = BatchesInFlight(ranks)
        self._number = 0

    def open(self, size, rank=0):
        attempts = []
        for _ in range(size):
            self._number += 1
            attempts.append(make_attempt(self._number, rank))
        batch = self.batches.open(rank, attempts)
        self.batches.check()
        return batch, attempts

    def leave(self, attempt):
        is_closed = self.batches.leave(attempt)
        self.batches.check()
        return is_closed


def test_what_a_batch_knows():
    ranks = Ranks()
    batch, attempts = ranks.open(3, rank=1)
    assert (batch.rank, batch.size) == (1, 3)
    assert list(batch.members) == attempts
    assert all(attempt.batch is batch for attempt in attempts)
    assert ranks.batches.of_rank(1) == [batch]
    assert (ranks.batches.count(0), ranks.batches.count(1)) == (0, 1)


def test_a_batch_counts_until_its_last_member_left():
    ranks = Ranks()
    batch, (first, second, third) = ranks.open(3)
    assert not ranks.leave(second)
    assert (len(batch.members), ranks.batches.count(0)) == (2, 1)
    assert not ranks.leave(first)
    assert (len(batch.members), ranks.batches.count(0)) == (1, 1)
    assert ranks.leave(third)
    assert (len(batch.members), ranks.batches.count(0)) == (0, 0)
    assert ranks.batches.of_rank(0) == []


def test_the_ranks_at_the_limit_are_those_with_as_many_batches():
    ranks = Ranks()
    _, (only,) = ranks.open(1, rank=1)
    ranks.open(2, rank=1)
    ranks.open(1, rank=0)
    assert ranks.batches.at_limit(1) == [0, 1]
    assert ranks.batches.at_limit(2) == [1]
    ranks.leave(only)
    assert ranks.batches.at_limit(2) == []


def test_a_member_leaves_once():
    ranks = Ranks()
    batch, (first, second) = ranks.open(2)
    ranks.leave(first)
    assert not ranks.leave(first)
    assert (list(batch.members), ranks.batches.count(0)) == ([second], 1)
    assert ranks.leave(second)
    ranks.open(1)
    assert not ranks.leave(second), "closed before: it must not close another one"
    assert ranks.batches.count(0) == 1


def test_an_attempt_that_was_in_no_batch_may_leave():
    ranks = Ranks()
    ranks.open(1)
    assert not ranks.leave(make_attempt(99))
    assert ranks.batches.count(0) == 1


def test_a_cancelled_member_leaves_the_others():
    ranks = Ranks()
    batch, attempts = ranks.open(4)
    assert not ranks.leave(attempts[1])
    assert list(batch.members) == [attempts[0], attempts[2], attempts[3]]
    assert batch.size == 4
    assert attempts[1].batch is batch, "it still says where the attempt was"


def test_a_refused_member_leaves_at_once_and_no_other_is_undone():
    ranks = Ranks()
    batch, (first, second, third) = ranks.open(3)
    ranks.leave(first)
    ranks.leave(second)
    assert list(batch.members) == [third]
    assert ranks.batches.count(0) == 1


def test_cancelling_all_batches_opens_the_gate():
    ranks = Ranks()
    for _ in range(10):
        batches = [ranks.open(3)[1] for _ in range(2)]
        assert ranks.batches.count(0) == 2
        for attempt in [*batches[1], *batches[0]]:
            ranks.leave(attempt)
        assert ranks.batches.count(0) == 0


def test_a_lost_rank_has_no_batches_and_another_one_keeps_its_own():
    ranks = Ranks()
    lost = [attempt for _ in range(3) for attempt in ranks.open(2, rank=0)[1]]
    kept, _ = ranks.open(2, rank=1)
    for attempt in lost:
        ranks.leave(attempt)
    assert ranks.batches.count(0) == 0
    assert ranks.batches.of_rank(1) == [kept]


def test_numbers_are_never_used_again():
    ranks = Ranks()
    seen = []
    for rank in (0, 1, 0, 1):
        batch, (only,) = ranks.open(1, rank=rank)
        seen.append(batch.number)
        ranks.leave(only)
    assert seen == sorted(set(seen))


def test_batches_of_a_rank_are_listed_oldest_first():
    ranks = Ranks()
    opened = [ranks.open(2) for _ in range(3)]
    for attempt in opened[1][1]:
        ranks.leave(attempt)
    assert ranks.batches.of_rank(0) == [opened[0][0], opened[2][0]]


@pytest.mark.parametrize("case", ["empty", "twice", "in_two", "left_before", "other_rank"])
def test_a_wrong_batch_is_a_defect_and_changes_nothing(case):
    ranks = Ranks()
    _, (member,) = ranks.open(1)
    fresh = make_attempt(50)
    if case == "left_before":
        ranks.leave(member)
    attempts = {
        "empty": [],
        "twice": [fresh, fresh],
        "in_two": [fresh, member],
        "left_before": [fresh, member],
        "other_rank": [fresh, make_attempt(51, rank=1)],
    }[case]
    count = ranks.batches.count(0)
    with pytest.raises(AssertionError):
        ranks.batches.open(0, attempts)
    ranks.batches.check()
    assert ranks.batches.count(0) == count
    assert fresh.batch is None


def broken_member_in_two(ranks, batch, attempts):
    other, (one, _) = ranks.open(2)
    ranks.leave(one)
    other.members[attempts[0]] = None


def broken_empty(ranks, batch, attempts):
    batch.members.clear()


def broken_released(ranks, batch, attempts):
    attempts[0].released = True


def broken_wrong_rank(ranks, batch, attempts):
    attempts[0].rank = 1


@pytest.mark.parametrize("damage", [broken_member_in_two, broken_empty, broken_released, broken_wrong_rank])
def test_check_finds_wrong_books(damage):
    ranks = Ranks()
    batch, attempts = ranks.open(2)
    damage(ranks, batch, attempts)
    with pytest.raises(AssertionError):
        ranks.batches.check()


class Books(RuleBasedStateMachine):
    """Against a plain list of lists per rank."""

    @initialize()
    def start(self):
        self.ranks = Ranks(3)
        self.model = []
        self.left = []

    @rule(size=st.integers(1, 5), rank=st.integers(0, 2))
    def open(self, size, rank):
        batch, attempts = self.ranks.open(size, rank)
        self.model.append((batch, attempts))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data):
        _, attempts = data.draw(st.sampled_from(self.model))
        attempt = data.draw(st.sampled_from(attempts))
        attempts.remove(attempt)
        self.left.append(attempt)
        attempt.released = True
        assert self.ranks.batches.leave(attempt) == (not attempts)
        self.model = [entry for entry in self.model if entry[1]]

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def leave_again(self, data):
        assert not self.ranks.batches.leave(data.draw(st.sampled_from(self.left)))

    @rule(rank=st.integers(0, 2))
    def lose(self, rank):
        for batch, attempts in self.model:
            if batch.rank == rank:
                for attempt in attempts:
                    attempt.released = True
                    self.ranks.batches.leave(attempt)
                self.left += attempts
        self.model = [entry for entry in self.model if entry[0].rank != rank]
        assert self.ranks.batches.count(rank) == 0

    @invariant()
    def books_agree(self):
        self.ranks.batches.check()
        for rank in range(3):
            mine = [(batch, attempts) for batch, attempts in self.model if batch.rank == rank]
            assert self.ranks.batches.count(rank) == len(mine)
            assert self.ranks.batches.of_rank(rank) == [batch for batch, _ in mine]
            for batch, attempts in mine:
                assert list(batch.members) == attempts


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
