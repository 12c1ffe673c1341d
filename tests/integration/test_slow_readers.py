"""A client that stops reading is ended within bounds; its neighbours on the same rank don't notice."""

import asyncio

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from gateway.core.errors import Reason
from tests.support.calls import Generation, Many, engine_request, make_prompt, make_request, many_stream
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.raw_engine import RawEngine, unpack
from tests.support.raw_h2 import RESOURCE_EXHAUSTED, raw_client
from tests.support.stack import expected, gateway_config, running, running_gateway, stub_config, until

pytestmark = pytest.mark.usefixtures("transport")

LIMIT_BYTES = 4096
PACKED_TOKEN_BYTES = 4
STEP_TOKENS = 128
"""How often a backlog is measured."""
LONG = 15_000

QUICK = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=0.2, per_decode_row_us=0.0))
NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""The client's transport takes little more than its application reads."""


def limited(protocol):
    limits = {"max_stream_buffer_bytes": LIMIT_BYTES}
    return running_gateway(protocol, ranks=1, stub=QUICK, limits=limits)


def neighbours(stack):
    client = stack.client()
    return [Generation(client, make_request(make_prompt(4, number), 1_500)) for number in range(3)]


async def all_complete(generations):
    for generation in generations:
        (await generation.done()).assert_complete(generation.request)


def assert_bounded(stack, delivered):
    """What was generated and never delivered is the buffer's limit, and at most one measure beyond."""
    lost = sum(entry["completion_tokens"] for entry in slow(stack)) - delivered
    assert 0 < lost <= len(slow(stack)) * (LIMIT_BYTES / PACKED_TOKEN_BYTES + STEP_TOKENS)


def slow(stack):
    return [entry for entry in stack.logged("request_ended") if entry["outcome"] == Reason.SLOW_READER]


async def test_a_reader_that_stands_still_is_ended_and_told_why(protocol):
    async with limited(protocol) as stack:
        request = make_request(make_prompt(3), LONG)
        call = stack.client(*NO_READ_AHEAD).Generate(request)
        fine = neighbours(stack)
        await until(lambda: slow(stack), "the slow reader's end")
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 1)
        await all_complete(fine)
        error, responses = await stream_failure(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(error).reason == Reason.SLOW_READER
        assert not any(response.HasField("finish") for response in responses)
        received = [token for response in responses for token in response.token_ids]
        assert received == expected(request.prompt_token_ids, len(received))
        assert_bounded(stack, len(received))


async def test_two_hundred_streams_beside_a_slow_one_get_every_token(protocol):
    """The slow one opens its window by some bytes now and then, as a client does that reads a token a second."""
    async with limited(protocol) as stack, raw_client(stack.gateway.servers.grpc_address, window_bytes=64) as slow_one:
        assert await slow_one.settled()
        request = make_request(make_prompt(3), LONG, request_id="slow")
        slow_one.call(1, "/gateway.v1.GatewayService/Generate", request.SerializeToString())
        await until(lambda: stack.router.live_count == 1, "the slow request")
        clients = [stack.client() for _ in range(4)]
        fine = [Generation(clients[n % 4], make_request(make_prompt(4, n), 40)) for n in range(200)]
        while not slow(stack):
            slow_one.widen(1, 12)
            await asyncio.sleep(0.01)
        await all_complete(fine)
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 1)
        slow_one.widen(1, 1 << 20)
        trailers = await slow_one.trailers()
        assert RESOURCE_EXHAUSTED in trailers
        assert b"wait for the reader" in trailers


async def test_a_standard_client_that_stands_still_is_ended_too(protocol):
    async with limited(protocol) as stack:
        channel = stack.connect(*NO_READ_AHEAD)
        prompt = make_prompt(3)
        call = type(stack.engine_client())(channel).Generate(engine_request(protocol, prompt, LONG))
        await until(lambda: slow(stack), "the slow reader's end")
        error, responses = await stream_failure(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert {response.WhichOneof("response") for response in responses} == {"chunk"}
        received = [token for response in responses for token in response.chunk.token_ids]
        assert received == expected(prompt, len(received))
        assert_bounded(stack, len(received))


async def test_a_shared_stream_that_stands_still_loses_its_requests_and_can_go_on(protocol):
    async with limited(protocol) as stack:
        slow_stream = Many(stack.client(*NO_READ_AHEAD), paused=True)
        requests = [make_request(make_prompt(3, number), LONG) for number in range(3)]
        futures = [slow_stream.start(request) for request in requests]
        async with many_stream(stack.client()) as many:
            fine = [make_request(make_prompt(4, number), 1_500) for number in range(3)]
            for request, outcome in zip(
                fine, await asyncio.gather(*(many.start(request) for request in fine)), strict=True
            ):
                outcome.assert_complete(request)
        await until(lambda: len(slow(stack)) == 3, "the end of the stream's requests")
        slow_stream.go_on()
        outcomes = await asyncio.gather(*futures)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SLOW_READER)
            outcome.assert_prefix(request)
        assert_bounded(stack, sum(len(outcome.text) for outcome in outcomes))
        following = make_request(max_tokens=5)
        (await slow_stream.start(following)).assert_complete(following)
        await slow_stream.end()


async def test_a_large_message_that_is_read_at_once_leaves_no_write_under_way():
    """Else its reader is ended for standing still as soon as nothing comes for a while."""
    async with running(gateway_config("vllm", 1)) as stack:
        engine = RawEngine(stack.gateway.link.handshake_addresses[0], 0, "vllm")
        await engine.join()
        await stack.all_ready()
        call = stack.client().Generate(make_request(max_tokens=4_000))
        wire_id = unpack((await engine.receive())[1])[0]
        engine.push_rows([(wire_id, [300_000_000] * 3_600, "")])
        response = await call.read()
        assert response.ByteSize() > 16_384, "more than a frame"
        (stream,) = stack.gateway.servers.gate.watch._seen
        await until(lambda: not stream.writes % 2, "the end of the write")
        call.cancel()
        await until(lambda: not stack.router.live_count, "the end of the request")
        engine.close()


async def test_a_reader_that_lags_but_reads_gets_everything_in_fewer_messages(protocol):
    async with running_gateway(protocol, ranks=1, stub=QUICK) as stack:
        request = make_request(make_prompt(3), 3_000)
        fine = neighbours(stack)
        call = stack.client(*NO_READ_AHEAD).Generate(request)
        await all_complete(fine)
        await until(lambda: not stack.router.live_count, "the rank to be done")
        received, messages = [], 0
        async for response in call:
            messages += 1
            received += response.token_ids
        assert received == expected(request.prompt_token_ids, 3_000)
        assert messages < 3_000
