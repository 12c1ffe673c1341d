"""The server with the gRPC library's own client: every kind of call, every way to end one."""

import asyncio
import gzip

import grpc
import pytest

from tests.h2.site import MIB, failure, rest, serving
from tests.support.grpc_edge import until


class TestKinds:
    async def test_unary(self, site):
        assert await site.unary("Echo", b"x" * 100) == b"x" * 100
        assert await site.unary("Echo", b"") == b""
        assert await site.unary("Text", "grüße".encode()) == "grüße".encode()

    @pytest.mark.parametrize("name", ["Stream", "Generate"])
    async def test_server_stream(self, site, name):
        assert [each async for each in site.stream(name, b"300")] == [b"%d" % number for number in range(300)]
        assert [each async for each in site.stream(name, b"0")] == []

    @pytest.mark.parametrize("name", ["Bidi", "ReadByHand"])
    async def test_both_ways_in_turns(self, site, name):
        call = site.bidi(name)
        for number in range(20):
            await call.write(b"%d" % number)
            assert (await call.read()).endswith(b"%d" % number)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK

    async def test_client_stream(self, site):
        parts = [b"%d" % number for number in range(1000)]
        assert await site.channel.stream_unary("/t.S/Collect")(iter(parts)) == b"".join(parts)

    async def test_large_messages_both_ways(self, site):
        data = bytes(range(256)) * (20 * MIB // 256)
        assert await site.unary("Echo", data) == data

    async def test_many_calls_at_once_on_one_connection(self, site):
        answers = await asyncio.gather(*(site.unary("Echo", b"%d" % number) for number in range(500)))
        assert answers == [b"%d" % number for number in range(500)]
        assert len(site.shared.connections) == 1

    async def test_compressed_requests(self, site):
        data = b"again and again " * 10_000
        assert await site.unary("Echo", data, compression=grpc.Compression.Gzip) == data
        error = await failure(site.unary("Echo", data, compression=grpc.Compression.Deflate))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_handlers_for_threads_are_refused(self, site):
        error = await failure(site.unary("Threads"))
        assert error.code() is grpc.StatusCode.UNKNOWN

    async def test_registered_handlers(self, site):
        site.server.add_registered_method_handlers("r.S", {"Echo": site.handlers.service()["Echo"]})
        assert await site.channel.unary_unary("/r.S/Echo")(b"hi") == b"hi"


class TestEnds:
    async def test_metadata_each_way(self, site):
        call = site.unary("Metadata", metadata=(("x-mine", "a"), ("x-mine", "b"), ("x-mine-bin", b"\0\xff")))
        await call
        assert set(await call.initial_metadata()) == {("x-first", "1"), ("x-first-bin", b"\0\1")}
        assert set(await call.trailing_metadata()) == {("x-last", "2"), ("x-last-bin", b"\xff")}
        (context,) = site.handlers.contexts
        mine = [pair for pair in context.invocation_metadata() if pair[0].startswith("x-")]
        assert mine == [("x-mine", "a"), ("x-mine", "b"), ("x-mine-bin", b"\0\xff")]
        assert context.peer().startswith("ipv4:127.0.0.1:")
        assert context.time_remaining() is None
        assert context.done()

    async def test_tokens_are_in_no_log(self, site, caplog):
        caplog.set_level("DEBUG")
        for _ in range(2):
            await site.unary("Echo", b"x", metadata=(("authorization", "Bearer secret-word"),))
        assert ("authorization", "Bearer secret-word") in site.handlers.contexts[0].invocation_metadata()
        assert "secret-word" not in caplog.text

    async def test_an_abort_before_and_after_messages(self, site):
        error = await failure(site.unary("Abort", b"dogs"))
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no dogs ä%")
        assert dict(error.trailing_metadata())["x-why"] == "because"
        call = site.stream("AbortLate")
        assert await call.read() == b"one"
        assert (await failure(call)).code() is grpc.StatusCode.DATA_LOSS

    async def test_a_code_that_was_set(self, site):
        error = await failure(site.unary("SetCode"))
        assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "by hand")

    async def test_a_defect_harms_one_call(self, site):
        others = site.stream("Wait", b"w")
        assert await others.read() == b"waiting"
        assert (await failure(site.unary("Defect"))).code() is grpc.StatusCode.UNKNOWN
        site.handlers.release.set()
        assert await rest(others) == []

    async def test_what_is_not_there(self, site):
        assert (await failure(site.unary("None"))).code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_a_cancelled_call_cancels_its_handler(self, site):
        calls = [site.stream("Wait", b"%d" % number) for number in range(3)]
        for call in calls:
            assert await call.read() == b"waiting"
        done = []
        for context in site.handlers.contexts:
            context.add_done_callback(done.append)
        calls[1].cancel()
        await until(lambda: site.handlers.cancelled)
        assert site.handlers.cancelled == [b"1"]
        await until(lambda: done)
        (ended,) = done
        assert ended.cancelled()
        assert [context.done() for context in site.handlers.contexts].count(True) == 1
        site.handlers.release.set()
        assert await rest(calls[0]) == []

    async def test_a_connection_that_goes_takes_its_calls_along(self, site):
        channel = grpc.aio.insecure_channel(site.address, options=[("grpc.use_local_subchannel_pool", 1)])
        for number in range(3):
            assert await channel.unary_stream("/t.S/Wait")(b"%d" % number).read() == b"waiting"
        await channel.close()
        await until(lambda: len(site.handlers.cancelled) == 3)
        assert await site.unary("Echo", b"still") == b"still"

    async def test_a_deadline_ends_both_sides(self, site):
        call = site.stream("Wait", b"late", timeout=0.3)
        assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: site.handlers.cancelled)
        assert 0 <= site.handlers.contexts[0].time_remaining() <= 0.3

    async def test_a_call_that_ends_in_time_leaves_no_deadline(self, site):
        assert await site.unary("Echo", b"quick", timeout=100) == b"quick"
        assert site.handlers.contexts[0].time_remaining() > 90
        assert not site.shared.deadlines._intervals

    async def test_a_message_that_is_too_large(self):
        async with serving(max_request_bytes=1000) as site:
            assert await site.unary("Echo", bytes(1000))
            for data, compression in (
                (bytes(1001), None),
                (bytes(5_000_000), None),
                (bytes(2000), grpc.Compression.Gzip),
            ):
                error = await failure(site.unary("Echo", data, compression=compression))
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(gzip.compress(bytes(2000))) < 1000, "only the decompressed one is too large"

    async def test_a_stream_of_requests_is_refused_before_it_sends(self, site):
        """grpc.aio's client would take the news for a failure of its own if they came while it sends."""
        for _ in range(20):
            call = site.bidi("None", iter([b"x"] * 3))
            assert (await failure(call)).code() is grpc.StatusCode.UNIMPLEMENTED
