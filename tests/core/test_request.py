"""The outbox of a sequence, and how an ended request lets go of its parts."""

import gc
import weakref

import pytest

from gateway.core.request import BYTES_PER_TOKEN, Attempt, Request
from gateway.types import TokenLogprob
from tests.support.core import Bench

PACK_AT = 128


def make_request(n=1, prompt=(5, 6, 7)):
    return Request(1, Bench(1).arrived(prompt, n=n, sink="sink"), now=100.0)


def test_a_new_request_has_its_sequences_and_nothing_done():
    request = make_request(n=3)
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2]
    assert (request.unfinished, request.accepted_at, request.sink) == (3, 100.0, "sink")
    assert (request.is_ended, request.error, request.first_token_at, request.last_rank) == (False, None, None, None)
    assert all(sequence.finish == "" and sequence.attempt is None for sequence in request.sequences)


def test_tokens_leave_in_order_and_once():
    (sequence,) = make_request().sequences
    sequence.is_dirty = True
    assert not sequence.append([1, 2], None)
    assert not sequence.append([3], None)
    assert sequence.take() == ([1, 2, 3], None)
    assert not sequence.is_dirty
    assert sequence.take() == ([], None)
    assert sequence.completion_tokens == 3


@pytest.mark.parametrize("step", [1, 50, 127, 128, 129, 1000])
def test_a_backlog_is_packed_without_losing_its_order(step):
    (sequence,) = make_request().sequences
    total = 3 * max(step, PACK_AT)
    was_packed = False
    for start in range(0, total, step):
        was_packed |= sequence.append(range(start, start + step), None)
    assert was_packed
    count = len(range(0, total, step)) * step
    assert sequence.backlog_bytes == BYTES_PER_TOKEN * count
    tokens, _ = sequence.take()
    assert list(tokens) == list(range(count))
    assert sequence.backlog_bytes == 0
    assert sequence.take() == ([], None)


def test_packing_reports_only_the_append_that_packed():
    (sequence,) = make_request().sequences
    assert not sequence.append(range(PACK_AT - 1), None)
    assert sequence.append([7], None)
    assert not sequence.append([8], None)


def test_the_largest_token_id_survives_packing():
    (sequence,) = make_request().sequences
    sequence.append([2**32 - 1] * PACK_AT, None)
    assert list(sequence.take()[0]) == [2**32 - 1] * PACK_AT


def test_logprobs_are_collected_weighed_and_taken_along():
    (sequence,) = make_request().sequences
    plain, wide = TokenLogprob(-0.5), TokenLogprob(-1.5, ((1, -0.1), (2, -0.2)))
    sequence.append([1], [plain])
    sequence.append([2], [wide])
    assert sequence.backlog_bytes == 2 * BYTES_PER_TOKEN + 64 + 64 + 2 * 16
    assert sequence.take() == ([1, 2], [plain, wide])
    assert sequence.backlog_bytes == 0


def test_an_attempt_starts_unreleased_with_its_prompt():
    request = make_request(prompt=[1] * 9)
    attempt = Attempt(request.sequences[0], "id", 1, rank=2, incarnation=3, sent_at=101.0)
    assert (attempt.prompt_tokens, attempt.rank, attempt.incarnation, attempt.sent_at) == (9, 2, 3, 101.0)
    assert (attempt.tokens_out, attempt.first_token_at, attempt.released) == (0, None, False)


def test_unlinked_requests_need_no_collector():
    class Sink:
        pass

    sink = Sink()
    request = Request(1, Bench(1).arrived(sink=sink, n=2), now=1.0)
    for sequence in request.sequences:
        sequence.attempt = Attempt(sequence, "id", 1, rank=0, incarnation=1, sent_at=1.0)
    gone = weakref.ref(sink)
    gc.disable()
    try:
        request.unlink()
        assert request.sequences == []
        del request, sequence, sink
        assert gone() is None
    finally:
        gc.enable()
