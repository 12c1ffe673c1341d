"""The hand-made bytes are the bytes that protobuf makes of the same values."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

from gateway.edges.grpc_engine.encode import TOKENSPEED, VLLM, SequenceEncoder
from gateway.types import TokenLogprob

FAMILIES = {"vllm": (VLLM, vllm_engine_pb2), "tokenspeed": (TOKENSPEED, tokenspeed_scheduler_pb2)}

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 300)
float32 = st.floats(allow_nan=False, width=32)
logprob = st.builds(TokenLogprob, logprob=float32, top=st.lists(st.tuples(uint32, float32), max_size=3).map(tuple))
rows = st.lists(st.tuples(uint32, logprob), min_size=1, max_size=5)


def expected_logprobs(pb, items):
    return pb.OutputLogProbs(token_logprobs=[lp.logprob for _, lp in items], token_ids=[token for token, _ in items])


def add_tops(pb, out, items):
    """A flush with any alternatives has one entry per position; one without has none."""
    if any(lp.top for _, lp in items):
        for _, lp in items:
            out.top_logprobs.append(
                pb.TopLogProbs(values=[value for _, value in lp.top], token_ids=[token for token, _ in lp.top])
            )


@pytest.mark.parametrize("family", FAMILIES)
@given(
    flushes=st.lists(rows, max_size=3),
    with_logprobs=st.booleans(),
    request_id=st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1, max_size=200),
    index=st.integers(0, 200),
    prompt=st.integers(1, 2**20),
    cached=st.integers(0, 2**20),
    finish=st.sampled_from(["stop", "length", "abort"]),
)
def test_every_shape_equals_protobuf(family, flushes, with_logprobs, request_id, index, prompt, cached, finish):
    layout, pb = FAMILIES[family]
    encoder = SequenceEncoder(layout, request_id, index, prompt)
    head = {"request_id": request_id} if family == "tokenspeed" else {}
    everything = []
    all_logprobs = pb.OutputLogProbs()
    for items in flushes:
        everything += items
        tokens = [token for token, _ in items]
        chunk = pb.GenerateStreamChunk(
            token_ids=tokens,
            prompt_tokens=prompt,
            completion_tokens=len(everything),
            cached_tokens=cached,
            index=index,
        )
        if with_logprobs:
            part = expected_logprobs(pb, items)
            add_tops(pb, part, items)
            chunk.output_logprobs.CopyFrom(part)
            all_logprobs.MergeFrom(part)
        got = encoder.chunk(tokens, [lp for _, lp in items] if with_logprobs else None, cached)
        assert got == pb.GenerateResponse(chunk=chunk, **head).SerializeToString(deterministic=True)
    complete = pb.GenerateComplete(
        output_ids=[token for token, _ in everything],
        finish_reason=finish,
        prompt_tokens=prompt,
        completion_tokens=len(everything),
        cached_tokens=cached,
        index=index,
    )
    if with_logprobs and flushes:
        complete.output_logprobs.CopyFrom(all_logprobs)
    expected = pb.GenerateResponse(complete=complete, **head).SerializeToString(deterministic=True)
    assert encoder.complete(finish, cached) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_unary_mode_repeats_what_was_only_added(family):
    layout, pb = FAMILIES[family]
    encoder = SequenceEncoder(layout, "r", 0, 3)
    encoder.add([1, 300], [TokenLogprob(-0.5), TokenLogprob(-0.25)])
    encoder.add([70000], [TokenLogprob(-1.0)])
    complete = pb.GenerateResponse.FromString(encoder.complete("stop", 0)).complete
    assert list(complete.output_ids) == [1, 300, 70000]
    assert list(complete.output_logprobs.token_ids) == [1, 300, 70000]
    assert list(complete.output_logprobs.token_logprobs) == [-0.5, -0.25, -1.0]
    assert complete.completion_tokens == 3
    assert not complete.output_logprobs.top_logprobs


def test_logprobs_beyond_float32_become_infinite_instead_of_failing_the_flush():
    encoder = SequenceEncoder(VLLM, "r", 0, 1)
    message = encoder.chunk([1], [TokenLogprob(-1e300)], 0)
    chunk = vllm_engine_pb2.GenerateResponse.FromString(message).chunk
    assert chunk.output_logprobs.token_logprobs[0] == float("-inf")


def test_floats_are_little_endian():
    encoder = SequenceEncoder(VLLM, "r", 0, 1)
    assert struct.pack("<f", -0.5) in encoder.chunk([1], [TokenLogprob(-0.5)], 0)
