"""Generate and Abort of both standard engine services, over a real channel and the real core."""

import asyncio

import grpc
import pytest

from gateway.core.events import RankLost
from gateway.edges.grpc_engine import engine_service
from gateway.types import TokenLogprob
from tests.support.engine_edge import SERVICE_NAMES, serve_engine
from tests.support.grpc_edge import error_info


@pytest.fixture(params=["vllm", "tokenspeed"])
def family(request):
    return request.param


def kinds(responses):
    return [response.WhichOneof("response") for response in responses]


async def collect(call, responses=None):
    """The rest of the responses, also in `responses`; raises when the call failed."""
    responses = [] if responses is None else responses
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def fails(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


async def test_chunks_are_new_tokens_and_the_complete_has_them_all(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11], cached=2)
        first = await call.read()
        edge.ranks.step(wire_id, [12, 13])
        second = await call.read()
        edge.ranks.step(wire_id, [14], "stop")
        third, last = await call.read(), await call.read()
        assert await call.read() is grpc.aio.EOF
        chunks = [response.chunk for response in (first, second, third)]
        assert [list(chunk.token_ids) for chunk in chunks] == [[11], [12, 13], [14]]
        assert [chunk.completion_tokens for chunk in chunks] == [1, 3, 4]
        assert {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks} == {(3, 2)}
        complete = last.complete
        assert list(complete.output_ids) == [11, 12, 13, 14]
        assert complete.finish_reason == "stop"
        assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 4, 2)
        if family == "tokenspeed":
            assert {response.request_id for response in (first, second, third, last)} == {"client-1"}


async def test_a_finish_without_tokens_sends_no_empty_chunk(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11])
        edge.ranks.step(wire_id, [], "stop")
        responses = await collect(call)
        assert kinds(responses) == ["chunk", "complete"]
        assert list(responses[-1].complete.output_ids) == [11]
        assert responses[-1].complete.finish_reason == "stop"


async def test_without_stream_there_is_one_complete_only(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(stream=False))
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11, 12], logprobs=None)
        await asyncio.sleep(0)
        edge.ranks.step(wire_id, [13], "stop")
        (response,) = await collect(call)
        assert list(response.complete.output_ids) == [11, 12, 13]
        assert response.complete.completion_tokens == 3


async def test_each_of_n_sequences_completes_once_and_at_its_own_finish(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(sampling={"n": 2}))
        zero, one = await edge.ranks.wait_sent(2)
        assert {rank for rank, _ in edge.ranks.sent} == {0, 1}
        edge.ranks.step(one, [21], "stop")
        chunk, complete = await call.read(), await call.read()
        assert (chunk.chunk.index, list(chunk.chunk.token_ids)) == (1, [21])
        assert (complete.complete.index, list(complete.complete.output_ids)) == (1, [21])
        edge.ranks.step(zero, [11])
        edge.ranks.step(zero, [12], "stop")
        rest = await collect(call)
        assert kinds(rest)[-1] == "complete"
        assert [token for response in rest[:-1] for token in response.chunk.token_ids] == [11, 12]
        assert (rest[-1].complete.index, list(rest[-1].complete.output_ids)) == (0, [11, 12])
        assert rest[-1].complete.finish_reason == "stop"


async def test_logprobs_arrive_with_chunk_and_complete(family):
    sampling = {"logprobs": 2} if family == "vllm" else {}
    fields = {} if family == "vllm" else {"return_logprob": True}
    top = ((11, -0.5), (12, -1.5)) if family == "vllm" else ()
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(sampling=sampling, **fields))
        (wire_id,) = await edge.ranks.wait_sent()
        assert edge.ranks.sent[0][1].sampling.logprobs == (2 if family == "vllm" else 0)
        edge.ranks.step(wire_id, [11], logprobs=[TokenLogprob(-0.5, top)])
        first = (await call.read()).chunk.output_logprobs
        edge.ranks.step(wire_id, [13], "stop", logprobs=[TokenLogprob(-0.25, top)])
        responses = await collect(call)
        assert list(first.token_logprobs) == [-0.5]
        assert list(first.token_ids) == [11]
        everything = responses[-1].complete.output_logprobs
        assert list(everything.token_logprobs) == [-0.5, -0.25]
        assert list(everything.token_ids) == [11, 13]
        tops = [(list(entry.token_ids), list(entry.values)) for entry in everything.top_logprobs]
        assert tops == ([([11, 12], [-0.5, -1.5])] * 2 if top else [])


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_abort_ends_the_stream_with_what_there_is(family, is_stream):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(stream=is_stream, sampling={"n": 2}))
        zero, one = await edge.ranks.wait_sent(2)
        edge.ranks.step(zero, [11], "stop")
        edge.ranks.step(one, [21])
        edge.ranks.step(one, [22])
        await edge.stub.Abort(edge.abort_request("client-1"))
        responses = await collect(call)
        assert await call.code() is grpc.StatusCode.OK
        completes = {r.complete.index: r.complete for r in responses if r.WhichOneof("response") == "complete"}
        assert len(completes) == kinds(responses).count("complete") == 2
        assert (completes[0].finish_reason, list(completes[0].output_ids)) == ("stop", [11])
        assert (completes[1].finish_reason, list(completes[1].output_ids)) == ("abort", [21, 22])
        assert completes[1].completion_tokens == 2
        assert kinds(responses).count("chunk") == (2 if is_stream else 0)
        assert edge.ranks.aborted == [(edge.ranks.rank_of(one), one)]


