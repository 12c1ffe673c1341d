"""GatewayService.Generate and Abort over real grpcio, with a scripted driver behind them."""

import asyncio
import random

import grpc
import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import error_info, generate_request, serve, stream_failure, until

METHOD = "/gateway.v1.GatewayService/Generate"


def tokens_of(responses):
    return [token for response in responses for token in response.token_ids]


async def arrival(driver, count=1):
    """Wait until the driver has taken `count` requests; returns the last."""
    await until(lambda: len(driver.requests) >= count)
    return driver.requests[count - 1]


async def ended(request):
    await until(lambda: request.is_ended)
    return request.error


async def test_tokens_finish_and_metadata():
    async with serve(count_up) as edge:
        call = edge.stub.Generate(generate_request(request_id="mine", data_parallel_rank=2))
        responses = [response async for response in call]
        assert tokens_of(responses) == [3, 4, 5, 6]
        assert {(r.request_id, r.index) for r in responses} == {("mine", 0)}
        assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [True]
        finish = responses[-1].finish
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens, finish.rank, finish.attempts) == (
            gateway_pb2.FINISH_REASON_LENGTH,
            3,
            4,
            2,
            1,
        )
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-request-id"] == "mine"
        assert (trailing["x-rankgate-rank"], trailing["x-rankgate-decision-id"]) == ("2", "1")
        assert float(trailing["x-rankgate-queue-ms"]) >= 0


async def test_request_ids_come_from_metadata_or_are_made():
    async with serve(count_up) as edge:
        call = edge.stub.Generate(generate_request(), metadata=(("x-request-id", "m-1"), ("x-data-parallel-rank", "3")))
        assert {r.request_id async for r in call} == {"m-1"}
        assert dict(await call.initial_metadata())["x-request-id"] == "m-1"
        assert edge.driver.arrivals[0].pinned_rank == 3
        call = edge.stub.Generate(generate_request())
        (made,) = {r.request_id async for r in call}
        assert "x-request-id" not in dict(await call.initial_metadata())
        assert dict(await call.trailing_metadata())["x-request-id"] == made


CALLER = (("x-tenant-id", "team-a"), ("x-cache-salt", "pepper"), ("x-queue-timeout-ms", "250"))


async def test_what_metadata_says_of_the_caller_reaches_the_core():
    async with serve(count_up) as edge:
        async for _ in edge.stub.Generate(generate_request(session_id="s", no_cache=True), metadata=CALLER):
            pass
        (arrived,) = edge.driver.arrivals
        assert (arrived.tenant, arrived.cache_salt, arrived.queue_timeout_s) == ("team-a", "pepper", 0.25)
        assert (arrived.session_id, arrived.use_cache) == ("s", False)


