"""The response cache: what is stored of an answer, and how long it stays."""

import os
import tracemalloc
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings

from gateway.config.scheduling import ResponseCache as Settings
from gateway.core.errors import GatewayError, Reason
from gateway.core.request import Record, Request
from gateway.core.response_cache import (
    ALTERNATIVE_BYTES,
    ENTRY_BYTES,
    LOGPROB_BYTES,
    SEQUENCE_BYTES,
    CachedAnswer,
    ResponseCache,
    build,
)
from gateway.types import TokenLogprob
from tests.support.ordering import make_arrived


def make_cache(max_bytes=1000, max_entry_bytes=500, ttl_s=None):
    return ResponseCache(Settings(max_bytes=max_bytes, max_entry_bytes=max_entry_bytes, ttl_s=ttl_s))


def give(cache, key, now):
    """Ask for an answer, and give it to somebody if there is one."""
    found = cache.get(key, now)
    if found is not None:
        cache.used(key)
    return found


def answer(nbytes, prompt_tokens=1):
    return CachedAnswer((), prompt_tokens, nbytes)


def make_ended(tokens=((7, 8, 9),), finish="stop", *, logprobs=None, record=True, limit_bytes=10**6):
    """A request that generated this, one tuple per sequence, and ended so."""
    request = Request(1, make_arrived(n=len(tokens), temperature=0.0, max_tokens=100, logprobs=logprobs), 0.0)
    for sequence, generated in zip(request.sequences, tokens, strict=True):
        if record:
            sequence.record = Record(cache_bytes=limit_bytes)
        for token in generated:
            row = None if logprobs is None else [TokenLogprob(-0.5, ((token, -0.5),) * logprobs)]
            sequence.append([token], row)
        sequence.finish = finish
        sequence.cached_tokens = 2
    return request


# What is stored


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_complete_answer_is_kept_as_it_was(finish):
    request = make_ended([(7, 8, 9), ()], finish)
    for sequence in request.sequences:
        sequence.take()  # delivered before it ended; the record does not care
    built = build(request)
    assert [(list(s.token_ids), s.logprobs, s.finish, s.cached_tokens) for s in built.sequences] == [
        ([7, 8, 9], None, finish, 2),
        ([], None, finish, 2),
    ]
    assert built.prompt_tokens == 3
    assert built.nbytes == ENTRY_BYTES + 2 * SEQUENCE_BYTES + 3 * 4


def test_log_probabilities_are_kept_and_counted():
    built = build(make_ended([(7, 8)], logprobs=3))
    assert built.sequences[0].logprobs == tuple(TokenLogprob(-0.5, ((token, -0.5),) * 3) for token in (7, 8))
    assert built.nbytes == ENTRY_BYTES + SEQUENCE_BYTES + 2 * (4 + LOGPROB_BYTES + 3 * ALTERNATIVE_BYTES)


def test_an_answer_shares_nothing_with_its_request():
    request = make_ended([(7, 8)], logprobs=0)
    built = build(request)
    request.sequences[0].append([9], [TokenLogprob(-1.0)])
    request.unlink()
    assert list(built.sequences[0].token_ids) == [7, 8]
    assert len(built.sequences[0].logprobs) == 2


@pytest.mark.parametrize("finish", ["", "abort", "error"])
def test_partial_cancelled_and_failed_answers_are_not_stored(finish):
    assert build(make_ended([(7,), (8,)], finish)) is None
    one_of_two = make_ended([(7,), (8,)])
    one_of_two.sequences[1].finish = finish
    assert build(one_of_two) is None


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.RANK_LOST, Reason.DEADLINE_EXCEEDED])
def test_a_request_that_ended_with_an_error_is_not_stored(reason):
    request = make_ended()
    request.error = GatewayError(reason, "too bad")
    assert build(request) is None


def test_an_answer_without_a_whole_record_is_not_stored():
    assert build(make_ended(record=False)) is None
    assert build(make_ended([(7,), tuple(range(100))], limit_bytes=100)) is None  # outgrew its record
    late = make_ended()
    late.sequences[0].record.token_ids.pop()
    assert build(late) is None
    unlinked = make_ended()
    unlinked.unlink()
    assert build(unlinked) is None


def test_missing_log_probabilities_are_a_part_of_the_answer_that_is_missing():
    request = make_ended([(7, 8)], logprobs=1)
    request.sequences[0].record.logprobs.pop()
    assert build(request) is None


@pytest.mark.parametrize(("sequences", "tokens", "logprobs"), [(1, 100, None), (4, 30, None), (1, 20, 0), (2, 20, 5)])
def test_sizes_are_what_the_answers_take_in_memory(sequences, tokens, logprobs):
    """Not less, or the bound would be none; and not much more, or room would be wasted."""
    cache = ResponseCache(Settings(max_bytes=2**30))
    count = 300
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            generated = [range(1000 * number, 1000 * number + tokens)] * sequences
            request = make_ended(generated) if logprobs is None else make_scored(generated, logprobs)
            cache.put(os.urandom(32), build(request), float(number))
            request.unlink()
        del request, generated
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.entries == count
    assert taken <= cache.nbytes <= 1.6 * taken


def make_scored(generated, alternatives):
    """No two of its log probabilities share an object, as in real ones."""
    request = make_ended([()] * len(generated), logprobs=alternatives)
    for sequence, tokens in zip(request.sequences, generated, strict=True):
        for token in tokens:
            top = tuple((token + 1000 + other, -float(token + other)) for other in range(alternatives))
            sequence.append([token], [TokenLogprob(-float(token) / 3, top)])
    return request


# How long it stays


