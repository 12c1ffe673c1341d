"""Bounds on connections, most of them the gRPC library's: clients by hand that keep to nothing, and what is left of them."""

import asyncio
import gc
import random
from pathlib import Path

import grpc
import pytest

from engine_stub.faults import Faults
from gateway.edges.grpc_options import server_options
from gateway.v1 import admin_pb2
from tests.support.calls import Generation, generate, make_request
from tests.support.raw_h2 import DATA, GOAWAY, PING, REFUSED_STREAM, RST_STREAM, RawClient, frame
from tests.support.stack import running_gateway, stub_config, until

GENERATE = "/gateway.v1.GatewayService/Generate"


def address(stack):
    return stack.gateway.servers.grpc_address


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


async def connections(stack, count):
    """Connections that the server has taken."""
    clients = [await RawClient.connect(address(stack)) for _ in range(count)]
    assert all([await client.settled() for client in clients])
    return clients


async def close(clients):
    await asyncio.gather(*(client.close() for client in clients))


async def test_connections_beyond_the_limit_are_closed_at_once_and_calls_go_on():
    stub = stub_config(faults=Faults(silent=True))
    async with running_gateway("vllm", stub=stub, limits={"max_connections": 4}) as stack:
        live = Generation(stack.client(), make_request(max_tokens=3))
        await until(lambda: stack.router.live_count == 1, "the call")
        kept = await connections(stack, 3)
        for _ in range(3):
            further = await RawClient.connect(address(stack))
            assert not await further.settled()
            await further.close()
        # The admin listener counts its own.
        assert (await stack.admin().GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())).json
        await close(kept[:1])

        async def retaken():
            client = await RawClient.connect(address(stack))
            if await client.settled():
                return client
            await client.close()
            return None

        while (client := await retaken()) is None:  # noqa: ASYNC110 - the server says nothing
            await asyncio.sleep(0.01)  # until the server has seen the other one go
        await close([client, *kept[1:]])
        for rank in stack.ranks:
            rank.set_faults(silent=False)
        (await live.done()).assert_complete(live.request)


@pytest.mark.parametrize("greets", [False, True], ids=["says-nothing", "stops-after-the-preface"])
async def test_a_connection_that_does_not_come_to_the_point_is_closed(greets):
    async with running_gateway("vllm", limits={"handshake_timeout_s": 0.3}) as stack:
        client = await RawClient.connect(address(stack), greets=False)
        if greets:
            client.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        await client.ended()
        await client.close()


async def test_a_connection_without_calls_is_closed_in_order_and_the_client_comes_back():
    async with running_gateway("vllm", limits={"idle_connection_timeout_s": 0.3}) as stack:
        client = stack.client()
        for _ in range(2):
            request = make_request()
            (await generate(client, request)).assert_complete(request)
            (raw,) = await connections(stack, 1)
            assert await raw.until(GOAWAY)
            await raw.ended()
            await raw.close()


async def test_a_client_that_ignores_the_limit_on_streams_is_refused_its_further_ones():
    stub = stub_config(faults=Faults(silent=True))
    async with running_gateway("vllm", stub=stub, limits={"max_streams_per_connection": 2}) as stack:
        (raw,) = await connections(stack, 1)
        message = make_request(max_tokens=3).SerializeToString()
        for stream in (1, 3, 5, 7):
            raw.call(stream, GENERATE, message)
        refused = [await raw.until(RST_STREAM) for _ in range(2)]
        assert {stream for _, _, stream, _ in refused} == {5, 7}
        assert {int.from_bytes(payload, "big") for *_, payload in refused} == {REFUSED_STREAM}
        assert stack.router.live_count <= 2
        await raw.close()
        await until(lambda: not stack.router.live_count, "the calls to end with their connection")


async def test_a_client_that_pings_all_the_time_is_disconnected():
    async with running_gateway("vllm") as stack:
        (raw,) = await connections(stack, 1)
        for _ in range(20):
            raw.writer.write(frame(PING, 0, 0, b"\0" * 8))
        found = await raw.until(GOAWAY)
        # With pings on their way the connection may be reset before that is read.
        assert found is None or b"too_many_pings" in found[3]
        await raw.ended()
        await raw.close()


async def test_a_client_that_vanished_is_found_and_its_request_aborted(protocol):
    """It answers no ping, as its host is gone; its connection looks open."""
    stub = stub_config(faults=Faults(silent=True))
    listen = {"keepalive": {"time_s": 0.2, "timeout_s": 0.2}}
    async with running_gateway(protocol, ranks=1, stub=stub, listen=listen) as stack:
        (raw,) = await connections(stack, 1)
        raw.call(1, GENERATE, make_request(max_tokens=3).SerializeToString())
        await until(lambda: stack.router.live_count == 1, "the request")
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 1)
        assert [entry["outcome"] for entry in stack.logged("request_ended")] == ["CANCELLED"]
        await raw.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" * 50, random.Random(3).randbytes(300)]
)
async def test_what_is_no_http2_is_closed(garbage):
    async with running_gateway("vllm") as stack:
        client = await RawClient.connect(address(stack), greets=False)
        client.writer.write(garbage)
        await client.ended()
        await client.close()


async def test_connections_that_come_and_go_leave_nothing(protocol):
    """Of every kind: at once, after a greeting, with a call that is left in the middle, and with one that is served."""
    async with running_gateway(protocol) as stack:
        message = make_request(max_tokens=2_000).SerializeToString()

        async def come_and_go(number):
            client = await RawClient.connect(address(stack), greets=number % 4 > 0)
            if number % 4 > 1:
                assert await client.settled()
                client.call(1, GENERATE, message if number % 4 == 3 else None)
            if number % 4 == 3:
                assert await client.until(DATA), "its first token"
            await client.close()

        async def rounds(count):
            for _ in range(count):
                await asyncio.gather(*(come_and_go(number) for number in range(40)))
            await until(lambda: not gate.streams, "all calls to be gone")

        gate = stack.gateway.servers.gate
        await rounds(3)
        gc.collect()
        files, tasks = open_files(), len(asyncio.all_tasks())
        await rounds(25)
        await until(lambda: open_files() <= files, f"{files} open files or less")
        await until(lambda: len(asyncio.all_tasks()) <= tasks + 1, "the tasks to be gone")
        assert (gate.streams, gate.connections, len(gate.watch)) == (0, 0, 0)
        request = make_request()
        (await generate(stack.client(), request)).assert_complete(request)


async def test_a_channel_for_every_call_leaves_nothing():
    async with running_gateway("vllm") as stack:
        for number in range(61):
            request = make_request()
            (await generate(stack.client(), request)).assert_complete(request)
            await stack.close_clients()
            if not number:  # the first one makes what the client's library has once
                files = open_files()
        await until(lambda: open_files() <= files, f"{files} open files or less")
        gate = stack.gateway.servers.gate
        assert (gate.streams, gate.connections) == (0, 0)


async def test_the_library_takes_the_options_by_these_names():
    """What it does not know it ignores in silence."""
    library = next(Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")).read_bytes()
    async with running_gateway("vllm") as stack:
        for name, _ in server_options(stack.gateway.config, 1):
            assert name.encode() in library, name
