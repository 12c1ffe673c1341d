"""A small service table, and the same table on both transports: the gRPC library's server and our own.

`python -m tests.conformance.service` serves it on our own in a process of its own and prints the port.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import msgspec

from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server

SERVICE = "conformance.TestService"
TRANSPORTS = ("grpcio", "fast")
MIB = 1024 * 1024
MAX_MESSAGE_BYTES = 4 * MIB
ECHO_INITIAL = "x-grpc-test-echo-initial"
ECHO_TRAILING = "x-grpc-test-echo-trailing-bin"


class Request(msgspec.Struct):
    """What a call asks for: answers of these sizes, or a status. `payload` is counted."""

    sizes: list[int] = []
    payload: bytes = b""
    status: int = 0
    message: str = ""


class Reply(msgspec.Struct):
    """The asked size in bytes, and how many bytes of payload have come so far."""

    body: bytes = b""
    received: int = 0


encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


async def _echo_metadata(context: Any) -> None:
    metadata = dict(context.invocation_metadata())
    if ECHO_INITIAL in metadata:
        await context.send_initial_metadata(((ECHO_INITIAL, metadata[ECHO_INITIAL]),))
    if ECHO_TRAILING in metadata:
        context.set_trailing_metadata(((ECHO_TRAILING, metadata[ECHO_TRAILING]),))


class Direct:
    """A method's handler that may also be called without a task, where the server knows how."""

    def __init__(self, handler: Any, direct: Any) -> None:
        self._handler = handler
        self.direct = direct

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class Service:
    """Handlers for every kind of call. `live` counts those of streams that are not done."""

    def __init__(self) -> None:
        self.live = 0

    async def empty(self, request: bytes, context: Any) -> bytes:
        assert request == b""
        return b""

    async def unary(self, request: Request, context: Any) -> Reply:
        await _echo_metadata(context)
        if request.status:
            await context.abort(request.status, request.message)
        return Reply(bytes(request.sizes[0]), len(request.payload))

    async def stream_out(self, request: Request, context: Any) -> AsyncIterator[Reply]:
        for size in request.sizes:
            yield Reply(bytes(size))

    def direct_out(self, message: bytes, call: Any) -> None:
        """The same without waiting; what the client does not take now is held."""
        for size in _decode(message).sizes:
            call.push(encode(Reply(bytes(size))))
        call.finish(0)

    async def stream_in(self, requests: AsyncIterator[Request], context: Any) -> Reply:
        with self._counted():
            return Reply(received=sum([len(request.payload) async for request in requests]))

    async def duplex(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Reply]:
        await _echo_metadata(context)
        with self._counted():
            received = 0
            async for request in requests:
                received += len(request.payload)
                if request.status:
                    await context.abort(request.status, request.message)
                for size in request.sizes:
                    yield Reply(bytes(size), received)

    async def wait(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        with self._counted():
            await asyncio.Event().wait()
            yield request

    async def fill(self, request: Request, context: Any) -> AsyncIterator[Reply]:
        """Messages of the first size without end."""
        with self._counted():
            while True:
                yield Reply(bytes(request.sizes[0]))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1

    def handler(self) -> Any:
        """The table, for either server."""
        unary, out = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        many, both = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        coded = {"request_deserializer": _decode, "response_serializer": encode}
        table = {
            "EmptyCall": unary(self.empty),
            "UnaryCall": unary(self.unary, **coded),
            "StreamingOutputCall": out(self.stream_out, **coded),
            "DirectOutputCall": Direct(out(self.stream_out, **coded), self.direct_out),
            "StreamingInputCall": many(self.stream_in, **coded),
            "FullDuplexCall": both(self.duplex, **coded),
            "Wait": out(self.wait),
            "Fill": out(self.fill, **coded),
        }
        return grpc.method_handlers_generic_handler(SERVICE, table)


class Site:
    """A running server."""

    def __init__(self, address: str, service: Service, server: Any) -> None:
        self.address = address
        self.service = service
        self.server = server


@contextlib.asynccontextmanager
async def serving(transport: str = "fast", **limits: Any) -> AsyncIterator[Site]:
    """The table on a free loopback port. `limits` are those of our own transport."""
    service = Service()
    if transport == "fast":
        bounds = Limits(**({"max_request_bytes": MAX_MESSAGE_BYTES} | limits))
        server: Any = Server(limits=bounds, max_message_bytes=MAX_MESSAGE_BYTES)
    else:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Site(f"127.0.0.1:{port}", service, server)
    finally:
        await server.stop(None)


async def _serve_until_stdin_closes() -> None:
    limits = msgspec.json.decode(sys.argv[1]) if len(sys.argv) > 1 else {}
    async with serving("fast", **limits) as site:
        sys.stdout.write(f"{site.address}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve_until_stdin_closes())
