"""GenerateMany over real grpcio: many requests, one stream."""

import asyncio

import grpc
import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.edges import grpc_many
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver, count_up
from tests.support.grpc_edge import error_info, generate_request, info_of, serve, until
from tests.support.many import GatedTransport, Reader, Stream, abort, arrivals, open_stream, start

METHOD = "/gateway.v1.GatewayService/GenerateMany"


async def test_many_requests_and_half_close():
    async with serve(count_up) as edge:
        call = edge.stub.GenerateMany()
        for number in range(50):
            await call.write(start(f"r{number}", sampling={"max_tokens": 6, "n": 1 + number % 2}))
        await call.done_writing()
        reader = Reader(call)
        await reader.read_all()
        keys = {(f"r{number}", index) for number in range(50) for index in range(1 + number % 2)}
        assert reader.tokens == {key: [3, 4, 5, 6, 7, 8] for key in keys}
        assert sorted(reader.finished) == sorted(keys)
        assert reader.errors == []
        assert await call.code() is grpc.StatusCode.OK


async def test_headers_come_before_the_first_instruction():
    async with serve() as edge:
        call = edge.stub.GenerateMany()
        await call.initial_metadata()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_everything_that_arrived_in_one_turn_is_one_message():
    async with serve() as edge:
        call = edge.stub.GenerateMany()
        for number in range(20):
            await call.write(start(f"r{number}"))
        await arrivals(edge.driver, 20)
        for number, request in enumerate(edge.driver.requests):
            edge.driver.tokens(request, [number])
            edge.driver.tokens(request, [number + 1])
        reader = Reader(call)
        await reader.read()
        assert reader.tokens == {(f"r{number}", 0): [number, number + 1] for number in range(20)}
        call.cancel()


async def test_one_requests_error_leaves_the_others_alone():
    async with serve() as edge:
        call = edge.stub.GenerateMany()
        await call.write(start("a"))
        await call.write(start("b"))
        await arrivals(edge.driver, 2)
        first, second = edge.driver.requests
        edge.driver.tokens(first, [1, 2])
        edge.driver.end(first, GatewayError(Reason.RANK_LOST, "rank 0 was lost", retryable=True, rank=0))
        reader = Reader(call)
        await reader.read_until(lambda: reader.errors)
        assert reader.tokens == {("a", 0): [1, 2]}
        request_id, info = reader.errors[0]
        assert (request_id, info.reason, info.metadata["rank"]) == ("a", "RANK_LOST", "0")
        await call.done_writing()
        edge.driver.tokens(second, [3], finish="stop")
        await reader.read_all()
        assert reader.tokens["b", 0] == [3]
        assert await call.code() is grpc.StatusCode.OK


