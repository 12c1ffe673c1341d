"""The hand-made bytes are the ones that protobuf makes."""

from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.events import RequestArrived
from gateway.core.request import Attempt, Request
from gateway.edges.grpc_encode import FULL_MESSAGE_BYTES, encode_head, encode_many, encode_output
from gateway.types import Sampling, TokenLogprob
from gateway.v1 import gateway_pb2

token_ids = st.integers(0, 2**32 - 1)
floats = st.floats(width=32, allow_nan=False)
logprobs = st.builds(TokenLogprob, floats, st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple))
rows = st.tuples(token_ids, logprobs)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


def make_sequence(request_id="r", prompt=3, index=0, rank=0):
    arrived = RequestArrived(
        client_key="",
        request_id=request_id,
        prompt_token_ids=[1] * prompt,
        sampling=Sampling(max_tokens=9),
        n=index + 1,
    )
    sequence = Request(1, arrived, 0.0).sequences[index]
    sequence.attempts = 1
    sequence.attempt = Attempt(sequence, "w", 1, rank, 1, 0.0)
    return sequence


def expected(sequence, tokens, items=None):
    response = gateway_pb2.GenerateResponse(
        request_id=sequence.request.arrived.request_id, index=sequence.index, token_ids=tokens
    )
    for item in items or ():
        entry = response.logprobs.add(logprob=item.logprob)
        for token, logprob in item.top:
            entry.top.add(token_id=token, logprob=logprob)
    if sequence.finish:
        response.finish.reason = gateway_pb2.FinishReason.Value(f"FINISH_REASON_{sequence.finish.upper()}")
        response.finish.prompt_tokens = len(sequence.request.arrived.prompt_token_ids)
        response.finish.completion_tokens = sequence.completion_tokens
        response.finish.cached_tokens = sequence.cached_tokens
        if sequence.attempt is not None:
            response.finish.rank = sequence.attempt.rank
        response.finish.attempts = sequence.attempts
    return response


def encoded(sequence):
    rest = []
    message = encode_output(encode_head(sequence.request.arrived.request_id, sequence.index), sequence, rest)
    assert rest == []
    return message


@given(
    name=names,
    index=st.integers(0, 200),
    steps=st.lists(st.lists(rows, max_size=60), max_size=4),
    has_logprobs=st.booleans(),
    finish=st.sampled_from(["", "stop", "length", "abort", "error"]),
    cached=st.integers(0, 2**20),
    rank=st.integers(0, 1024),
)
def test_output_equals_protobuf(name, index, steps, has_logprobs, finish, cached, rank):
    sequence = make_sequence(name, prompt=130, index=index, rank=rank)
    sequence.cached_tokens = cached
    for step in steps:
        sequence.append([row[0] for row in step], [row[1] for row in step] if has_logprobs else None)
    sequence.finish = finish
    done = [row for step in steps for row in step]
    message = expected(sequence, [row[0] for row in done], [row[1] for row in done] if has_logprobs else None)
    data = encoded(sequence)
    if done or finish:
        assert data == message.SerializeToString(deterministic=True)
    else:
        assert data == b""
    assert sequence.take()[0] == []


@given(st.lists(st.lists(token_ids, min_size=1, max_size=5), max_size=5), st.integers(0, 3))
def test_many_equals_protobuf(token_lists, errors):
    sequences = [make_sequence(f"r{number}") for number in range(len(token_lists))]
    response = gateway_pb2.GenerateManyResponse()
    for sequence, tokens in zip(sequences, token_lists, strict=True):
        sequence.append(tokens, None)
        response.outputs.append(expected(sequence, tokens))
    for number in range(errors):
        response.errors.add(request_id=f"e{number}").status.code = number
    entries = [error.SerializeToString() for error in response.errors]
    assert encode_many(map(encoded, sequences), entries) == response.SerializeToString()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e39, -1e39, float("inf"), float("-inf"), nan, 1e-50])
def test_odd_floats_equal_protobuf(value):
    sequence = make_sequence()
    item = TokenLogprob(value, ((0, value),))
    sequence.append([0], [item])
    assert encoded(sequence) == expected(sequence, [0], [item]).SerializeToString()


def test_zero_is_sent_where_it_is_a_fact():
    sequence = make_sequence()
    sequence.append([0], None)
    sequence.finish = "stop"
    message = gateway_pb2.GenerateResponse.FromString(encoded(sequence))
    assert message.HasField("index")
    assert message.finish.HasField("rank")
    assert message.finish.HasField("cached_tokens")


def test_a_long_backlog_that_the_core_packed_is_encoded_whole():
    sequence = make_sequence()
    tokens = list(range(1000))
    for token in tokens:
        sequence.append([token], None)
    assert encoded(sequence) == expected(sequence, tokens).SerializeToString()


def test_an_answer_that_no_rank_gave_has_no_rank_and_no_attempts():
    sequence = make_sequence()
    sequence.attempt, sequence.attempts = None, 0
    sequence.append([4, 5], None)
    sequence.finish = "stop"
    data = encoded(sequence)
    message = gateway_pb2.GenerateResponse.FromString(data)
    assert not message.finish.HasField("rank")
    assert message.finish.HasField("attempts")
    assert message.finish.attempts == 0
    assert data == expected(sequence, [4, 5]).SerializeToString()


class TestMoreThanAMessageHolds:
    """What waited for its turn in the preserved order may be far more than a client takes at once."""

    @pytest.mark.parametrize("alternatives", [None, 0, 3, 128])
    def test_it_is_cut_into_messages_that_together_say_the_same(self, alternatives):
        sequence = make_sequence()
        tokens = [2**32 - 1 - number for number in range(300_000 if alternatives is None else 8000)]
        items = None
        if alternatives is not None:
            top = tuple((2**32 - 1, -1.0) for _ in range(alternatives))
            items = [TokenLogprob(-float(token % 7), top) for token in tokens]
        sequence.append(tokens, items)
        sequence.finish = "stop"
        rest = []
        messages = [encode_output(encode_head("r", 0), sequence, rest), *rest]
        assert len(messages) > 1 or alternatives in (0, 3)
        assert max(map(len, messages)) < 1.1 * FULL_MESSAGE_BYTES
        joined = gateway_pb2.GenerateResponse()
        for message in messages:
            part = gateway_pb2.GenerateResponse.FromString(message)
            assert (part.request_id, part.HasField("index")) == ("r", True)
            assert part.HasField("finish") == (message is messages[-1])
            assert items is None or len(part.logprobs) == len(part.token_ids)
            joined.MergeFrom(part)
        assert joined == expected(sequence, tokens, items)

    def test_what_is_never_cut_stays_below_two_mebibytes(self):
        sequence = make_sequence()
        top = tuple((2**32 - 1, -1.0) for _ in range(128))
        sequence.append([2**32 - 1] * 1024, [TokenLogprob(-1.0, top)] * 1024)
        assert len(encoded(sequence)) < 2 * FULL_MESSAGE_BYTES
