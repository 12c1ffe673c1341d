"""The gRPC project's interoperability cases, by their names, with the library's client on both transports.

https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md
"""

import asyncio

import grpc
import pytest

from tests.conformance import service
from tests.conformance.service import ECHO_INITIAL, ECHO_TRAILING, SERVICE, TRANSPORTS, Reply, Request, serving

LARGE_REQUEST_BYTES, LARGE_REPLY_BYTES = 271_828, 314_159
REQUEST_SIZES = (27_182, 8, 1_828, 45_904)
REPLY_SIZES = [31_415, 9, 2_653, 58_979]
MESSAGE = "test status message"
SPECIAL_MESSAGE = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
GZIP = grpc.Compression.Gzip
CASES = {}


def case(run):
    """A case by the name of its function."""
    CASES[run.__name__] = run
    return run


class Client:
    """One channel to a site, with a method per kind of call."""

    def __init__(self, channel, site):
        self._channel = channel
        self.site = site
        self.coded = {"request_serializer": service.encode, "response_deserializer": service.decode_reply}

    def empty(self, **options):
        return self._channel.unary_unary(f"/{SERVICE}/EmptyCall")(b"", **options)

    def unary(self, request, method=f"/{SERVICE}/UnaryCall", **options):
        return self._channel.unary_unary(method, **self.coded)(request, **options)

    def stream_out(self, request, method="StreamingOutputCall", **options):
        return self._channel.unary_stream(f"/{SERVICE}/{method}", **self.coded)(request, **options)

    def stream_in(self, requests=None, **options):
        return self._channel.stream_unary(f"/{SERVICE}/StreamingInputCall", **self.coded)(requests, **options)

    def duplex(self, requests=None, **options):
        return self._channel.stream_stream(f"/{SERVICE}/FullDuplexCall", **self.coded)(requests, **options)


async def failed(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


@case
async def empty_unary(client):
    assert await client.empty() == b""


@case
async def large_unary(client):
    reply = await client.unary(Request([LARGE_REPLY_BYTES], bytes(LARGE_REQUEST_BYTES)))
    assert reply == Reply(bytes(LARGE_REPLY_BYTES), LARGE_REQUEST_BYTES)


@case
async def client_streaming(client):
    reply = await client.stream_in(Request(payload=bytes(size)) for size in REQUEST_SIZES)
    assert reply.received == sum(REQUEST_SIZES) == 74_922


@case
async def server_streaming(client):
    assert [len(reply.body) async for reply in client.stream_out(Request(REPLY_SIZES))] == REPLY_SIZES


@case
async def server_streaming_without_a_task(client):
    """Not one of theirs: our own server may call a handler within the request's arrival."""
    for sizes in (REPLY_SIZES, [], [0] * 500):
        call = client.stream_out(Request(sizes), "DirectOutputCall")
        assert [len(reply.body) async for reply in call] == sizes
        assert await call.code() is grpc.StatusCode.OK


@case
async def ping_pong(client):
    call = client.duplex()
    for wanted, sent in zip(REPLY_SIZES, REQUEST_SIZES, strict=True):
        await call.write(Request([wanted], bytes(sent)))
        assert len((await call.read()).body) == wanted
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@case
async def empty_stream(client):
    call = client.duplex()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@case
async def cancel_after_begin(client):
    call = client.stream_in()
    await _until(lambda: client.site.service.live)
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED
    await _until(lambda: not client.site.service.live)


@case
async def cancel_after_first_response(client):
    call = client.duplex()
    await call.write(Request([REPLY_SIZES[0]], bytes(REQUEST_SIZES[0])))
    assert len((await call.read()).body) == REPLY_SIZES[0]
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED
    await _until(lambda: not client.site.service.live)


@case
async def timeout_on_sleeping_server(client):
    call = client.duplex(timeout=0.1)
    await call.write(Request(payload=bytes(27_182)))
    assert (await failed(call.read())).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await _until(lambda: not client.site.service.live)


@case
async def status_code_and_message(client):
    request = Request(status=2, message=MESSAGE)
    error = await failed(client.unary(request))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, MESSAGE)
    call = client.duplex()
    await call.write(request)
    error = await failed(call.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, MESSAGE)


@case
async def special_status_message(client):
    error = await failed(client.unary(Request(status=2, message=SPECIAL_MESSAGE)))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, SPECIAL_MESSAGE)


@case
async def custom_metadata(client):
    metadata = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab\0\xff"))
    call = client.unary(Request([1]), metadata=metadata)
    await call
    await _check_echo(call)
    both = client.duplex(metadata=metadata)
    await both.write(Request([1]))
    assert len((await both.read()).body) == 1
    await both.done_writing()
    assert await both.read() is grpc.aio.EOF
    await _check_echo(both)


async def _check_echo(call):
    assert dict(await call.initial_metadata())[ECHO_INITIAL] == "test_initial_metadata_value"
    assert dict(await call.trailing_metadata())[ECHO_TRAILING] == b"\xab\xab\xab\0\xff"


@case
async def unimplemented_method(client):
    error = await failed(client.unary(Request([1]), f"/{SERVICE}/UnimplementedCall"))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@case
async def unimplemented_service(client):
    error = await failed(client.unary(Request([1]), "/conformance.NoService/UnaryCall"))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@case
async def client_compressed_unary(client):
    reply = await client.unary(Request([LARGE_REPLY_BYTES], bytes(LARGE_REQUEST_BYTES)), compression=GZIP)
    assert reply == Reply(bytes(LARGE_REPLY_BYTES), LARGE_REQUEST_BYTES)


@case
async def client_compressed_streaming(client):
    reply = await client.stream_in((Request(payload=bytes(size)) for size in (27_182, 45_904)), compression=GZIP)
    assert reply.received == 73_086


@case
async def concurrent_large_unary(client):
    """Not one of theirs: their soak test, as many calls at once, on one connection."""
    sizes = [1 + 997 * number for number in range(100)]
    replies = await asyncio.gather(*(client.unary(Request([size], bytes(size))) for size in sizes))
    assert [(len(reply.body), reply.received) for reply in replies] == [(size, size) for size in sizes]


async def _until(condition):
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - another task of this loop makes it true
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
async def test_interop(name, transport):
    async with serving(transport) as site, grpc.aio.insecure_channel(site.address) as channel:
        await CASES[name](Client(channel, site))