async def test_the_streams_metadata_holds_for_all_its_requests():
    metadata = (("x-tenant-id", "team-a"), ("x-cache-salt", "pepper"), ("x-queue-timeout-ms", "250"))
    async with serve(count_up) as edge:
        call = edge.stub.GenerateMany(metadata=metadata)
        await call.write(start("a", session_id="s1"))
        await call.write(start("b", session_id="s2", no_cache=True))
        await call.done_writing()
        await Reader(call).read_all()
        first, second = edge.driver.arrivals
        for arrived in (first, second):
            assert (arrived.tenant, arrived.cache_salt, arrived.queue_timeout_s) == ("team-a", "pepper", 0.25)
        assert (first.session_id, second.session_id) == ("s1", "s2")
        assert (first.use_cache, second.use_cache) == (True, False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("instruction", "reason", "field"),
        [
            (gateway_pb2.GenerateManyRequest(), "INVALID_REQUEST", ""),
            (start(""), "INVALID_REQUEST", "request_id"),
            (start("tab\there"), "INVALID_REQUEST", "request_id"),
        ],
    )
    async def test_a_bad_instruction_is_reported_and_the_stream_goes_on(self, instruction, reason, field):
        async with serve(count_up) as edge:
            call = edge.stub.GenerateMany()
            await call.write(instruction)
            await call.write(start("good"))
            await call.done_writing()
            reader = Reader(call)
            await reader.read_all()
            ((request_id, info),) = reader.errors
            assert (request_id, info.reason) == (instruction.start.request_id, reason)
            assert info.metadata.get("field", "") == field
            assert reader.finished == [("good", 0)]

    async def test_ids_are_per_stream(self):
        async with serve() as edge:
            calls = [edge.stub.GenerateMany(), edge.stub.GenerateMany()]
            single = edge.stub.Generate(generate_request(request_id="same"))
            for call in calls:
                await call.write(start("same"))
            await arrivals(edge.driver, 3)
            await calls[0].write(start("same"))
            reader = Reader(calls[0])
            await reader.read_until(lambda: reader.errors)
            assert reader.errors[0][1].reason == "DUPLICATE_REQUEST_ID"
            for request in list(edge.driver.requests):
                edge.driver.tokens(request, [1], finish="stop")
            await reader.read_until(lambda: reader.finished)
            assert [r async for r in single][-1].finish.completion_tokens == 1
            for call in calls:
                call.cancel()

    async def test_live_requests_are_bounded(self):
        async with serve(limits={"max_streams_per_connection": 3}) as edge:
            call = edge.stub.GenerateMany()
            for number in range(5):
                await call.write(start(f"r{number}"))
            reader = Reader(call)
            await reader.read_until(lambda: len(reader.errors) == 2)
            assert [(name, info.reason) for name, info in reader.errors] == [
                ("r3", "GATEWAY_FULL"),
                ("r4", "GATEWAY_FULL"),
            ]
            assert len(edge.driver.live) == 3
            edge.driver.tokens(edge.driver.requests[0], [1], finish="stop")
            await reader.read_until(lambda: reader.finished)
            await call.write(start("r5"))
            await arrivals(edge.driver, 4)
            call.cancel()

    async def test_refusals_that_nobody_reads_stop_the_reading(self, monkeypatch):
        """A client that only writes can't make the gateway remember more than a constant number of errors."""
        monkeypatch.setattr(grpc_many, "MAX_UNSENT_REFUSALS", 8)
        driver, transport, taken = FakeDriver(), GatedTransport(), []
        driver.refusal = GatewayError(Reason.GATEWAY_FULL, "full")

        async def requests():
            for number in range(100):
                taken.append(number)
                yield start(f"r{number}")
                await asyncio.sleep(0)

        task = asyncio.create_task(open_stream(driver).serve(requests(), transport))
        await until(lambda: transport.sent)
        for _ in range(300):
            await asyncio.sleep(0)
        assert len(taken) <= 1 + 8 + 1  # in the unfinished write, remembered, and the one read last
        transport.gate.set()
        await task
        errors = [error.request_id for message in transport.sent for error in message.errors]
        assert errors == [f"r{number}" for number in range(100)]


