"""One stream over a call that a test answers by hand: it must not stand still for what nobody will read."""

import asyncio
from collections import deque

import grpc
import pytest
from google.rpc import status_pb2

from gateway.client.errors import GenerationError
from gateway.client.stream import Stream
from gateway.v1 import gateway_pb2
from tests.support.calls import make_request
from tests.support.grpc_edge import until

WAIT_S = 5.0
"""What is waited for takes a few turns of the loop."""


async def turns():
    """Let the stream's tasks do what they can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Call:
    """The client's end of a gRPC call. As with grpcio, it ends a little after `cancel`, and reads nothing from then on."""

    def __init__(self):
        self.written = []
        self.is_cancelled = False
        self._is_done = False
        self._messages = deque()
        self._waiting = None
        self._callbacks = []

    def done(self):
        return self._is_done

    def add_done_callback(self, callback):
        self._callbacks.append(callback)

    def cancel(self):
        if not self.is_cancelled:
            self.is_cancelled = True
            asyncio.get_running_loop().call_later(0.01, self.end)

    def end(self):
        self._is_done = True
        self._hand_out(grpc.aio.EOF)
        for callback in self._callbacks:
            callback(self)

    def answer(self, message):
        if not self._hand_out(message):
            self._messages.append(message)

    async def write(self, message):
        self.written.append(message)

    async def read(self):
        if self._messages and not self._is_done:
            return self._messages.popleft()
        self._waiting = asyncio.get_running_loop().create_future()
        if self._is_done:
            self._hand_out(grpc.aio.EOF)
        message = await self._waiting
        if message is grpc.aio.EOF and self.is_cancelled:
            raise asyncio.CancelledError
        return message

    def _hand_out(self, message):
        """True if a reader waits: it has the message then, whatever comes before its turn."""
        if self._waiting is None or self._waiting.done():
            return False
        self._waiting.set_result(message)
        return True


class Site:
    """A stream that stands still above 50 tokens, and the call below it."""

    def __init__(self):
        self.call = Call()
        self.ended = 0
        self.stream = Stream(self, (), 50, on_ended=self._on_ended)

    def stream_stream(self, method, request_serializer, response_deserializer):
        """As the channel that the stream asks for its call."""
        return lambda metadata: self.call

    def start(self, request_id):
        return self.stream.start(make_request([1], 100, request_id=request_id))

    async def output(self, request_id, tokens, *, is_last=False):
        finish = gateway_pb2.Finish() if is_last else None
        response = gateway_pb2.GenerateResponse(request_id=request_id, token_ids=range(tokens), finish=finish)
        self.call.answer(gateway_pb2.GenerateManyResponse(outputs=[response]))
        await turns()

    async def error(self, request_id):
        failed = gateway_pb2.RequestError(request_id=request_id, status=status_pb2.Status(code=10))
        self.call.answer(gateway_pb2.GenerateManyResponse(errors=[failed]))
        await turns()

    async def hold_back(self, request_id):
        """Let it stand still for one that is not read."""
        generation = self.start(request_id)
        await self.output(request_id, 60)
        assert not self.stream._has_room.is_set()
        return generation

    def _on_ended(self):
        self.ended += 1


@pytest.fixture
async def site():
    site = Site()
    yield site
    async with asyncio.timeout(WAIT_S):
        await site.stream.cancel()


async def test_early_exits_leave_nothing_counted(site):
    for number in range(10):
        async with site.start(f"{number}") as generation:
            await site.output(f"{number}", 4)
            await site.output(f"{number}", 4)
            await anext(generation)
        await site.output(f"{number}", 10)  # under way before the gateway has seen the abort
        await site.error(f"{number}")
    assert (site.stream._buffered_tokens, site.ended) == (0, 10)
    assert site.stream._has_room.is_set()


async def test_leaving_the_one_that_holds_it_back_lets_it_go_on(site):
    async with site.start("a") as generation:
        await site.output("a", 60)
        site.call.answer(gateway_pb2.GenerateManyResponse())
        await turns()
        assert not site.stream._has_room.is_set()
    await site.output("a", 60, is_last=True)
    assert generation.is_ended
    assert site.stream._has_room.is_set()


@pytest.mark.parametrize("is_ended", [False, True])
async def test_one_that_is_never_iterated_and_let_go_of_does_not_hold_it_back(site, is_ended):
    for number in range(3):
        site.start(f"{number}")
        await site.output(f"{number}", 60, is_last=is_ended)
    reading = asyncio.create_task(site.start("b").tokens())
    await site.output("b", 2, is_last=True)
    assert await asyncio.wait_for(reading, WAIT_S) == [0, 1]
    assert site.stream._buffered_tokens == 0


async def test_a_call_that_ends_while_it_stands_still_ends_what_is_live(site):
    generation = await site.hold_back("a")
    site.call.end()
    await asyncio.wait_for(until(lambda: site.stream.is_over), WAIT_S)
    assert len((await anext(generation)).token_ids) == 60
    with pytest.raises(GenerationError, match="UNAVAILABLE"):
        await anext(generation)
    assert (site.stream._buffered_tokens, site.ended) == (0, 1)


async def test_it_can_be_cancelled_while_it_stands_still(site):
    generation = await site.hold_back("a")
    await asyncio.wait_for(site.stream.cancel(), WAIT_S)
    with pytest.raises(GenerationError, match="CANCELLED"):
        await generation.tokens()


async def test_a_message_that_comes_with_the_end_does_not_make_it_stand_still(site):
    generation = site.start("a")
    await turns()
    response = gateway_pb2.GenerateResponse(request_id="a", token_ids=range(60))
    site.call.answer(gateway_pb2.GenerateManyResponse(outputs=[response]))
    site.call.end()
    await asyncio.wait_for(until(lambda: site.stream.is_over), WAIT_S)
    assert len((await anext(generation)).token_ids) == 60


async def test_a_message_that_comes_with_the_cancelling_does_not_make_it_stand_still(site):
    generation = site.start("a")
    await turns()
    response = gateway_pb2.GenerateResponse(request_id="a", token_ids=range(60))
    site.call.answer(gateway_pb2.GenerateManyResponse(outputs=[response]))
    async with asyncio.timeout(WAIT_S):  # without a task of its own, which would let the reader go first
        await site.stream.cancel()
    with pytest.raises(GenerationError, match="CANCELLED"):
        await generation.tokens()


async def test_what_breaks_the_reader_ends_the_call_too(site):
    generation = site.start("a")
    site.call.answer("not a message")
    with pytest.raises(GenerationError, match="UNAVAILABLE"):
        await generation.tokens()
    assert site.call.is_cancelled
    assert site.ended == 1
