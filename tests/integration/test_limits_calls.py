"""Bounds on calls, whatever they ask for: how many, how large, how long they stand still."""

import asyncio

import grpc
import pytest

from engine_stub.faults import Faults
from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from tests.support.calls import Generation, Many, engine_request, generate, make_prompt, make_request, many_stream
from tests.support.deployment import health
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.raw_h2 import RESOURCE_EXHAUSTED, raw_client
from tests.support.stack import running_gateway, stub_config, until

NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
KIB = 1024


def hits(stack, limit):
    return stack.gateway.servers.gate.hits[limit]


def rejections(stack):
    """How many refusals were timed."""
    return sum(stack.gateway.servers.gate.rejection_durations.counts)


def silent():
    return stub_config(faults=Faults(silent=True))


async def failure_of(many):
    """The error that a shared stream ends with. grpcio's client goes on to wait for instructions until told."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await many.task
    many.half_close()
    return caught.value


async def wake(stack, *generations):
    for rank in stack.ranks:
        rank.set_faults(silent=False)
    for generation in generations:
        (await generation.done()).assert_complete(generation.request)


async def test_calls_beyond_the_limit_are_refused_with_a_hint_and_probes_are_not(protocol):
    async with running_gateway(protocol, stub=silent(), limits={"max_streams": 3}) as stack:
        gate = stack.gateway.servers.gate
        live = [Generation(stack.client(), make_request(max_tokens=3)) for _ in range(2)]
        many = Many(stack.client())
        await until(lambda: gate.streams == 3, "three calls")
        assert gate.connections == 3
        outcome = await generate(stack.client(), make_request())
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TOO_MANY_STREAMS)
        assert (outcome.retry_after_s, outcome.facts["limit"]) == (1.0, "3")
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol)))
        assert error_info(error).reason == Reason.TOO_MANY_STREAMS
        address = stack.gateway.servers.grpc_address
        assert await asyncio.to_thread(health, address, "readiness") == "SERVING"
        assert (hits(stack, "max_streams"), rejections(stack)) == (2, 2)
        await many.end()
        await wake(stack, *live)
        following = make_request()
        (await generate(stack.client(), following)).assert_complete(following)
        await until(lambda: (gate.streams, gate.connections) == (0, 0), "all calls to be gone")


async def test_metadata_beyond_the_limit_is_refused_by_name(protocol):
    async with running_gateway(protocol, limits={"max_metadata_bytes": 4 * KIB}) as stack:
        client = stack.client(("grpc.max_metadata_size", 64 * KIB))
        request = make_request()
        (await generate(client, request, metadata=(("x-a", "b" * 3 * KIB),))).assert_complete(request)
        for metadata in ((("x-a", "b" * 5 * KIB),), tuple((f"x-{n}", "b" * 20) for n in range(100))):
            outcome = await generate(client, make_request(), metadata=metadata)
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.METADATA_TOO_LARGE)
            assert int(outcome.facts["size_bytes"]) > int(outcome.facts["limit_bytes"]) == 4 * KIB
        # The library answers what is far beyond, in its own words.
        outcome = await generate(client, make_request(), metadata=(("x-a", "b" * 9 * KIB),))
        assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (hits(stack, "max_metadata_bytes"), rejections(stack)) == (2, 2)
        (await generate(client, following := make_request())).assert_complete(following)


def padded(size, make=make_request):
    """A request whose message has `size` bytes, nearly all of them in a field that nobody needs."""
    request = make(request_id="r")
    request.session_id = "x" * (size - request.ByteSize() - 4)
    assert request.ByteSize() in range(size - 3, size + 1)
    return request


async def test_a_message_beyond_the_limit_is_not_decoded(protocol):
    async with running_gateway(protocol, limits={"max_request_bytes": 10 * KIB}) as stack:
        client = stack.client()
        outcome = await generate(client, padded(12 * KIB))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.MESSAGE_TOO_LARGE)
        assert int(outcome.facts["limit_bytes"]) == 10 * KIB
        assert (await generate(client, padded(10 * KIB))).facts["field"] == "session_id", "was decoded"
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol, [1] * 12 * KIB)))
        assert error_info(error).reason == Reason.MESSAGE_TOO_LARGE
        assert hits(stack, "max_request_bytes") == 2
        outcome = await generate(client, padded(40 * KIB))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None), "the library's"
        assert not any(rank.records.adds for rank in stack.ranks)


async def test_a_message_beyond_the_limit_ends_a_shared_stream(protocol):
    async with running_gateway(protocol, stub=silent(), limits={"max_request_bytes": 10 * KIB}) as stack:
        many = Many(stack.client())
        many.start(make_request())
        await until(lambda: stack.router.live_count == 1, "the first request")
        many.start(padded(12 * KIB))
        error = await failure_of(many)
        assert error_info(error).reason == Reason.MESSAGE_TOO_LARGE
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_prompt_is_refused_before_it_is_copied(protocol):
    async with running_gateway(protocol) as stack:
        prompt = [1] * 200_000  # a byte each: below every limit on messages
        outcome = await generate(stack.client(), make_request(prompt))
        assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.PROMPT_TOO_LONG)
        assert outcome.facts["prompt_tokens"] == "200000"
        error, _ = await stream_failure(stack.engine_client().Generate(engine_request(protocol, prompt)))
        assert error_info(error).reason == Reason.PROMPT_TOO_LONG


async def test_requests_on_a_shared_stream_are_bounded(protocol):
    limits = {"max_streams_per_connection": 2}
    async with running_gateway(protocol, stub=silent(), limits=limits) as stack, many_stream(stack.client()) as many:
        live = [(request, many.start(request)) for request in (make_request(max_tokens=3) for _ in range(2))]
        outcome = await many.start(make_request())
        assert (outcome.reason, outcome.facts["limit"]) == (Reason.GATEWAY_FULL, "2")
        assert (hits(stack, "max_streams_per_connection"), rejections(stack)) == (1, 1)
        await wake(stack)
        for request, future in live:
            (await future).assert_complete(request)


async def test_a_shared_stream_without_requests_ends_and_says_why(protocol):
    async with running_gateway(protocol, limits={"idle_stream_timeout_s": 0.2}) as stack:
        fresh, used = Many(stack.client()), Many(stack.client())
        request = make_request()
        (await used.start(request)).assert_complete(request)
        for many in (fresh, used):
            error = await failure_of(many)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            info = error_info(error)
            assert (info.reason, info.metadata["retryable"]) == (Reason.STREAM_IDLE, "true")
        assert hits(stack, "idle_stream_timeout_s") == 2
        assert not len(stack.gateway.servers.gate.watch)


async def test_a_shared_stream_with_a_request_is_not_idle(protocol):
    async with running_gateway(protocol, stub=silent(), limits={"idle_stream_timeout_s": 0.05}) as stack:
        many, other = Many(stack.client()), Many(stack.client())
        future = many.start(request := make_request(max_tokens=3))
        await until(lambda: stack.router.live_count == 1, "the request")
        await failure_of(other)  # so long has it been
        second = many.start(another := make_request(max_tokens=3))
        await until(lambda: stack.router.live_count == 2, "a second request on the same stream")
        await wake(stack)
        (await future).assert_complete(request)
        (await second).assert_complete(another)
        await failure_of(many)


# A few hundred tokens are more than such a client takes, and far less than the buffer's limit.
STALLS = {"reader_stall_timeout_s": 0.2}


def stalled(stack):
    return [entry for entry in stack.logged("request_ended") if entry["outcome"] == Reason.SLOW_READER]


def long_request(number=0):
    return make_request(make_prompt(3, number), 15_000)


async def test_a_client_that_leaves_a_message_unread_is_ended_although_little_is_buffered(protocol):
    async with running_gateway(protocol, ranks=1, limits=STALLS) as stack:
        call = stack.client(*NO_READ_AHEAD).Generate(long_request())
        await until(lambda: hits(stack, "reader_stall_timeout_s"), "the stall to be noticed")
        neighbour = make_request()
        (await generate(stack.client(), neighbour)).assert_complete(neighbour)
        error, responses = await stream_failure(call)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SLOW_READER)
        assert not any(response.HasField("finish") for response in responses)
        assert (hits(stack, "reader_stall_timeout_s"), rejections(stack)) == (1, 0)


async def test_output_of_what_has_ended_well_is_not_kept_for_who_does_not_read(protocol):
    async with running_gateway(protocol, ranks=1, limits=STALLS) as stack:
        async with raw_client(stack.gateway.servers.grpc_address, window_bytes=64) as client:
            assert await client.settled()
            message = make_request(make_prompt(3), 200).SerializeToString()
            client.call(1, "/gateway.v1.GatewayService/Generate", message)
            await until(lambda: hits(stack, "reader_stall_timeout_s"), "the stall to be noticed")
            assert [entry["outcome"] for entry in stack.logged("request_ended")] == ["ok"]
            client.widen(1, 1 << 20)
            trailers = await client.trailers()
        assert RESOURCE_EXHAUSTED in trailers
        assert b"the reader stood still" in trailers


async def test_what_a_rank_still_works_on_is_aborted_there(protocol):
    slow = stub_config(time_scale=1.0)
    limits = STALLS | {"max_stream_buffer_bytes": 2**30}
    async with running_gateway(protocol, ranks=1, stub=slow, limits=limits) as stack:
        call = stack.client(*NO_READ_AHEAD).Generate(make_request(make_prompt(3), 15_000, request_id="r" * 250))
        await until(lambda: stalled(stack), "the end of the stalled request")
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 1)
        error, _ = await stream_failure(call)
        assert error_info(error).reason == Reason.SLOW_READER


async def test_a_shared_stream_that_is_left_unread_ends_with_all_of_its_requests(protocol):
    limits = STALLS | {"max_stream_buffer_bytes": 2**30}
    async with running_gateway(protocol, ranks=1, stub=stub_config(time_scale=1.0), limits=limits) as stack:
        many = Many(stack.client(*NO_READ_AHEAD), paused=True)
        futures = [many.start(make_request(make_prompt(3, n), 15_000, request_id=f"{n}" * 250)) for n in range(3)]
        await until(lambda: len(stalled(stack)) == 3, "the end of the stream's requests")
        many.go_on()
        outcomes = await asyncio.gather(*futures)
        assert [outcome.reason for outcome in outcomes] == [Reason.SLOW_READER] * 3
        assert error_info(await failure_of(many)).reason == Reason.SLOW_READER
        assert hits(stack, "reader_stall_timeout_s") == 1


async def test_a_watcher_and_the_admin_listener_are_no_refusals(protocol):
    async with running_gateway(protocol) as stack:
        watch = stack.client().WatchRanks(gateway_pb2.WatchRanksRequest())
        assert (await watch.read()).ranks
        watch.cancel()
        await until(lambda: not stack.gateway.servers.gate.streams, "the watcher to be gone")
        assert rejections(stack) == 0