async def test_a_tenant_that_no_configuration_could_name_is_refused():
    async with serve() as edge:
        error, _ = await stream_failure(edge.stub.Generate(generate_request(), metadata=(("x-tenant-id", "a b"),)))
        info = error_info(error)
        assert (error.code(), info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert info.metadata["field"] == "x-tenant-id"
        assert edge.driver.arrivals == []


async def test_an_answer_from_the_cache_has_no_rank_and_says_where_it_came_from():
    async with serve(lambda driver, request: driver.answer(request, [8, 9])) as edge:
        call = edge.stub.Generate(generate_request())
        responses = [response async for response in call]
        assert tokens_of(responses) == [8, 9]
        finish = responses[-1].finish
        assert not finish.HasField("rank")
        assert finish.HasField("attempts")
        assert (finish.attempts, finish.completion_tokens) == (0, 2)
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-rankgate-cache"] == "hit"
        assert not {"x-rankgate-rank", "x-rankgate-decision-id"} & set(trailing)


async def test_n_sequences_are_told_apart():
    async with serve(count_up) as edge:
        call = edge.stub.Generate(generate_request(sampling={"max_tokens": 3, "n": 3}))
        responses = [response async for response in call]
        for index in range(3):
            assert tokens_of(r for r in responses if r.index == index) == [3, 4, 5]
        assert sum(r.HasField("finish") for r in responses) == 3
        assert dict(await call.trailing_metadata())["x-rankgate-rank"] == "0,1,2"


async def test_a_huge_n_costs_nothing_before_it_is_checked():
    async with serve() as edge:
        edge.driver.refusal = GatewayError(Reason.INVALID_REQUEST, "n: must be in 1..64", field="n")
        error, _ = await stream_failure(edge.stub.Generate(generate_request(sampling={"n": 2**32 - 1})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert edge.driver.arrivals[0].n == 2**32 - 1


class TestErrors:
    async def test_a_refusal_has_its_status_details_and_request_id(self):
        async with serve() as edge:
            edge.driver.refusal = GatewayError(Reason.GATEWAY_FULL, "full", retryable=True, retry_after_s=0.5, limit=9)
            error, responses = await stream_failure(edge.stub.Generate(generate_request(request_id="a")))
            assert (error.code(), responses) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [])
            info = error_info(error)
            assert (info.reason, info.metadata["limit"], info.metadata["retryable"]) == ("GATEWAY_FULL", "9", "true")
            assert dict(error.trailing_metadata())["x-request-id"] == "a"

    async def test_a_pin_that_is_no_number_names_the_valid_range(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request(), metadata=(("x-data-parallel-rank", "x"),))
            error, _ = await stream_failure(call)
            info = error_info(error)
            assert (error.code(), info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_RANK")
            assert (info.metadata["valid_min"], info.metadata["valid_max"]) == ("0", "3")
            assert edge.driver.arrivals == []

    async def test_an_error_in_the_middle_follows_an_exact_prefix(self):
        def lose(driver, request):
            driver.tokens(request, [1, 2, 3])
            driver.end(request, GatewayError(Reason.RANK_LOST, "rank 0 was lost", retryable=True, rank=0))

        async with serve(lose) as edge:
            error, responses = await stream_failure(edge.stub.Generate(generate_request()))
            assert tokens_of(responses) == [1, 2, 3]
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "RANK_LOST")
            assert dict(error.trailing_metadata())["x-rankgate-rank"] == "0"

    async def test_garbage_is_invalid_not_unknown(self):
        async with serve() as edge:
            call = edge.channel.unary_stream(METHOD)(b"\x0a\xff\xff")
            error, _ = await stream_failure(call)
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            assert "gateway.v1.GenerateRequest" in error.details()

    async def test_a_defect_is_internal_logged_and_harms_no_other_call(self, capsys):
        async with serve() as edge:
            edge.driver.refusal = ZeroDivisionError("secret detail")
            error, _ = await stream_failure(edge.stub.Generate(generate_request()))
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert "secret" not in error.details()
            assert "ZeroDivisionError" in capsys.readouterr().out
            edge.driver.refusal, edge.driver.script = None, count_up
            assert tokens_of([r async for r in edge.stub.Generate(generate_request())]) == [3, 4, 5, 6]


class TestEarlyEnds:
    async def test_a_cancelled_call_ends_its_request(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request())
            request = await arrival(edge.driver)
            call.cancel()
            assert (await ended(request)).reason is Reason.CANCELLED

    async def test_a_closed_connection_ends_its_requests(self):
        async with serve() as edge:
            async with grpc.aio.insecure_channel(edge.servers.grpc_address) as channel:
                call = channel.unary_stream(METHOD, request_serializer=gateway_pb2.GenerateRequest.SerializeToString)(
                    generate_request()
                )
                request = await arrival(edge.driver)
            assert (await ended(request)).reason is Reason.CANCELLED
            del call

    async def test_a_deadline_ends_its_request_and_says_so(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request(), timeout=0.2)
            request = await arrival(edge.driver)
            assert request.arrived.deadline_at == pytest.approx(edge.driver.clock() + 0.2, abs=0.2)
            error, _ = await stream_failure(call)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await ended(request)).reason is Reason.DEADLINE_EXCEEDED

    async def test_a_deadline_of_the_gateway_comes_as_a_status_with_details(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request())
            request = await arrival(edge.driver)
            edge.driver.end(request, GatewayError(Reason.DEADLINE_EXCEEDED, "too late"))
            error, _ = await stream_failure(call)
            assert (error.code(), error_info(error).reason) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_EXCEEDED",
            )

    async def test_abort_from_another_connection(self):
        async with serve() as edge, grpc.aio.insecure_channel(edge.servers.grpc_address) as channel:
            call = edge.stub.Generate(generate_request(request_id="a"))
            await arrival(edge.driver)
            abort = channel.unary_unary(
                "/gateway.v1.GatewayService/Abort",
                request_serializer=gateway_pb2.AbortRequest.SerializeToString,
                response_deserializer=gateway_pb2.AbortResponse.FromString,
            )
            await abort(gateway_pb2.AbortRequest(request_id="a"))
            error, _ = await stream_failure(call)
            assert (error.code(), error_info(error).reason) == (grpc.StatusCode.ABORTED, "ABORTED")
            # Ended by now, and never known: both are fine.
            await abort(gateway_pb2.AbortRequest(request_id="a"))
            await abort(gateway_pb2.AbortRequest(request_id="never"))

    async def test_a_live_duplicate_is_refused_and_the_first_goes_on(self):
        async with serve() as edge:
            first = edge.stub.Generate(generate_request(request_id="a"))
            request = await arrival(edge.driver)
            error, _ = await stream_failure(edge.stub.Generate(generate_request(request_id="a")))
            assert (error.code(), error_info(error).reason) == (
                grpc.StatusCode.ALREADY_EXISTS,
                "DUPLICATE_REQUEST_ID",
            )
            edge.driver.tokens(request, [7], finish="stop")
            assert tokens_of([r async for r in first]) == [7]

    async def test_random_cancels_leave_nothing_live_and_no_task(self):
        rng = random.Random(11)
        before = len(asyncio.all_tasks())

        async def one(edge):
            call = edge.stub.Generate(generate_request(sampling={"max_tokens": 40, "n": rng.choice([1, 2])}))
            for _ in range(rng.randrange(6)):
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                elif await call.read() is grpc.aio.EOF:
                    return
            call.cancel()

        async with serve(count_up) as edge:
            for _ in range(20):
                await asyncio.gather(*(one(edge) for _ in range(15)))
            await until(lambda: not edge.driver.live)
            assert not edge.driver.router.by_client
        # Calls that were cancelled right away may still be closing on the client's side.
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_reader_that_stands_still_is_ended_while_others_flow():
    """The slow stream stops at the transport's window; its tokens wait in the outbox until the bound ends it."""

    def flood(driver, request):
        if request.arrived.request_id != "slow":
            return count_up(driver, request)

        def step(number):
            driver.tokens(request, range(number, number + 1000))
            if not request.is_ended:
                asyncio.get_running_loop().call_soon(step, number + 1000)

        step(0)
        return None

    async with serve(flood) as edge:
        edge.driver.max_backlog_bytes = 400_000
        slow = edge.stub.Generate(generate_request(request_id="slow"))
        assert (await ended(await arrival(edge.driver))).reason is Reason.SLOW_READER
        assert tokens_of([r async for r in edge.stub.Generate(generate_request(request_id="fast"))]) == [3, 4, 5, 6]
        error, responses = await stream_failure(slow)
        received = tokens_of(responses)
        assert received == list(range(len(received)))
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
