"""The gRPC library's other client, with threads: what it sends and when differs from the asyncio one's."""

import asyncio
import queue
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.conformance import service
from tests.conformance.service import ECHO_INITIAL, ECHO_TRAILING, SERVICE, TRANSPORTS, Request, serving

_CODED = {"request_serializer": service.encode, "response_deserializer": service.decode_reply}


def _unary(channel):
    return channel.unary_unary(f"/{SERVICE}/UnaryCall", **_CODED)


def unary_with_metadata(channel):
    metadata = ((ECHO_INITIAL, "first"), (ECHO_TRAILING, b"\0\xff"))
    reply, call = _unary(channel).with_call(Request([10], b"abc"), metadata=metadata)
    assert (len(reply.body), reply.received) == (10, 3)
    assert (ECHO_INITIAL, "first") in call.initial_metadata()
    assert (ECHO_TRAILING, b"\0\xff") in call.trailing_metadata()


def a_status(channel):
    with pytest.raises(grpc.RpcError) as caught:
        _unary(channel)(Request(status=9, message="not now ä"))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not now ä")


def streams_each_way(channel):
    out = channel.unary_stream(f"/{SERVICE}/StreamingOutputCall", **_CODED)
    assert [len(reply.body) for reply in out(Request([1, 100_000, 2]))] == [1, 100_000, 2]
    many = channel.stream_unary(f"/{SERVICE}/StreamingInputCall", **_CODED)
    assert many(Request(payload=bytes(50_000)) for _ in range(20)).received == 1_000_000


def in_turns_then_cancel(channel):
    said: queue.Queue[Request | None] = queue.Queue()
    call = channel.stream_stream(f"/{SERVICE}/FullDuplexCall", **_CODED)(iter(said.get, None))
    for size in range(1, 30):
        said.put(Request([size], b"x"))
        reply = next(call)
        assert (len(reply.body), reply.received) == (size, size)
    call.cancel()
    said.put(None)
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code() is grpc.StatusCode.CANCELLED


def a_deadline(channel):
    said: queue.Queue[Request | None] = queue.Queue()
    call = channel.stream_stream(f"/{SERVICE}/FullDuplexCall", **_CODED)(iter(said.get, None), timeout=0.2)
    with pytest.raises(grpc.RpcError):
        next(call)
    said.put(None)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def many_threads_on_one_connection(channel):
    call = _unary(channel)
    with ThreadPoolExecutor(16) as pool:
        replies = pool.map(lambda size: call(Request([size], bytes(size))), range(0, 60_000, 300))
        assert [(len(reply.body), reply.received) for reply in replies] == [(n, n) for n in range(0, 60_000, 300)]


CASES = [
    unary_with_metadata,
    a_status,
    streams_each_way,
    in_turns_then_cancel,
    a_deadline,
    many_threads_on_one_connection,
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
async def test_client_with_threads(run, transport):
    def client(address):
        with grpc.insecure_channel(address) as channel:
            run(channel)

    async with serving(transport) as site:
        await asyncio.to_thread(client, site.address)
