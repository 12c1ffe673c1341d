"""The sink and its writer against a transport that the test controls."""

import asyncio

import grpc
import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.request import Attempt, Request
from gateway.edges.grpc_gateway import GenerateStream
from gateway.edges.grpc_request import Call
from gateway.edges.grpc_sink import StreamSink
from gateway.edges.grpc_stream import serve_request
from gateway.edges.grpc_trailing import trailing_metadata
from gateway.types import Sampling
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver, count_up

CALL = Call()


class Transport:
    """An RpcContext that takes one message per `accept()`, or all when `is_open`."""

    def __init__(self, *, is_open=True):
        self.is_open = is_open
        self.messages = []
        self.initial = self.trailing = self.status = None
        self._gate = asyncio.Semaphore(0)

    async def send_initial_metadata(self, initial_metadata):
        await asyncio.sleep(0)
        self.initial = dict(initial_metadata)

    def set_trailing_metadata(self, trailing_metadata):
        self.trailing = dict(trailing_metadata)

    async def write(self, message):
        self.messages.append(gateway_pb2.GenerateResponse.FromString(message))
        if self.is_open:
            await asyncio.sleep(0)
        else:
            await self._gate.acquire()

    def accept(self):
        self._gate.release()

    def accepted(self, stream=None):
        self.watched = stream

    async def abort(self, code, details="", trailing_metadata=()):
        await asyncio.sleep(0)
        self.status, self.trailing = code, dict(trailing_metadata)
        raise grpc.aio.AbortError


def start(driver, transport, *, n=1, max_tokens=4, call=CALL):
    stream = GenerateStream()
    arrived = RequestArrived(
        client_key="",
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=max_tokens),
        n=n,
        sink=stream,
    )
    return stream, serve_request(driver, arrived, stream, call, transport)


async def settle():
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_tokens_of_one_turn_leave_in_one_message_per_sequence():
    driver, transport = FakeDriver(), Transport()
    _, handler = start(driver, transport, n=2)
    task = asyncio.create_task(handler)
    await settle()
    request = driver.requests[0]
    driver.tokens(request, [1])
    driver.tokens(request, [2, 3])
    driver.tokens(request, [9], index=1)
    await settle()
    assert [(m.index, list(m.token_ids)) for m in transport.messages] == [(0, [1, 2, 3]), (1, [9])]
    driver.tokens(request, [4], finish="stop")
    driver.tokens(request, [], index=1, finish="length")
    await task
    assert [(m.index, list(m.token_ids), m.finish.reason) for m in transport.messages[2:]] == [
        (0, [4], gateway_pb2.FINISH_REASON_STOP),
        (1, [], gateway_pb2.FINISH_REASON_LENGTH),
    ]
    assert transport.initial is None
    assert transport.trailing == {
        "x-request-id": "r",
        "x-rankgate-rank": "0,1",
        "x-rankgate-decision-id": "1",
        "x-rankgate-queue-ms": "0.000",
    }


async def test_nothing_is_taken_while_a_write_is_unfinished_and_the_next_message_has_it_all():
    driver, transport = FakeDriver(), Transport(is_open=False)
    _, handler = start(driver, transport)
    task = asyncio.create_task(handler)
    await settle()
    request = driver.requests[0]
    sequence = request.sequences[0]
    driver.tokens(request, [1])
    await settle()
    for token in (2, 3, 4):
        driver.tokens(request, [token])
        await settle()
        # Still in the outbox: the core goes on counting it.
        assert sequence.backlog_bytes == 4 * (token - 1)
    assert len(transport.messages) == 1
    transport.accept()
    await settle()
    assert [list(message.token_ids) for message in transport.messages] == [[1], [2, 3, 4]]
    assert sequence.backlog_bytes == 0
    driver.tokens(request, [5], finish="length")
    transport.accept()
    transport.accept()
    await task
    assert [list(message.token_ids) for message in transport.messages] == [[1], [2, 3, 4], [5]]


async def test_a_reader_that_stands_still_is_ended_by_the_bound_and_gets_no_more_tokens():
    driver, transport = FakeDriver(), Transport(is_open=False)
    driver.max_backlog_bytes = 4000
    _, handler = start(driver, transport)
    task = asyncio.create_task(handler)
    await settle()
    request = driver.requests[0]
    for token in range(5000):
        driver.tokens(request, [token])
        await asyncio.sleep(0)
    assert request.error.reason is Reason.SLOW_READER
    assert not driver.live
    transport.accept()
    with pytest.raises(grpc.aio.AbortError):
        await task
    assert len(transport.messages) == 1
    assert transport.status is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_error_comes_after_exactly_the_tokens_before_it():
    driver, transport = FakeDriver(), Transport()
    _, handler = start(driver, transport)
    task = asyncio.create_task(handler)
    await settle()
    request = driver.requests[0]
    driver.tokens(request, [1, 2])
    driver.end(request, GatewayError(Reason.RANK_LOST, "rank 0 was lost", retryable=True, rank=0))
    with pytest.raises(grpc.aio.AbortError):
        await task
    assert [list(message.token_ids) for message in transport.messages] == [[1, 2]]
    assert not transport.messages[0].HasField("finish")
    assert transport.status is grpc.StatusCode.UNAVAILABLE
    assert transport.trailing["x-rankgate-rank"] == "0"