class TestAbort:
    async def test_it_ends_one_request_with_a_report(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            await call.write(start("a"))
            await call.write(start("b"))
            await arrivals(edge.driver, 2)
            edge.driver.tokens(edge.driver.requests[0], [1])
            await call.write(abort("unknown"))
            await call.write(abort("a"))
            reader = Reader(call)
            await reader.read_until(lambda: reader.errors)
            assert [(name, info.reason) for name, info in reader.errors] == [("a", "ABORTED")]
            assert reader.tokens == {("a", 0): [1]}
            assert [r.arrived.request_id for r in edge.driver.live.values()] == ["b"]
            call.cancel()

    async def test_an_id_is_taken_until_its_end_has_been_written(self):
        """Otherwise the old request's error could come after the new one's tokens."""
        stream = Stream()
        driver, transport = stream.driver, stream.transport
        stream.put(start("a"))
        await until(lambda: driver.requests)
        driver.tokens(driver.requests[0], [1])
        await until(lambda: transport.sent)
        stream.put(abort("a"), start("a"), None)
        await until(lambda: stream.stream._refusals)
        transport.gate.set()
        await stream.task
        assert len(driver.requests) == 1
        reasons = [info_of(error.status).reason for message in transport.sent for error in message.errors]
        assert reasons == ["DUPLICATE_REQUEST_ID", "ABORTED"]

    async def test_an_id_is_free_again_once_its_end_was_reported(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            await call.write(start("a"))
            await arrivals(edge.driver, 1)
            await call.write(abort("a"))
            reader = Reader(call)
            await reader.read_until(lambda: reader.errors)
            await call.write(start("a"))
            await arrivals(edge.driver, 2)
            edge.driver.tokens(edge.driver.requests[1], [5], finish="stop")
            await call.done_writing()
            await reader.read_all()
            assert reader.tokens == {("a", 0): [5]}
            assert len(reader.errors) == 1

    async def test_abort_from_generate_does_not_reach_into_a_stream(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            await call.write(start("a"))
            await arrivals(edge.driver, 1)
            await edge.stub.Abort(gateway_pb2.AbortRequest(request_id="a"))
            assert len(edge.driver.live) == 1
            call.cancel()


class TestEnds:
    async def test_cancelling_the_call_ends_every_request(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            for number in range(10):
                await call.write(start(f"r{number}"))
            await arrivals(edge.driver, 10)
            call.cancel()
            await until(lambda: not edge.driver.live)
            assert {request.error.reason for request in edge.driver.requests} == {Reason.CANCELLED}

    async def test_the_streams_deadline_is_every_requests_deadline(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany(timeout=0.3)
            await call.write(start("a"))
            await arrivals(edge.driver, 1)
            assert edge.driver.requests[0].arrived.deadline_at is not None
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: not edge.driver.live)
            assert edge.driver.requests[0].error.reason is Reason.DEADLINE_EXCEEDED

    async def test_garbage_ends_the_stream_after_reporting_what_it_aborted(self):
        async with serve() as edge:
            call = edge.channel.stream_stream(
                METHOD, response_deserializer=gateway_pb2.GenerateManyResponse.FromString
            )()
            await call.write(start("a").SerializeToString())
            await arrivals(edge.driver, 1)
            await call.write(b"\x0a\xff\xff")
            reader = Reader(call)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reader.read_all()
            assert [(name, info.reason) for name, info in reader.errors] == [("a", "ABORTED")]
            assert (caught.value.code(), error_info(caught.value).reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_REQUEST",
            )

    async def test_a_pin_in_the_streams_metadata_that_is_no_number_refuses_the_stream(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany(metadata=(("x-data-parallel-rank", "x"),))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert error_info(caught.value).reason == "INVALID_RANK"

    async def test_an_idle_stream_does_not_hold_up_a_stop_and_a_busy_one_ends_first(self):
        async with serve() as edge:
            idle, busy = edge.stub.GenerateMany(), edge.stub.GenerateMany()
            await idle.write(abort("nothing"))
            await busy.write(start("a"))
            await arrivals(edge.driver, 1)
            stopping = asyncio.create_task(edge.servers.stop(60.0))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await idle.read()
            assert (caught.value.code(), error_info(caught.value).reason) == (
                grpc.StatusCode.UNAVAILABLE,
                "DRAINING",
            )
            await busy.write(start("late"))
            reader = Reader(busy)
            await reader.read_until(lambda: reader.errors)
            assert [(name, info.reason) for name, info in reader.errors] == [("late", "DRAINING")]
            assert not stopping.done()
            edge.driver.tokens(edge.driver.requests[0], [1], finish="stop")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reader.read_all()
            assert reader.finished == [("a", 0)]
            assert error_info(caught.value).reason == "DRAINING"
            await stopping


async def test_messages_are_cut_below_a_clients_default_limit(monkeypatch):
    monkeypatch.setattr(grpc_many, "FULL_MESSAGE_BYTES", 1000)
    async with serve() as edge:
        call = edge.stub.GenerateMany()
        for number in range(40):
            await call.write(start(f"r{number}"))
        await arrivals(edge.driver, 40)
        for request in edge.driver.requests:
            edge.driver.tokens(request, [20_000] * 100)
        edge.driver.end(edge.driver.requests[39], GatewayError(Reason.RANK_LOST, "lost"))
        reader = Reader(call)
        await reader.read_until(lambda: reader.errors)
        assert reader.messages >= 10
        # The error is the last thing, although its request's output did not fit the first messages.
        assert reader.tokens == {(f"r{number}", 0): [20_000] * 100 for number in range(40)}
        call.cancel()


class BrokenTransport(GatedTransport):
    """A call whose client has left."""

    async def write(self, message):
        raise ConnectionResetError("the client left")


async def forever(*instructions):
    for instruction in instructions:
        yield instruction
    await asyncio.Event().wait()


async def test_what_the_transport_raises_arrives_as_it_is_and_nothing_stays_live():
    driver = FakeDriver()
    task = asyncio.create_task(open_stream(driver).serve(forever(start("a"), start("b")), BrokenTransport()))
    await until(lambda: len(driver.requests) == 2)
    driver.tokens(driver.requests[0], [1])
    with pytest.raises(ConnectionResetError):
        await task
    assert all(request.is_ended for request in driver.requests)


async def test_a_reading_side_that_fails_ends_the_stream():
    async def broken():
        yield start("a")
        raise ConnectionResetError("the client left")

    driver = FakeDriver()
    with pytest.raises(ConnectionResetError):
        await open_stream(driver).serve(broken(), GatedTransport())
    assert all(request.is_ended for request in driver.requests)