async def test_an_abort_before_the_first_token_completes_empty(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        await edge.ranks.wait_sent()
        await edge.stub.Abort(edge.abort_request("client-1"))
        (response,) = await collect(call)
        assert response.complete.finish_reason == "abort"
        assert not response.complete.output_ids
        assert response.complete.prompt_tokens == 3


async def test_aborting_an_unknown_id_succeeds(family):
    async with serve_engine(family) as edge:
        answer = await edge.stub.Abort(edge.abort_request("nobody"))
        if family == "tokenspeed":
            assert answer.success
            assert "no live request" in answer.message


async def test_a_client_that_leaves_is_aborted_at_its_rank(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11])
        await call.read()
        call.cancel()
        assert await edge.ranks.wait_aborted() == [(edge.ranks.rank_of(wire_id), wire_id)]
        assert edge.router.counters.ended["CANCELLED"] == 1


async def test_a_deadline_ends_the_call_and_the_attempt(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(), timeout=0.2)
        (wire_id,) = await edge.ranks.wait_sent()
        error = await fails(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await edge.ranks.wait_aborted() == [(edge.ranks.rank_of(wire_id), wire_id)]
        assert edge.router.counters.ended["DEADLINE_EXCEEDED"] == 1


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_pin_is_honoured(family, rank):
    async with serve_engine(family, ranks=3) as edge:
        calls = []
        for number in range(3):
            request = edge.request(request_id=f"c{number}", data_parallel_rank=rank)
            calls.append(edge.stub.Generate(request))
        wire_ids = await edge.ranks.wait_sent(3)
        assert [sent for sent, _ in edge.ranks.sent] == [rank] * 3
        for wire_id in wire_ids:
            edge.ranks.step(wire_id, [9], "stop")
        for call in calls:
            await collect(call)
            assert dict(await call.trailing_metadata())["x-rankgate-rank"] == str(rank)


@pytest.mark.parametrize("rank", [-1, 2, 2**31 - 1])
async def test_a_pin_out_of_range_is_refused_with_the_range(family, rank):
    async with serve_engine(family, ranks=2) as edge:
        error = await fails(edge.stub.Generate(edge.request(data_parallel_rank=rank)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = error_info(error)
        assert info.reason == "INVALID_RANK"
        assert (info.metadata["valid_min"], info.metadata["valid_max"]) == ("0", "1")
        assert not edge.ranks.sent


async def test_a_pin_in_metadata_must_agree_with_the_field(family):
    metadata = (("x-data-parallel-rank", "1"),)
    async with serve_engine(family, ranks=2) as edge:
        error = await fails(edge.stub.Generate(edge.request(data_parallel_rank=0), metadata=metadata))
        assert error_info(error).reason == "INVALID_RANK"
        call = edge.stub.Generate(edge.request(), metadata=metadata)
        (wire_id,) = await edge.ranks.wait_sent()
        assert edge.ranks.sent[0][0] == 1
        edge.ranks.step(wire_id, [9], "stop")
        await collect(call)


async def test_an_unsupported_field_is_refused_and_no_rank_sees_it(family):
    async with serve_engine(family) as edge:
        error = await fails(edge.stub.Generate(edge.request(sampling={"stop": ["\n"]})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        info = error_info(error)
        assert info.reason == "UNSUPPORTED_FIELD"
        assert info.metadata["field"] == "sampling_params.stop"
        assert not edge.ranks.sent


async def test_a_huge_n_is_refused_without_preparing_for_it(family):
    async with serve_engine(family) as edge:
        error = await fails(edge.stub.Generate(edge.request(sampling={"n": 2**32 - 1})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_info(error).metadata["field"] == "n"


async def test_a_live_duplicate_is_refused_and_the_first_goes_on(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        error = await fails(edge.stub.Generate(edge.request()))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        edge.ranks.step(wire_id, [9], "stop")
        assert kinds(await collect(call)) == ["chunk", "complete"]


async def test_a_lost_rank_ends_the_call_with_an_error_and_never_with_a_complete(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11])
        assert list((await call.read()).chunk.token_ids) == [11]
        edge.driver.emit(RankLost(edge.ranks.rank_of(wire_id), 1, "test"))
        error = await fails(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        info = error_info(error)
        assert (info.reason, info.metadata["retryable"]) == ("RANK_LOST", "true")


async def test_an_error_comes_after_the_tokens_that_came_before_it(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request())
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11])
        edge.ranks.step(wire_id, [12], "error")
        responses = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call, responses)
        assert [token for response in responses for token in response.chunk.token_ids] == [11, 12]
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_ids_are_echoed_or_made(family):
    async with serve_engine(family) as edge:
        for number, given in enumerate(("mine", ""), 1):
            call = edge.stub.Generate(edge.request(request_id=given))
            wire_id = (await edge.ranks.wait_sent(number))[-1]
            edge.ranks.step(wire_id, [9], "stop")
            responses = await collect(call)
            echoed = dict(await call.trailing_metadata())["x-request-id"]
            assert echoed == given if given else echoed.startswith("rg-")
            if family == "tokenspeed":
                assert {response.request_id for response in responses} == {echoed}


async def test_garbage_is_refused(family):
    async with serve_engine(family) as edge:
        call = edge.channel.unary_stream(f"/{SERVICE_NAMES[family]}/Generate")(b"\xff\xff\xff")
        error = await fails(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokens_of_a_slow_reader_arrive_in_fewer_chunks(family):
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(max_tokens=400))
        (wire_id,) = await edge.ranks.wait_sent()
        for token in range(299):
            edge.ranks.step(wire_id, [token])
        edge.ranks.step(wire_id, [299], "stop")
        responses = await collect(call)
        tokens = [token for response in responses[:-1] for token in response.chunk.token_ids]
        assert tokens == list(range(300))
        assert list(responses[-1].complete.output_ids) == tokens
        assert len(responses) < 20


async def test_what_metadata_says_of_the_caller_reaches_the_core(family):
    metadata = (("x-tenant-id", "team-a"), ("x-cache-salt", "pepper"), ("x-queue-timeout-ms", "250"))
    async with serve_engine(family) as edge:
        call = edge.stub.Generate(edge.request(), metadata=metadata)
        (wire_id,) = await edge.ranks.wait_sent()
        arrived = edge.router.find("", "client-1").arrived
        assert (arrived.tenant, arrived.cache_salt, arrived.queue_timeout_s) == ("team-a", "pepper", 0.25)
        assert arrived.use_cache
        edge.ranks.step(wire_id, [9], "stop")
        await collect(call)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_stored_answer_is_the_same_without_a_rank(family, is_stream):
    async with serve_engine(family, response_cache={}) as edge:
        request = edge.request(stream=is_stream, sampling={"temperature": 0.0})
        call = edge.stub.Generate(request)
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11], cached=2)
        edge.ranks.step(wire_id, [12], "stop")
        first = await collect(call)
        call = edge.stub.Generate(request)
        second = await collect(call)
        assert second[-1] == first[-1]
        assert kinds(second) == (["chunk", "complete"] if is_stream else ["complete"])
        trailing = dict(await call.trailing_metadata())
        assert trailing["x-rankgate-cache"] == "hit"
        assert "x-rankgate-rank" not in trailing
        assert len(edge.ranks.sent) == 1


class SlowContext:
    """A transport that is busy while the engine goes on: `meanwhile` runs during the first write."""

    def __init__(self, meanwhile):
        self.messages = []
        self._meanwhile = meanwhile

    def invocation_metadata(self):
        return ()

    def time_remaining(self):
        return None

    async def send_initial_metadata(self, initial_metadata):
        pass

    def accepted(self, stream=None):
        pass

    def set_trailing_metadata(self, trailing_metadata):
        self.trailing = dict(trailing_metadata)

    async def write(self, message):
        self.messages.append(message)
        if len(self.messages) == 1:
            self._meanwhile()
        for _ in range(3):  # let the driver flush
            await asyncio.sleep(0)


async def test_a_finish_that_arrives_during_a_write_is_not_completed_twice_or_early(family):
    async with serve_engine(family) as edge:
        service = engine_service(edge.config, edge.driver)
        generate = next(method for method in service.methods if method.name == "Generate")
        context = SlowContext(lambda: edge.ranks.step(edge.ranks.sent[0][1].wire_id, [12], "stop"))
        task = asyncio.create_task(generate.call(edge.request().SerializeToString(), context))
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [11])
        await task
        responses = [edge.pb.GenerateResponse.FromString(message) for message in context.messages]
        assert kinds(responses) == ["chunk", "chunk", "complete"]
        assert [list(response.chunk.token_ids) for response in responses[:2]] == [[11], [12]]
        assert list(responses[2].complete.output_ids) == [11, 12]
        assert context.trailing["x-rankgate-rank"] == str(edge.ranks.rank_of(wire_id))
