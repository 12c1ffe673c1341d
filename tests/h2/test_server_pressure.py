"""Clients and handlers that do not read, servers that stop, connections that are too many."""

import asyncio

import grpc
import pytest

from gateway.h2.protocol import frames, settings
from gateway.h2.protocol.header_blocks import encode_fields
from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from tests.h2.by_hand import FIELDS, message
from tests.h2.site import MIB, failure, rest, serving
from tests.support.grpc_edge import until


class TestPressure:
    async def test_a_client_that_does_not_read_stops_the_writer(self, site):
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(site.address, options=options) as channel:
            call = channel.unary_stream("/t.S/Fill")(b"1000")
            await until(lambda: site.handlers.contexts)
            context = site.handlers.contexts[0]
            await until(lambda: not context.is_ready)
            stream = context._stream
            assert 0 < len(stream.backlog) <= 1005
            assert await site.unary("Echo", b"others go on") == b"others go on"
            for _ in range(500):
                assert await call.read() == bytes(1000)
            call.cancel()
            await until(context.done)

    async def test_a_message_that_goes_out_at_once_makes_nobody_ready(self, site):
        """Also a large one: whoever pushed it never waited."""
        call = site.stream("Wait", b"w")
        assert await call.read() == b"waiting"
        (context,) = site.handlers.contexts
        told = []
        context.outlet(lambda: told.append("ready"))
        for _ in range(3):
            context.push(bytes(20_000))
            assert context.is_ready
            assert await call.read() == bytes(20_000)
        assert told == []
        call.cancel()
        await until(context.done)

    async def test_whoever_waits_is_not_ready_before_its_own_message_is_out(self, site):
        """The message before it went out within its `push`."""
        call = site.stream("Wait", b"w")
        assert await call.read() == b"waiting"
        (context,) = site.handlers.contexts
        left_bytes = []
        context.outlet(lambda: left_bytes.append(len(context._stream.backlog)))
        context.push(bytes(20_000))
        assert context.is_ready
        context.push(bytes(3_000_000))
        assert not context.is_ready
        assert [len(await call.read()) for _ in range(2)] == [20_000, 3_000_000]
        await until(lambda: context.is_ready)
        assert left_bytes == [0]
        call.cancel()
        await until(context.done)

    async def test_a_client_that_reads_nothing_at_all_stops_at_the_transport(self, site):
        """Its windows are wide open, but nothing leaves its socket."""

        _, writer = await asyncio.open_connection(*site.address.split(":"), limit=1)
        wide = frames.settings(((settings.INITIAL_WINDOW_SIZE, 2**31 - 1),))
        writer.write(frames.PREFACE + wide + frames.SETTINGS_ACK + frames.window_update(0, 2**30))
        fields = [(name.encode(), value.encode()) for name, value in FIELDS if name != ":path"]
        block = encode_fields([(b":path", b"/t.S/Fill"), *fields])
        writer.write(frames.headers(1, block, is_end=False))
        writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, message(b"10000")))
        await until(lambda: site.handlers.contexts and not site.handlers.contexts[0].is_ready)
        (connection,) = site.shared.connections
        assert connection.http.out.is_paused
        assert connection._transport.get_write_buffer_size() < 2 * MIB
        assert len(site.handlers.contexts[0]._stream.backlog) <= 10_005
        writer.transport.abort()
        await until(site.handlers.contexts[0].done)

    async def test_a_handler_that_does_not_read_stops_the_client(self, site):
        """The client's window stays shut while whole messages wait for the handler."""
        gate = asyncio.Event()
        received: list[bytes] = []

        async def slow(requests, context):
            site.handlers.contexts.append(context)
            await gate.wait()
            received.extend([request async for request in requests])

        site.server.add_registered_method_handlers("r.S", {"Slow": grpc.stream_stream_rpc_method_handler(slow)})
        call = site.channel.stream_stream("/r.S/Slow")()

        async def send():
            for _ in range(300):
                await call.write(bytes(10_000))
            await call.done_writing()

        sending = asyncio.create_task(send())
        await until(lambda: site.handlers.contexts)
        incoming = site.handlers.contexts[0].incoming
        await until(lambda: incoming._withheld)
        assert not sending.done()
        await asyncio.sleep(0.1)
        limits = site.shared.limits
        assert incoming._unread <= limits.stream_window_bytes + 128 * 1024 + 10_005
        gate.set()
        await sending
        assert await call.read() is grpc.aio.EOF
        assert received == [bytes(10_000)] * 300


class TestStop:
    async def test_live_calls_end_by_themselves_then_it_returns(self):
        async with serving() as site:
            call = site.stream("Wait")
            assert await call.read() == b"waiting"
            stopping = asyncio.create_task(site.server.stop(60.0))
            while True:
                try:
                    _, writer = await asyncio.open_connection(*site.address.split(":"))
                except ConnectionRefusedError:
                    break
                except ConnectionResetError:
                    continue  # the listener went while this was in its queue
                writer.close()
            assert not stopping.done()
            site.handlers.release.set()
            await stopping
            assert await rest(call) == []
            assert await call.code() is grpc.StatusCode.OK
            assert await site.server.wait_for_termination(1.0) is False

    async def test_at_the_end_of_grace_the_rest_is_ended_with_a_status(self):
        async with serving() as site:
            call = site.stream("Wait", b"w")
            assert await call.read() == b"waiting"
            await site.server.stop(0.05)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert site.handlers.cancelled == [b"w"]

    async def test_idle_connections_do_not_hold_it_up(self):
        async with serving() as site:
            await site.unary("Echo", b"x")
            await asyncio.wait_for(site.server.stop(30.0), 10.0)

    async def test_more_connections_than_allowed_are_closed_at_once(self):
        async with serving(max_connections=1) as site:
            await site.unary("Echo", b"x")
            reader, writer = await asyncio.open_connection(*site.address.split(":"))
            assert await reader.read() == b""
            writer.close()
            assert await site.unary("Echo", b"y") == b"y"

    async def test_the_time_to_read_can_change_for_those_that_are_open_and_those_to_come(self):
        async with serving(unread_timeout_s=0.001) as site:
            await site.unary("Echo", b"x")
            site.server.set_unread_timeout(None)
            async with grpc.aio.insecure_channel(
                site.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as other:
                assert await other.unary_unary("/t.S/Echo")(b"y") == b"y"
                assert [each.http.unread_timeout_s for each in site.shared.connections] == [None, None]
                shaking_hands = site.shared.admit()
                site.server.set_unread_timeout(2.0)
                assert shaking_hands.http.unread_timeout_s == 2.0
                site.shared.joining.discard(shaking_hands)

    async def test_a_port_that_is_taken(self):
        async with serving() as site:
            other = Server(limits=Limits(), max_message_bytes=1)
            with pytest.raises(RuntimeError, match="in use"):
                other.add_insecure_port(site.address)
            await other.stop(None)
