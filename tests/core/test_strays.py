"""Which stray ids are aborted, and when."""

from gateway.core import strays
from gateway.core.strays import INTERVAL_S, Strays

OURS, THEIRS = "0123-1-0-1", "ffff-1-0-1"


def make(settle_s=1.0):
    return Strays("0123", settle_s)


def test_only_ids_with_our_prefix_are_ours():
    book = make()
    assert book.is_ours(OURS)
    assert not book.is_ours(THEIRS)
    assert not book.is_ours("01234-1-0-1")


def test_an_orphan_is_aborted_at_once_and_then_once_per_interval():
    book = make()
    due = [now for now in (0.0, 0.5, INTERVAL_S, 1.5, 2 * INTERVAL_S) if book.seen(0, THEIRS, now, is_final=False)]
    assert due == [0.0, INTERVAL_S, 2 * INTERVAL_S]


def test_our_own_id_gets_the_settle_time_first():
    book = make(settle_s=3.0)
    due = [now for now in (0.0, 1.0, 2.9, 3.0, 3.5, 4.0) if book.seen(0, OURS, now, is_final=False)]
    assert due == [3.0, 4.0]


def test_a_final_row_needs_no_abort_and_is_forgotten():
    book = make()
    assert book.seen(0, THEIRS, 0.0, is_final=False)
    assert not book.seen(0, THEIRS, 5.0, is_final=True)
    assert book.seen(0, THEIRS, 5.0, is_final=False), "as if it was never seen"


def test_ranks_are_told_apart_and_forgotten_one_by_one():
    book = make()
    assert book.seen(0, THEIRS, 0.0, is_final=False)
    assert book.seen(1, THEIRS, 0.0, is_final=False)
    book.forget(0)
    assert book.seen(0, THEIRS, 0.1, is_final=False)
    assert not book.seen(1, THEIRS, 0.1, is_final=False)


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(strays, "MAX_REMEMBERED", 3)
    book = make()
    for number in range(3):
        book.seen(0, f"x{number}", 0.0, is_final=False)
    book.seen(0, "x0", 0.1, is_final=False)  # the oldest is now x1
    book.seen(0, "x3", 0.2, is_final=False)
    assert len(book._next_abort_at) == 3
    assert book.seen(0, "x1", 0.3, is_final=False), "dropped, so it counts as new"
    assert not book.seen(0, "x0", 0.3, is_final=False)
