"""The short cut of a token: what leaves by it is what the writer would have sent, and it closes whenever it must."""

import pytest

from gateway.core.errors import Reason
from gateway.core.outbox import Record
from gateway.edges.grpc_engine.encode import SequenceEncoder
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_gate import CallGate
from tests.edges.test_grpc_stream import settle
from tests.support.direct import FakeCall
from tests.support.fake_driver import FakeDriver
from tests.support.grpc_edge import make_config


class Lane:
    """A direct call of vLLM's service with one sequence, past its first token."""

    def __init__(self, *, has_record=False):
        config = make_config()
        self.driver, self.gate, self.call = FakeDriver(), CallGate(config), FakeCall()
        service = VllmService(config, self.driver)
        (method,) = (each for each in service.service().methods if each.name == "Generate")
        self.pb = service.messages
        request = self.pb.GenerateRequest(
            request_id="r", tokenized=self.pb.TokenizedInput(input_ids=[1, 2]), stream=True
        )
        method.direct(self.gate)(request.SerializeToString(), self.call)
        (self.request,) = self.driver.requests
        (self.sequence,) = self.request.sequences
        if has_record:
            self.sequence.record = Record(cache_bytes=0, token_bytes=1 << 20)
        self.writer = self.request.sink
        self.flush(300)

    def flush(self, *tokens, logprobs=None):
        self.sequence.append(tokens, logprobs)
        self.sequence.is_dirty = True
        self.sequence.sink.flush(self.sequence)

    @property
    def chunks(self):
        responses = [self.pb.GenerateResponse.FromString(message) for message in self.call.messages]
        return [(list(r.chunk.token_ids), r.chunk.completion_tokens) for r in responses if r.HasField("chunk")]

    @property
    def complete(self):
        return self.pb.GenerateResponse.FromString(self.call.messages[-1]).complete


@pytest.mark.parametrize("has_record", [False, True])
async def test_it_sends_what_the_writer_would_and_the_end_repeats_everything(has_record, monkeypatch):
    lane = Lane(has_record=has_record)
    assert type(lane.sequence.sink) is SequenceEncoder
    with monkeypatch.context() as patch:
        patch.setattr(type(lane.writer), "flush", None)  # it has no part in it
        for token in (7, 31_999, 127):
            lane.flush(token)
            assert (lane.sequence.is_dirty, lane.sequence.backlog_tokens) == (False, 0)
    lane.flush(8, 9)
    lane.flush(10)
    assert lane.chunks == [([300], 1), ([7], 2), ([31_999], 3), ([127], 4), ([8, 9], 6), ([10], 7)]
    lane.driver.tokens(lane.request, [11], finish="length")
    await settle()
    assert lane.chunks[-1] == ([11], 8)
    assert list(lane.complete.output_ids) == [300, 7, 31_999, 127, 8, 9, 10, 11]
    assert (lane.call.code, lane.gate.streams) == (0, 0)


async def test_ids_of_every_length_are_written_as_protobuf_writes_them():
    lane = Lane(has_record=False)
    edges = [0, *(1 << bits for bits in (7, 14, 19, 21, 28)), 2**32 - 1]
    token_ids = sorted({abs(edge + step) for edge in edges for step in (-1, 0, 1)} - {2**32})
    for token_id in token_ids:
        lane.flush(token_id)
    for message, token_id in zip(lane.call.messages[1:], token_ids, strict=True):
        response = lane.pb.GenerateResponse.FromString(message)
        assert list(response.chunk.token_ids) == [token_id]
        assert response.SerializeToString(deterministic=True) == message, "as short as can be"
    lane.driver.tokens(lane.request, [11], finish="length")
    await settle()
    assert list(lane.complete.output_ids) == [300, *token_ids, 11]


async def test_an_end_repeats_what_was_taken_and_no_more_than_that():
    lane = Lane(has_record=True)
    lane.sequence.record.extend([5, 6], None)  # these were never let out
    lane.driver.cancel(lane.request, Reason.ABORTED)
    await settle()
    assert (list(lane.complete.output_ids), lane.complete.finish_reason) == ([300], "abort")


async def test_it_closes_when_the_client_stands_still_and_nothing_overtakes():
    lane = Lane()
    lane.call.is_shutting = True
    lane.flush(1)
    assert lane.writer.writes % 2, "seen by whoever watches for streams that stand still"
    lane.flush(2)
    lane.sequence.append((3,), None)
    assert lane.sequence.backlog_tokens == 2, "the core counts it"
    assert [tokens for tokens, _ in lane.chunks] == [[300], [1]]
    lane.call.open_up()
    lane.flush(4)
    lane.flush(5)
    assert [tokens for tokens, _ in lane.chunks] == [[300], [1], [2, 3], [4], [5]]
    lane.driver.cancel(lane.request, Reason.ABORTED)
    await settle()


async def test_news_of_cached_tokens_is_told():
    lane = Lane()
    lane.sequence.cached_tokens = 2
    lane.flush(1)
    assert lane.pb.GenerateResponse.FromString(lane.call.messages[-1]).chunk.cached_tokens == 2
    lane.driver.cancel(lane.request, Reason.ABORTED)
    await settle()


@pytest.mark.parametrize("is_late", [False, True])
async def test_after_the_call_it_takes_nothing_and_holds_nobody(is_late):
    lane = Lane()
    lane.call.leave(is_late=is_late)
    lane.flush(1)
    await settle()
    assert len(lane.call.messages) == 1
    assert (lane.sequence.sink.writer, lane.sequence.sink.stream) == (None, None)
    assert lane.writer._lanes == ()
