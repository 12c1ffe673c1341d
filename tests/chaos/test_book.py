"""The checks can fail: each kind of wrong answer is a violation, and a right one is none."""

import pytest

from engine_stub.tokens import expected_tokens
from gateway.v1 import gateway_pb2
from tests.chaos.book import OK, Book
from tests.chaos.checks import _compare
from tests.chaos.traffic import Job
from tests.support.deployment import VOCAB_SIZE

PROMPT = [4, 5, 6]
TOKENS = expected_tokens(PROMPT, None, 8, VOCAB_SIZE)


def watched(book, *, request_id="r", **job):
    sampling = gateway_pb2.Sampling(max_tokens=8, temperature=0.0)
    request = gateway_pb2.GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling)
    return book.watch(Job(request=request, **job), "Generate")


def output(tokens, *, request_id="r", finish=False, completion_tokens=8):
    response = gateway_pb2.GenerateResponse(request_id=request_id, index=0, token_ids=tokens)
    if finish:
        response.finish.reason = gateway_pb2.FINISH_REASON_LENGTH
        response.finish.prompt_tokens = len(PROMPT)
        response.finish.completion_tokens = completion_tokens
        response.finish.attempts = 1
    return response


def violations(*outputs, outcome=OK, **job):
    book = Book()
    one = watched(book, **job)
    for each in outputs:
        one.take(each)
    one.end(outcome)
    assert book.violation_count == len(book.violations)
    return book.violations


def test_a_right_answer_is_no_violation():
    assert not violations(output(TOKENS[:3]), output(TOKENS[3:], finish=True))
    assert not violations(output(TOKENS[:3]), outcome="RANK_LOST")
    assert not violations(outcome="GATEWAY_FULL")


@pytest.mark.parametrize(
    "outputs",
    [
        [output(TOKENS[:3]), output(TOKENS[4:], finish=True)],
        [output(TOKENS[:3]), output(TOKENS[2:], finish=True)],
        [output([*TOKENS[:3], 1, *TOKENS[4:]], finish=True)],
        [output([*TOKENS[1::-1], *TOKENS[2:]], finish=True)],
        [output(TOKENS[:7], finish=True)],
        [output(TOKENS, finish=True, completion_tokens=7)],
        [output(TOKENS)],
        [output(TOKENS, finish=True), output([])],
        [output(TOKENS, request_id="other", finish=True)],
        [],
    ],
    ids=[
        "lost",
        "doubled",
        "corrupted",
        "reordered",
        "short",
        "usage",
        "no finish",
        "after the end",
        "foreign",
        "empty",
    ],
)
def test_a_wrong_answer_is_one(outputs):
    assert violations(*outputs)


@pytest.mark.parametrize(
    ("outcome", "job"),
    [
        ("INTERNAL", {}),
        ("UNKNOWN", {}),
        ("ENGINE_ERROR", {}),
        ("CANCELLED", {}),
        ("CONNECTION_LOST", {}),
        ("SLOW_READER", {}),
        ("PINNED_RANK_UNAVAILABLE", {}),
        ("INVALID_REQUEST", {}),
        (OK, {"is_valid": False}),
        ("HUNG", {}),
    ],
)
def test_an_end_that_nothing_explains_is_one(outcome, job):
    assert violations(outcome=outcome, **job)


def test_an_end_that_something_explains_is_none():
    assert not violations(outcome="SLOW_READER", reads_slowly_s=1.0)
    assert not violations(outcome="INVALID_REQUEST", is_valid=False)
    book = Book()
    one = watched(book)
    one.is_given_up = True
    one.end("CANCELLED")
    assert not book.violations


def test_a_second_end_is_one():
    book = Book()
    one = watched(book)
    one.end("RANK_LOST")
    one.end("RANK_LOST")
    assert len(book.violations) == 1
    assert book.outcomes == {"RANK_LOST": 1}


@pytest.mark.parametrize(
    ("seen", "tokens", "logged", "generated", "is_fine"),
    [
        (OK, 8, "ok", 8, True),
        (OK, 8, None, 0, False),
        (OK, 8, "RANK_LOST", 8, False),
        (OK, 8, "ok", 9, False),
        ("CANCELLED", 3, "CANCELLED", 5, True),
        ("CANCELLED", 5, "CANCELLED", 3, False),
        ("DEADLINE_EXCEEDED", 3, "ok", 8, True),
        ("GATEWAY_FULL", 0, None, 0, True),
        ("RANK_LOST", 1, None, 0, False),
    ],
)
def test_client_and_log_must_agree(seen, tokens, logged, generated, is_fine):
    assert (_compare("r", seen, tokens, logged, generated) == []) is is_fine
