"""A writer whose transport takes messages at once: what is pushed when, and that nothing overtakes or stands still unseen."""

import asyncio

import grpc
import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.edges.grpc_context import outlet_of
from gateway.edges.grpc_gateway import GenerateStream
from gateway.edges.grpc_request import Call
from gateway.edges.grpc_stream import serve_request
from gateway.types import Sampling
from gateway.v1 import gateway_pb2
from tests.edges.test_grpc_stream import Transport, settle
from tests.support.fake_driver import FakeDriver


class Outlet(Transport):
    """Takes messages without a handler; `shut` and `open_up` are what the client's windows do."""

    def __init__(self):
        super().__init__()
        self.is_ready = True
        self.is_shutting = False
        self.on_ready = None

    def outlet(self, on_ready):
        self.on_ready = on_ready
        return self

    def push(self, message):
        self.messages.append(gateway_pb2.GenerateResponse.FromString(message))
        if self.is_shutting:
            self.is_ready = False

    def open_up(self):
        self.is_ready = True
        self.on_ready()

    @property
    def tokens(self):
        return [list(message.token_ids) for message in self.messages]


@pytest.fixture
def driver():
    return FakeDriver()


async def start(driver, transport, n=1):
    """A live request and the task of its handler."""
    stream = GenerateStream()
    arrived = RequestArrived(
        client_key="", request_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=9), n=n, sink=stream
    )
    task = asyncio.create_task(serve_request(driver, arrived, stream, Call(), transport))
    await settle()
    return stream, driver.requests[-1], task


async def test_a_flush_pushes_by_itself(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    for token in (7, 8):
        request.sequences[0].append([token], None)
        stream.flush(request.sequences[0])
        assert transport.tokens[-1] == [token], "without any task's doing"
    driver.tokens(request, [9], finish="stop")
    await task
    assert transport.tokens == [[7], [8], [9]]
    assert transport.messages[-1].HasField("finish")
    assert transport.trailing["x-request-id"] == "r"
    assert stream._outlet is None


async def test_what_comes_while_it_is_not_ready_leaves_as_one_message(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    transport.is_shutting = True
    for token in range(5):
        driver.tokens(request, [token])
        await settle()
    assert transport.tokens == [[0]]
    assert request.sequences[0].backlog_bytes, "the core counts what is not taken"
    assert stream.writes % 2, "a write is under way"
    transport.is_shutting = False
    transport.open_up()
    await settle()
    assert transport.tokens == [[0], [1, 2, 3, 4]]
    assert not stream.writes % 2
    driver.tokens(request, [5], finish="stop")
    await task
    assert transport.tokens[2:] == [[5]]


async def test_sequences_keep_their_order_behind_one_that_waits(driver):
    transport = Outlet()
    _, request, task = await start(driver, transport, n=3)
    transport.is_shutting = True
    for index in (2, 0, 1):
        driver.tokens(request, [index], index=index, finish="stop")
    await settle()
    assert [message.index for message in transport.messages] == [2]
    assert not task.done(), "its end waits for them"
    transport.is_shutting = False
    transport.open_up()
    await task
    assert [message.index for message in transport.messages] == [2, 0, 1]


async def test_a_flush_does_not_overtake_what_the_handler_is_about_to_push(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport, n=2)
    transport.is_shutting = True
    for index in (0, 1):
        driver.tokens(request, [index], index=index)
    await settle()
    transport.is_shutting = False
    transport.open_up()
    request.sequences[0].append([2], None)
    stream.flush(request.sequences[0])
    await settle()
    assert transport.tokens == [[0], [1], [2]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_end_waits_until_the_last_message_is_taken(driver):
    """Only then has the client read everything: until then it can be ended for standing still."""
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    transport.is_shutting = True
    driver.tokens(request, [1], finish="stop")
    await settle()
    assert not task.done()
    assert transport.watched is stream
    transport.open_up()
    await task
    assert transport.status is None


async def test_a_client_that_stands_still_is_ended(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    transport.is_shutting = True
    driver.tokens(request, [1])
    driver.tokens(request, [2])
    await settle()
    driver.tokens(request, [3])
    stream.end_stalled()
    with pytest.raises(grpc.aio.AbortError):
        await task
    assert request.error.reason is Reason.SLOW_READER
    assert transport.status.name == "RESOURCE_EXHAUSTED"


async def test_a_transport_that_says_ready_for_nothing_starts_no_write(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    for token in (1, 2, 3):
        driver.tokens(request, [token])
        await settle()
        transport.open_up()
        assert not stream.writes % 2, "nothing is under way"
    transport.is_shutting = True
    driver.tokens(request, [4])
    await settle()
    assert stream.writes % 2
    transport.open_up()
    transport.open_up()
    assert not stream.writes % 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_last_message_that_is_not_taken_is_a_write_under_way(driver):
    transport = Outlet()
    transport.is_open = False
    stream, request, task = await start(driver, transport)
    stream.farewell = lambda request: [b""]
    driver.end(request, GatewayError(Reason.ABORTED, "aborted"))
    await settle()
    assert stream.writes % 2
    transport.open_up()
    transport.accept()
    await task
    assert not stream.writes % 2


async def test_an_error_comes_after_what_was_pushed(driver):
    transport = Outlet()
    _, request, task = await start(driver, transport)
    driver.tokens(request, [1])
    driver.end(request, GatewayError(Reason.RANK_LOST, "lost"))
    with pytest.raises(grpc.aio.AbortError):
        await task
    assert (transport.tokens, transport.status.name) == ([[1]], "UNAVAILABLE")


async def test_a_handler_that_is_cancelled_takes_its_request_along(driver):
    transport = Outlet()
    stream, request, task = await start(driver, transport)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.error.reason is Reason.CANCELLED
    request.sequences[0].append([1], None)
    stream.flush(request.sequences[0])
    assert transport.tokens == []


def test_a_transport_without_one_has_none():
    assert outlet_of(Transport(), lambda: None) is None
