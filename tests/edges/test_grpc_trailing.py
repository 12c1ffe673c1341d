"""The block that is made by hand says what the pairs say."""

import pytest

from gateway.core.events import RequestArrived
from gateway.core.request import Attempt, Request
from gateway.edges.grpc_trailing import id_metadata, trailing_block, trailing_metadata
from gateway.h2.rpc.status import encode_metadata
from gateway.types import Sampling


def make(request_id="r", ranks=(), decision_id=None, waited_s=None, *, is_cached=False):
    arrived = RequestArrived(
        client_key="",
        request_id=request_id,
        prompt_token_ids=[1],
        sampling=Sampling(max_tokens=1),
        n=max(1, len(ranks)),
    )
    request = Request(1, arrived, 10.0)
    for sequence, rank in zip(request.sequences, ranks, strict=False):
        if rank is not None:
            sequence.sent_at = 10.0 + (waited_s or 0.0)
            sequence.attempt = Attempt(sequence, "w", 1, rank, 1, sequence.sent_at)
    request.decision_id = decision_id
    request.is_cached = is_cached
    request.ended_at = 10.75
    return request


@pytest.mark.parametrize(
    "request_",
    [
        make(),
        make(ranks=(0,), decision_id=1),
        make("x" * 126, (7,), 12345),
        make("y" * 300, (4095,), 10**12),
        make(ranks=(3, None, 1), decision_id=4, waited_s=0.25),
        make(ranks=(9,) * 128, waited_s=0.0),
        make(ranks=(1,), waited_s=1234.5678),
        make(ranks=(1,), waited_s=0.0001),
        make(is_cached=True),
    ],
)
def test_both_say_the_same(request_):
    pairs = (*id_metadata(request_.arrived.request_id), *trailing_metadata(request_))
    assert trailing_block(request_) == encode_metadata(pairs)
