"""Handlers that are called with the request, and have no task."""

import asyncio

import grpc
import pytest
import structlog

from gateway.h2.protocol import frames
from gateway.h2.protocol.header_blocks import encode_fields
from gateway.h2.rpc import status
from gateway.h2.rpc.status import Code, RpcError
from tests.h2.by_hand import FIELDS, message
from tests.h2.site import failure, rest
from tests.support.grpc_edge import until


class Direct:
    """Adds direct handlers to a site; `calls` are those that were made, `closed` what `on_closed` was told."""

    def __init__(self, site):
        self.site = site
        self.calls = []
        self.closed = []
        handlers = {name: self.handler(getattr(self, name.lower())) for name in ("Echo", "Keep", "Refuse", "Defect")}
        site.server.add_registered_method_handlers("d.S", handlers)

    def handler(self, direct):
        made = grpc.unary_stream_rpc_method_handler(None)
        made.direct = direct
        return made

    def open(self, name, request=b"", **options):
        return self.site.channel.unary_stream(f"/d.S/{name}")(request, **options)

    def echo(self, request, call):
        self.calls.append(call)
        call.push(request)
        call.push(b"again")
        call.finish(0, "", status.encode_metadata([("x-last", "1")]))

    def keep(self, request, call):
        self.calls.append(call)
        call.on_closed = self.closed.append
        call.send_head([("x-first", "1")])
        call.push(request)

    def refuse(self, request, call):
        raise RpcError(Code.RESOURCE_EXHAUSTED, "not now")

    def defect(self, request, call):
        raise ZeroDivisionError("inside")


@pytest.fixture
def direct(site):
    return Direct(site)


async def test_messages_trailers_and_no_task(site, direct):
    call = direct.open("Echo", b"hello", metadata=(("x-a", "b"),))
    assert await rest(call) == [b"hello", b"again"]
    assert await call.code() is grpc.StatusCode.OK
    assert dict(await call.trailing_metadata())["x-last"] == "1"
    (made,) = direct.calls
    assert dict(made.head.invocation_metadata)["x-a"] == "b"
    assert made.invocation_metadata() is made.head.invocation_metadata
    assert made.peer().startswith("ipv4:127.0.0.1:")
    assert made.done()
    assert not site.shared.tasks


async def test_its_stream_takes_messages_by_itself_and_the_connection_writes_them(direct):
    call = direct.open("Keep", b"1")
    assert await call.read() == b"1"
    (made,) = direct.calls
    for number in (b"2", b"3"):
        assert made.stream.push(number)
        assert made._connection.is_scheduled
        assert await asyncio.wait_for(call.read(), 5.0) == number
    made.finish(0)
    assert not made.stream.push(b"4"), "it has ended"
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("name", ["Refuse", "Defect"])
async def test_what_it_raises_is_how_the_call_ends(direct, name):
    with structlog.testing.capture_logs() as logs:
        error = await failure(direct.open(name))
    expected = {"Refuse": (grpc.StatusCode.RESOURCE_EXHAUSTED, 0), "Defect": (grpc.StatusCode.UNKNOWN, 1)}
    assert (error.code(), len(logs)) == expected[name]


async def test_it_is_told_when_the_client_leaves(site, direct):
    call = direct.open("Keep", b"1")
    assert await call.read() == b"1"
    assert dict(await call.initial_metadata())["x-first"] == "1"
    call.cancel()
    await until(lambda: direct.closed)
    assert direct.closed == [False]
    (made,) = direct.calls
    assert made.done()
    assert (made.on_closed, made.on_ready, made._connection) == (None, None, None)
    made.push(b"nobody")
    made.finish(0)
    assert not site.shared.connections or not next(iter(site.shared.connections)).http.streams


async def test_it_is_told_when_its_deadline_has_passed(direct):
    error = await failure(direct.open("Keep", b"1", timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: direct.closed)
    # The client's own clock may be first, and then it has left.
    assert len(direct.closed) == 1


async def test_a_deadline_is_told_apart_from_a_client_that_left(site, direct):
    """This client does not look at the clock."""
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    fields = [(name.encode(), value.encode()) for name, value in FIELDS if name != ":path"]
    block = encode_fields([(b":path", b"/d.S/Keep"), *fields, (b"grpc-timeout", b"50m")])
    writer.write(frames.PREFACE + frames.settings(()) + frames.SETTINGS_ACK)
    writer.write(frames.headers(1, block, is_end=False) + frames.frame(0, 1, 1, message(b"x")))
    await until(lambda: direct.closed)
    assert direct.closed == [True]
    assert direct.calls[0].time_remaining() == 0.0
    writer.close()
    del reader


async def test_finish_by_itself_is_not_told_back(direct):
    call = direct.open("Keep", b"1")
    assert await call.read() == b"1"
    (made,) = direct.calls
    made.finish(Code.UNAVAILABLE, "enough", status.encode_metadata([("x-why", "because")]))
    made.finish(0)
    error = await failure(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "enough")
    assert dict(error.trailing_metadata())["x-why"] == "because"
    assert direct.closed == []


async def test_time_outs_that_differ_from_call_to_call(site, direct):
    """The library's client has another one in every call, and all of them share what was read of their headers."""
    heads = set()
    for timeout in (30.0, 29.3, 5.1234, 100.0, 0.9):
        assert await rest(direct.open("Echo", b"x", timeout=timeout)) == [b"x", b"again"]
        made = direct.calls[-1]
        assert timeout - 1.0 < made.deadline_at - asyncio.get_running_loop().time() < timeout + 2.0  # it rounds up
        heads.add(made.head)
    assert len(heads) <= 2, "the first one was sent before our settings were known"
    made.head.memo = "ours"
    await rest(direct.open("Echo", b"x", timeout=77.0))
    assert direct.calls[-1].head.memo == "ours"


async def test_requests_in_pieces(site, direct):
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    fields = [(name.encode(), value.encode()) for name, value in FIELDS if name != ":path"]
    block = encode_fields([(b":path", b"/d.S/Echo"), *fields])
    data = frames.headers(1, block, is_end=False) + frames.frame(0, 0, 1, message(b"pieces")[:4])
    data += frames.frame(0, 0, 1, message(b"pieces")[4:]) + frames.frame(0, 1, 1)
    writer.write(frames.PREFACE + frames.settings(()) + frames.SETTINGS_ACK)
    for at in range(0, len(data), 30):
        writer.write(data[at : at + 30])
        await asyncio.sleep(0.01)
    received = b""
    while b"x-last" not in received:
        received += await asyncio.wait_for(reader.read(1000), 10)
    assert message(b"pieces") in received
    writer.close()


async def test_ready_again(site, direct):
    """A message larger than the windows is held until the client has read; the next one is asked for then."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(site.address, options=options) as channel:
        call = channel.unary_stream("/d.S/Keep")(b"1")
        assert await call.read() == b"1"
        (made,) = direct.calls
        ready = []
        made.on_ready = lambda: ready.append(made.is_ready)
        made.push(bytes(3_000_000))
        assert not made.is_ready
        assert len(await call.read()) == 3_000_000
        await until(lambda: ready)
        assert ready == [True]
        made.finish(0)
        assert await rest(call) == []
