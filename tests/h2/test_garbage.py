"""A call leaves nothing for the garbage collector, however it ends: collections would stop every stream for a while."""

import asyncio
import gc

import grpc
import pytest

from gateway.h2.protocol import frames
from gateway.h2.protocol.frames import DATA, END_STREAM, RST_STREAM, frame
from gateway.h2.protocol.header_blocks import encode_fields
from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from gateway.h2.server.connection import ServerConnection
from tests.h2.by_hand import FIELDS, message, split
from tests.support.grpc_edge import until

CALLS = 50


class Transport(asyncio.Transport):
    """Takes everything and keeps it."""

    def __init__(self):
        super().__init__()
        self.written = bytearray()

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.written += data

    def close(self):
        pass


class Echo(grpc.GenericRpcHandler):
    def __init__(self):
        self.handlers = {
            "/t/Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "/t/Push": grpc.unary_stream_rpc_method_handler(self.push),
            "/t/Abort": grpc.unary_unary_rpc_method_handler(self.abort),
            "/t/Wait": grpc.unary_stream_rpc_method_handler(self.wait),
            "/t/Direct": grpc.unary_stream_rpc_method_handler(None),
            "/t/Both": grpc.stream_stream_rpc_method_handler(self.both),
        }

        self.handlers["/t/Direct"].direct = self.direct

    def service(self, details):
        return self.handlers.get(details.method)

    async def echo(self, request, context):
        return request

    async def push(self, request, context):
        outlet = context.outlet(lambda: None)
        for _ in range(3):
            outlet.push(request)

    def direct(self, request, call):
        call.on_ready = lambda: call
        call.on_closed = lambda _: call
        call.push(request)
        call.finish(0)

    async def abort(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "no")

    async def wait(self, request, context):
        await asyncio.Event().wait()

    async def both(self, requests, context):
        async for request in requests:
            await context.write(request)


def head(path, *more):
    fields = [(name.encode(), value.encode()) for name, value in FIELDS if name != ":path"]
    return encode_fields([(b":path", path.encode()), *fields, *more])


@pytest.mark.parametrize("name", ["Echo", "Push", "Direct", "Abort", "Wait", "Both", "None", "late", "deadline"])
async def test_nothing_is_left(name):
    server = Server(limits=Limits(), max_message_bytes=1000)
    server.add_generic_rpc_handlers((Echo(),))
    await server.start()
    shared = server._shared
    connection, transport = ServerConnection(shared), Transport()
    connection.connection_made(transport)
    connection.data_received(frames.PREFACE + frames.settings(()) + frames.SETTINGS_ACK)
    numbers = iter(range(1, 100_000, 2))
    path = {"late": "/t/Wait", "deadline": "/t/Wait"}.get(name, f"/t/{name}")
    more = [(b"grpc-timeout", b"1m")] if name == "deadline" else []

    async def calls():
        opened = [next(numbers) for _ in range(CALLS)]
        for number in opened:
            connection.data_received(
                frames.headers(number, head(path, *more), is_end=False)
                + frame(DATA, END_STREAM, number, message(b"hello"))
            )
        if name in ("Wait", "late"):
            for _ in range(0 if name == "late" else 3):
                await asyncio.sleep(0)
            for number in opened:
                connection.data_received(frame(RST_STREAM, 0, number, (8).to_bytes(4)))
        await until(lambda: not (connection.http.streams or shared.tasks or connection.is_scheduled))

    await calls()
    gc.collect()
    gc.disable()
    try:
        before = len(transport.written)
        await calls()
        assert gc.collect() == 0
    finally:
        gc.enable()
    ends = [each for each in split(bytes(transport.written[before:])) if each.is_end]
    assert len(ends) == (0 if name in ("Wait", "late") else CALLS)
    connection.connection_lost(None)
    await server.stop(None)
    assert not shared.connections