def test_a_hit_returns_the_very_answer_and_a_miss_nothing():
    cache = make_cache()
    stored = answer(100)
    assert cache.get(b"a", 0.0) is None
    assert cache.put(b"a", stored, 0.0)
    assert cache.get(b"a", 1e9) is stored
    assert cache.hits == 0, "found, but not given to anybody yet"
    assert give(cache, b"a", 1e9) is stored
    assert cache.get(b"b", 0.0) is None
    assert (cache.hits, cache.misses, cache.inserts, cache.entries, cache.nbytes) == (1, 2, 1, 1, 100)


def test_the_least_recently_used_goes_first():
    cache = make_cache(max_bytes=300)
    for key in (b"a", b"b", b"c"):
        cache.put(key, answer(100), 0.0)
    give(cache, b"a", 1.0)
    cache.get(b"b", 1.0)  # not given to anybody, so not used
    cache.put(b"d", answer(150), 2.0)
    assert [cache.get(key, 3.0) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    assert (cache.evictions, cache.nbytes, cache.entries) == (2, 250, 2)


def test_an_answer_expires_at_its_age_however_often_it_is_used():
    cache = make_cache(ttl_s=10.0)
    cache.put(b"a", answer(100), 5.0)
    assert give(cache, b"a", 14.999) is not None
    assert cache.get(b"a", 15.0) is None
    assert (cache.hits, cache.misses, cache.expired, cache.entries, cache.nbytes) == (1, 1, 1, 0, 0)
    assert cache.evictions == 0


def test_storing_again_replaces_and_renews():
    cache = make_cache(ttl_s=10.0)
    cache.put(b"a", answer(100), 0.0)
    newer = answer(120)
    assert cache.put(b"a", newer, 8.0)
    assert cache.get(b"a", 17.0) is newer
    assert (cache.inserts, cache.entries, cache.nbytes, cache.evictions) == (2, 1, 120, 0)


@pytest.mark.parametrize(("max_bytes", "max_entry_bytes"), [(1000, 500), (500, 1000)])
def test_a_too_large_answer_is_not_stored_and_pushes_nothing_out(max_bytes, max_entry_bytes):
    cache = make_cache(max_bytes, max_entry_bytes)
    kept = answer(100)
    cache.put(b"a", kept, 0.0)
    assert not cache.put(b"a", answer(501), 0.0)
    assert not cache.put(b"b", answer(501), 0.0)
    assert cache.get(b"a", 0.0) is kept
    assert (cache.too_large, cache.inserts, cache.entries, cache.nbytes) == (2, 1, 1, 100)
    assert cache.put(b"b", answer(500), 0.0)


def test_a_flush_forgets_everything():
    cache = make_cache()
    cache.put(b"a", answer(100), 0.0)
    cache.put(b"b", answer(50), 0.0)
    cache.flush()
    assert cache.get(b"a", 0.0) is None
    cache.flush()
    assert (cache.flushes, cache.entries, cache.nbytes) == (2, 0, 0)
    cache.check()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(0, 7)),
        st.tuples(st.just("put"), st.integers(0, 7), st.integers(1, 70)),
        st.tuples(st.just("wait"), st.integers(0, 6)),
        st.tuples(st.just("flush")),
    ),
    max_size=80,
)


@given(operations, st.integers(1, 200), st.integers(1, 60), st.none() | st.integers(1, 10))
@example([("put", 0, 5), ("wait", 3), ("get", 0)], 100, 60, 3)
@hypothesis_settings(max_examples=300, deadline=None)
def test_it_behaves_as_a_list_in_order_of_use(steps, max_bytes, max_entry_bytes, ttl_s):
    cache = make_cache(max_bytes, max_entry_bytes, ttl_s)
    rows: list[tuple[bytes, CachedAnswer, int]] = []  # least recently used first
    counts = dict.fromkeys(("hits", "misses", "inserts", "evictions", "expired", "too_large", "flushes"), 0)
    now = 0
    for step in steps:
        key = bytes([step[1]]) if len(step) > 1 else b""
        row = next((row for row in rows if row[0] == key), None)
        if step[0] == "wait":
            now += step[1]
        elif step[0] == "flush":
            assert (cache.entries, cache.nbytes) == (len(rows), sum(each.nbytes for _, each, _ in rows))
            cache.flush()
            rows.clear()
            counts["flushes"] += 1
        elif step[0] == "get":
            got = give(cache, key, now)
            is_old = row is not None and ttl_s is not None and now - row[2] >= ttl_s
            if row is not None:
                rows.remove(row)
            if row is None or is_old:
                assert got is None
                counts["misses"] += 1
                counts["expired"] += is_old
            else:
                assert got is row[1]
                rows.append(row)
                counts["hits"] += 1
        else:
            new = answer(step[2])
            fits = new.nbytes <= min(max_bytes, max_entry_bytes)
            assert cache.put(key, new, now) == fits
            counts["inserts" if fits else "too_large"] += 1
            if fits:
                if row is not None:
                    rows.remove(row)
                rows.append((key, new, now))
                while sum(each.nbytes for _, each, _ in rows) > max_bytes:
                    rows.pop(0)
                    counts["evictions"] += 1
        cache.check()
        assert (cache.entries, cache.nbytes) == (len(rows), sum(each.nbytes for _, each, _ in rows))
        assert {name: getattr(cache, name) for name in counts} == counts


def test_check_sees_what_is_wrong():
    cache = make_cache()
    cache.put(b"a", answer(100), 0.0)
    cache.check()
    cache.nbytes += 1
    with pytest.raises(AssertionError):
        cache.check()


def test_token_ids_stay_packed():
    (sequence,) = build(make_ended([range(50)])).sequences
    assert isinstance(sequence.token_ids, array)
    assert sequence.token_ids.itemsize == 4