async def test_a_refusal_echoes_the_request_id():
    driver, transport = FakeDriver(), Transport()
    driver.refusal = GatewayError(Reason.GATEWAY_FULL, "full")
    with pytest.raises(grpc.aio.AbortError):
        await start(driver, transport)[1]
    assert transport.initial is None
    assert transport.trailing["x-request-id"] == "r"


@pytest.mark.parametrize(
    ("deadline_at", "reason"), [(None, Reason.CANCELLED), (0.001, Reason.DEADLINE_EXCEEDED)], ids=["client", "deadline"]
)
async def test_cancelling_the_handler_ends_the_request_and_reraises(deadline_at, reason):
    driver, transport = FakeDriver(), Transport()
    call = Call(deadline_at=deadline_at)
    _, handler = start(driver, transport, call=call)
    task = asyncio.create_task(handler)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver.requests[0].error.reason is reason
    assert not driver.live


async def test_a_closed_sink_keeps_nothing():
    """The core ends a request after its handler has left; that must not tie the two together again."""
    driver = FakeDriver()
    stream = GenerateStream()
    arrived = RequestArrived(
        client_key="", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1), sink=stream
    )
    request = driver.submit(arrived)
    stream.close()
    driver.tokens(request, [1], finish="stop")
    await settle()
    assert request.is_ended
    assert not stream.pending


async def test_a_transport_that_fails_ends_the_request():
    driver, transport = FakeDriver(count_up), Transport()

    async def broken(message):
        raise ConnectionResetError

    transport.write = broken
    with pytest.raises(ConnectionResetError):
        await start(driver, transport)[1]
    assert not driver.live


async def _run_until(step):
    """Run a request, cancel it at the `step`-th time that it waits. Returns whether it got that far."""
    driver, transport = FakeDriver(count_up), Transport()
    _, handler = start(driver, transport, n=2, max_tokens=20)
    steps = 0
    task = asyncio.current_task()

    class Stepped:
        def __await__(self):
            nonlocal steps
            waiting = handler.__await__()
            try:
                while True:
                    value = next(waiting)
                    steps += 1
                    if steps == step:
                        task.cancel()
                    try:
                        yield value
                    except BaseException as error:
                        waiting.throw(error)
                        raise AssertionError("the handler swallowed its cancellation") from error
            except StopIteration:
                return

    was_cancelled = False
    try:
        await Stepped()
    except asyncio.CancelledError:
        task.uncancel()
        was_cancelled = True
    await settle()
    assert not driver.live
    return was_cancelled


async def test_cancellation_at_every_await_leaves_nothing():
    steps = 1
    while await _run_until(steps):
        steps += 1
    assert steps > 20


def bare_request(n=1):
    """An accepted request that nobody has dispatched; accepted at 10.0."""
    arrived = RequestArrived(
        client_key="", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1), n=n, sink=GenerateStream()
    )
    return Request(1, arrived, 10.0)


def dispatch(sequence, rank, sent_at):
    sequence.sent_at = sent_at
    sequence.attempt = Attempt(sequence, "w", 1, rank, 1, sent_at)


class TestTrailingMetadata:
    def test_of_a_request_that_reached_no_rank_the_wait_ends_with_it(self):
        request = bare_request()
        assert dict(trailing_metadata(request)) == {"x-rankgate-queue-ms": "0.000"}
        request.ended_at = 10.75
        assert dict(trailing_metadata(request)) == {"x-rankgate-queue-ms": "750.000"}

    def test_the_wait_is_that_of_the_sequence_that_was_dispatched_first(self):
        request = bare_request(n=3)
        dispatch(request.sequences[1], 4, 10.5)
        dispatch(request.sequences[2], 2, 10.25)
        request.ended_at = 20.0
        assert dict(trailing_metadata(request)) == {"x-rankgate-rank": "4,2", "x-rankgate-queue-ms": "250.000"}

    def test_a_stored_answer_says_so(self):
        request = bare_request()
        request.is_cached = True
        request.ended_at = 10.0
        assert dict(trailing_metadata(request)) == {"x-rankgate-cache": "hit", "x-rankgate-queue-ms": "0.000"}


class TestSink:
    """Output and ends keep the order in which the driver brought them."""

    def test_what_was_first_flushed_goes_first(self):
        sink = StreamSink()
        first, second = bare_request(), bare_request()
        sink.flush(first.sequences[0])
        sink.end(first)
        sink.flush(second.sequences[0])
        sink.end(second)
        assert list(sink.pending) == [first.sequences[0], first, second.sequences[0], second]

    def test_a_reader_that_was_too_slow_loses_its_own_output_only(self):
        sink = StreamSink()
        ok, slow, other = bare_request(), bare_request(n=2), bare_request()
        sink.flush(ok.sequences[0])
        sink.flush(slow.sequences[1])
        sink.end(ok)
        sink.flush(other.sequences[0])
        slow.error = GatewayError(Reason.SLOW_READER, "too slow")
        sink.end(slow)
        assert list(sink.pending) == [ok.sequences[0], ok, other.sequences[0], slow]
