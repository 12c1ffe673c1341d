"""GenerateMany where the transport takes messages without a handler: one per loop turn, as long as the client reads."""

import asyncio
from typing import Any

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_context import outlet_of
from gateway.v1 import gateway_pb2
from tests.edges.test_grpc_stream import settle
from tests.support.many import GatedTransport, Stream, arrivals, start


class Outlet(GatedTransport):
    """`is_shutting` and `open_up` are what the client's window does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = True
        self.is_shutting = False
        self.on_ready: Any = None

    def outlet(self, on_ready: Any) -> "Outlet":
        self.on_ready = on_ready
        return self

    def push(self, message: bytes) -> None:
        self.sent.append(gateway_pb2.GenerateManyResponse.FromString(message))
        self.is_ready = not self.is_shutting

    async def write(self, message: bytes) -> None:
        raise AssertionError("nothing is written by the handler")

    def open_up(self) -> None:
        self.is_shutting = False
        self.is_ready = True
        self.on_ready()

    @property
    def tokens(self) -> list[list[int]]:
        return [[token for output in message.outputs for token in output.token_ids] for message in self.sent]


@pytest.fixture
async def stream():
    stream = Stream(Outlet())
    await settle()
    yield stream
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)
    assert not stream.driver.live


async def started(stream, *ids):
    stream.put(*(start(each) for each in ids))
    await arrivals(stream.driver, len(ids))
    return stream.driver.requests


async def test_what_a_turn_brings_for_all_requests_leaves_as_one_message(stream):
    requests = await started(stream, "a", "b", "c")
    for number, request in enumerate(requests):
        stream.driver.tokens(request, [number])
    await settle()
    assert stream.transport.tokens == [[0, 1, 2]]
    assert [output.request_id for output in stream.transport.sent[0].outputs] == ["a", "b", "c"]
    stream.put(None)
    for request in requests:
        stream.driver.tokens(request, [9], finish="stop")
    await stream.task
    assert stream.transport.tokens == [[0, 1, 2], [9, 9, 9]]


async def test_what_comes_while_it_is_not_ready_leaves_as_one_message(stream):
    (request,) = await started(stream, "a")
    stream.transport.is_shutting = True
    for token in range(4):
        stream.driver.tokens(request, [token])
        await settle()
    assert stream.transport.tokens == [[0]]
    assert request.sequences[0].backlog_bytes, "the core counts what is not taken"
    assert stream.stream.writes % 2, "a write is under way"
    stream.transport.open_up()
    await settle()
    assert stream.transport.tokens == [[0], [1, 2, 3]]
    assert not stream.stream.writes % 2


async def test_the_stream_ends_when_its_last_message_is_taken(stream):
    (request,) = await started(stream, "a")
    stream.put(None)
    stream.transport.is_shutting = True
    stream.driver.tokens(request, [1], finish="stop")
    await settle()
    assert not stream.task.done()
    stream.transport.open_up()
    await stream.task


async def test_refusals_leave_by_themselves(stream):
    stream.put(start(""))
    await settle()
    assert [len(message.errors) for message in stream.transport.sent] == [1]


async def test_a_stream_that_stands_still_is_ended(stream):
    (request,) = await started(stream, "a")
    stream.transport.is_shutting = True
    stream.driver.tokens(request, [1])
    await settle()
    stream.driver.tokens(request, [2])
    stream.stream.end_stalled()
    await settle()
    stream.transport.open_up()
    with pytest.raises(GatewayError) as caught:
        await stream.task
    assert caught.value.reason is Reason.SLOW_READER
    assert stream.transport.tokens[0] == [1]
    assert not any(stream.transport.tokens[1:])


async def test_a_defect_ends_the_call(stream):
    (request,) = await started(stream, "a")
    stream.stream._next_message = None
    stream.driver.tokens(request, [1])
    with pytest.raises(TypeError):
        await stream.task


async def test_a_client_that_leaves_takes_its_requests_along(stream):
    (request,) = await started(stream, "a")
    stream.driver.tokens(request, [1])
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)
    await settle()
    assert request.error.reason is Reason.CANCELLED
    assert request.sequences == [], "nothing is left for the collector"
    assert stream.stream._outlet is None


def test_a_transport_without_one_has_none():
    assert outlet_of(GatedTransport(), lambda: None) is None
