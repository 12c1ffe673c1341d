"""One batch into the core: what is appended, what ends, what is passed on to be aborted."""

import pytest

from gateway.core import batches
from gateway.core.errors import Reason
from gateway.core.events import BatchReceived
from gateway.core.outbox import PACK_AT_TOKENS
from gateway.types import EngineBatch, Sampling, TokenLogprob
from tests.support.core import Bench, load, wire_id


def counters(bench):
    return bench.router.counters


def test_rows_and_tokens_are_counted_per_rank():
    bench = Bench(2)
    first, second = bench.request(pinned_rank=1), bench.request(pinned_rank=1)
    bench.batch(1, [(wire_id(first), [1, 2]), (wire_id(second), [3]), ("unknown", [4])])
    assert (counters(bench).batches, counters(bench).tokens) == ([0, 1], [0, 3])
    assert (counters(bench).rows, counters(bench).orphan_rows) == (3, 1)


def test_a_sequence_is_dirty_once_however_many_rows_it_has():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [1]), (wire_id(request), [2])])
    bench.batch(0, [(wire_id(request), [3])])
    assert bench.router.take_dirty() == request.sequences
    bench.batch(0, [(wire_id(request), [4])])
    assert request.sequences[0].take() == ([1, 2, 3, 4], None)


def test_a_row_without_tokens_or_finish_starts_nothing():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [])])
    assert request.first_token_at is None
    assert bench.router.ranks.in_flight_prefill == [1]


@pytest.mark.parametrize(("cached", "expected"), [([2], 2), ([None], 0), (None, 0)])
def test_cached_tokens_are_those_of_the_first_row_with_tokens(cached, expected):
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [1])], cached_tokens=cached)
    bench.batch(0, [(wire_id(request), [1])], cached_tokens=[9])
    assert request.sequences[0].cached_tokens == expected


def test_the_next_rank_s_first_row_says_anew_what_its_cache_had():
    bench = Bench(2, failure={"resume": True})
    request = bench.request(sampling=Sampling(max_tokens=4, temperature=0.0))
    (sequence,) = request.sequences
    bench.batch(sequence.attempt.rank, [(wire_id(request), [1])], cached_tokens=[3])
    assert sequence.cached_tokens == 3
    bench.lose(sequence.attempt.rank)
    bench.batch(sequence.attempt.rank, [(wire_id(request), [2])], cached_tokens=[None])
    assert (sequence.completion_tokens, sequence.cached_tokens) == (2, 0)


def test_nothing_after_the_end_is_delivered_even_in_the_same_batch():
    bench = Bench(1)
    request = bench.request()
    sequence, identity = request.sequences[0], wire_id(request)
    bench.batch(0, [(identity, [1], "stop"), (identity, [2], "stop"), (identity, [3])])
    assert sequence.take() == ((1,), None)
    assert counters(bench).late_rows == 2
    assert bench.ended == [request]
    bench.assert_quiet()


@pytest.mark.parametrize(
    ("wanted", "row", "delivered"),
    [
        (None, [TokenLogprob(-0.5)], None),
        (1, None, None),
        (0, [TokenLogprob(-0.5)], [TokenLogprob(-0.5)]),
        (2, [TokenLogprob(-0.5, ((1, -1.0), (2, -2.0)))], [TokenLogprob(-0.5, ((1, -1.0), (2, -2.0)))]),
        (1, [TokenLogprob(-0.5, ((1, -1.0), (2, -2.0)))], [TokenLogprob(-0.5, ((1, -1.0),))]),
    ],
)
def test_logprobs_are_those_that_were_asked_for(wanted, row, delivered):
    bench = Bench(1)
    request = bench.request(sampling=Sampling(max_tokens=4, logprobs=wanted))
    bench.batch(0, [(wire_id(request), [1])], logprobs=[row])
    assert request.sequences[0].take() == ((1,), delivered)


def test_a_backlog_is_packed_as_soon_as_it_is_long():
    bench = Bench(1)
    request = bench.request(max_tokens=200)
    (sequence,) = request.sequences
    for sent in range(1, PACK_AT_TOKENS + 1):
        assert sequence.packed is None, sent
        bench.batch(0, [(wire_id(request), [sent])])
    assert list(sequence.packed) == list(range(1, PACK_AT_TOKENS + 1))


def test_a_reader_that_falls_behind_token_by_token_is_ended():
    bench = Bench(1, limits={"max_stream_buffer_bytes": 2048})
    request = bench.request(max_tokens=2000)
    sent = 0
    while request.error is None:
        bench.batch(0, [(wire_id(request), [7])])
        sent += 1
    assert request.error.reason is Reason.SLOW_READER
    assert 2048 // 4 < sent <= 2048 // 4 + PACK_AT_TOKENS


def test_strays_of_one_batch_are_bounded_and_absurd_ids_are_not_repeated(monkeypatch):
    monkeypatch.setattr(batches, "MAX_STRAYS_PER_BATCH", 2)
    bench = Bench(1)
    long = "x" * (batches.MAX_STRAY_ID_CHARS + 1)
    bench.batch(0, [(long, [1]), ("a", [1]), ("b", [1]), ("c", [1])])
    assert [effect.wire_ids for effect in bench.aborted] == [["a", "b"]]
    bench.batch(0, [("c", [1])])
    assert [effect.wire_ids for effect in bench.aborted[1:]] == [["c"]]
    assert counters(bench).orphan_rows == 5
    assert counters(bench).reaborts == 3


def test_columns_of_different_lengths_are_a_defect_of_the_codec():
    bench = Bench(1)
    request = bench.request()
    uneven = EngineBatch(ids=[wire_id(request)], token_ids=[], finish=[""])
    with pytest.raises(ValueError, match="shorter"):
        bench.send(BatchReceived(0, 1, uneven))


def test_an_unreadable_row_of_another_rank_fails_nobody():
    bench = Bench(2)
    request = bench.request(pinned_rank=0)
    bench.batch(1, [], failed_ids=[wire_id(request)], fault="bad_row")
    assert not request.is_ended
    assert counters(bench).failed_rows == 1


def test_a_batch_that_finishes_and_reports_leaves_the_report_of_an_idle_rank():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [1], "stop")], load(3, 1, 0.5))
    assert (bench.router.ranks.running, bench.router.ranks.kv_usage) == ([0], [0.5])
    assert counters(bench).snapshots == [1]
