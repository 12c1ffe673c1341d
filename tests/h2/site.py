"""A server with handlers of every kind, and the gRPC library's client for it."""

import asyncio
import contextlib

import grpc
import pytest

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server

MIB = 1024 * 1024


class Handlers:
    """What a test can call. Keeps the contexts it was given, and notes which handlers were cancelled."""

    def __init__(self):
        self.contexts = []
        self.cancelled = []
        self.release = asyncio.Event()

    async def echo(self, request, context):
        self.contexts.append(context)
        return request

    async def stream(self, request, context):
        for number in range(int(request)):
            await context.write(b"%d" % number)

    async def generate(self, request, context):
        for number in range(int(request)):
            yield b"%d" % number

    async def bidi(self, requests, context):
        async for request in requests:
            await context.write(b"re: " + request)

    async def collect(self, requests, context):
        return b"".join([request async for request in requests])

    async def read_by_hand(self, _, context):
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def wait(self, request, context):
        self.contexts.append(context)
        await context.write(b"waiting")
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise

    async def fill(self, request, context):
        """Messages of the requested size until there is no room."""
        self.contexts.append(context)
        while True:
            await context.write(bytes(int(request)))

    async def metadata(self, _, context):
        self.contexts.append(context)
        await context.send_initial_metadata((("x-first", "1"), ("x-first-bin", b"\0\1")))
        context.set_trailing_metadata((("x-last", "2"), ("x-last-bin", b"\xff")))
        return b""

    async def abort(self, request, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no {request.decode()} ä%", (("x-why", "because"),))

    async def abort_late(self, _, context):
        await context.write(b"one")
        await context.abort(grpc.StatusCode.DATA_LOSS, "lost")

    async def set_code(self, _, context):
        context.set_code(grpc.StatusCode.ALREADY_EXISTS)
        context.set_details("by hand")
        return b"ignored"

    async def defect(self, _, context):
        raise ZeroDivisionError("inside")

    def service(self):
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        both, many = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        return {
            "Echo": unary(self.echo),
            "Stream": stream(self.stream),
            "Generate": stream(self.generate),
            "Bidi": both(self.bidi),
            "Collect": many(self.collect),
            "ReadByHand": both(self.read_by_hand),
            "Wait": stream(self.wait),
            "Fill": stream(self.fill),
            "Metadata": unary(self.metadata),
            "Abort": unary(self.abort),
            "AbortLate": stream(self.abort_late),
            "SetCode": unary(self.set_code),
            "Defect": unary(self.defect),
            "Text": unary(self.echo, request_deserializer=bytes.decode, response_serializer=str.encode),
            "Threads": unary(lambda request, _: request),
        }


class Site:
    def __init__(self, server, handlers, address):
        self.server, self.handlers, self.address = server, handlers, address
        self.shared = server._shared
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 64 * MIB)])

    def unary(self, name, request=b"", **options):
        return self.channel.unary_unary(f"/t.S/{name}")(request, **options)

    def stream(self, name, request=b"", **options):
        return self.channel.unary_stream(f"/t.S/{name}")(request, **options)

    def bidi(self, name, requests=None, **options):
        return self.channel.stream_stream(f"/t.S/{name}")(requests, **options)


@contextlib.asynccontextmanager
async def serving(**limits):
    handlers = Handlers()
    server = Server(limits=Limits(**({"max_request_bytes": 32 * MIB} | limits)), max_message_bytes=32 * MIB)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.S", handlers.service()),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    site = Site(server, handlers, address)
    try:
        yield site
    finally:
        await site.channel.close()
        await server.stop(None)
    assert not site.shared.connections
    assert not site.shared.tasks
    assert not site.shared.deadlines._intervals


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else rest(call))
    return caught.value


async def rest(call):
    """The messages that are still to come."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages
