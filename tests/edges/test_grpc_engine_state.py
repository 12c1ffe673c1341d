"""What both standard engine services say of the model, the ranks and themselves."""

import datetime as dt

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.core.events import BatchReceived, DrainStarted, RankJoined, RankLost
from gateway.types import EngineBatch, EngineLoad
from tests.support.core import make_info
from tests.support.engine_edge import SERVICE_NAMES, serve_engine
from tests.support.grpc_edge import error_info

HANDLED = {"Generate", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads"}


@pytest.fixture(params=["vllm", "tokenspeed"])
def family(request):
    return request.param


def report(edge, rank, running, waiting, kv_usage):
    load = EngineLoad(running=running, waiting=waiting, kv_usage=kv_usage)
    edge.driver.emit(BatchReceived(rank, 1, EngineBatch(ids=[], token_ids=[], finish=[], load=load)))


async def loads(edge, **fields):
    return await edge.stub.GetLoads(edge.pb.GetLoadsRequest(**fields))


async def test_health_follows_the_ranks_and_the_drain(family):
    async with serve_engine(family, ranks=2) as edge:
        ask = edge.pb.HealthCheckRequest()
        assert (await edge.stub.HealthCheck(ask)).healthy
        edge.driver.emit(RankLost(0, 1, "test"))
        assert (await edge.stub.HealthCheck(ask)).healthy
        edge.driver.emit(RankLost(1, 1, "test"))
        answer = await edge.stub.HealthCheck(ask)
        assert not answer.healthy
        assert answer.message == "group g: 0 of 2 ranks are READY, 1 needed"
        edge.driver.emit(RankJoined(rank=1, incarnation=2, info=make_info()))
        assert (await edge.stub.HealthCheck(ask)).healthy
        edge.driver.emit(DrainStarted())
        answer = await edge.stub.HealthCheck(ask)
        assert not answer.healthy
        assert "draining" in answer.message


async def test_health_is_off_before_requests_are_refused(family):
    async with serve_engine(family, ranks=1) as edge:
        edge.driver.is_stopping = True
        assert not (await edge.stub.HealthCheck(edge.pb.HealthCheckRequest())).healthy


async def test_model_info_comes_from_the_configuration(family):
    async with serve_engine(family, model={"tokenizer_path": "/models/tiny"}) as edge:
        info = await edge.stub.GetModelInfo(edge.pb.GetModelInfoRequest())
        assert info.served_model_name == "m"
        assert info.model_path == info.tokenizer_path == "/models/tiny"
        assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (4096, 4095, 32000)
        assert list(info.eos_token_ids) == [2]
        if family == "vllm":
            assert info.is_generation


async def test_server_info_names_all_ranks_as_data_parallel(family):
    info = make_info(engine_version="tokenspeed-0.1.1", dtype="bfloat16", block_size=16, max_num_seqs=64)
    async with serve_engine(family, ranks=3, info=info) as edge:
        answer = await edge.stub.GetServerInfo(edge.pb.GetServerInfoRequest())
        assert answer.active_requests == 0
        assert answer.uptime_seconds >= 0
        if family == "vllm":
            assert answer.data_parallel_size == 3
            assert answer.server_type == "vllm-grpc"
            assert (answer.block_size, answer.max_num_seqs, answer.model_dtype) == (16, 64, "bfloat16")
        else:
            assert MessageToDict(answer.server_args)["dp_size"] == 3
            assert answer.tokenspeed_version == "0.1.1"
            assert answer.max_total_num_tokens == 400_000
            assert answer.start_time.ToDatetime(tzinfo=dt.UTC) <= dt.datetime.now(dt.UTC)


async def test_ranks_without_a_report_show_our_own_work(family):
    async with serve_engine(family, ranks=2) as edge:
        call = edge.stub.Generate(edge.request(range(10, 18), data_parallel_rank=1))
        (wire_id,) = await edge.ranks.wait_sent()
        answer = await loads(edge)
        assert answer.dp_rank_count == 2
        idle, busy = answer.loads
        assert (idle.dp_rank, idle.num_running_reqs, idle.num_total_reqs, idle.num_used_tokens) == (0, 0, 0, 0)
        assert (busy.dp_rank, busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs) == (1, 1, 0, 1)
        assert (busy.num_used_tokens, busy.max_total_num_tokens) == (8, 400_000)
        assert busy.token_usage == 8 / 400_000
        assert (busy.num_waiting_uncached_tokens, busy.max_running_requests) == (8, 256)
        edge.ranks.step(wire_id, [1], "stop")
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_a_report_goes_out_verbatim_and_is_clamped_when_the_rank_empties(family):
    async with serve_engine(family, ranks=2) as edge:
        call = edge.stub.Generate(edge.request(data_parallel_rank=1))
        (wire_id,) = await edge.ranks.wait_sent()
        edge.ranks.step(wire_id, [1], load=EngineLoad(running=5, waiting=2, kv_usage=0.25))
        load = (await loads(edge)).loads[1]
        assert (load.num_running_reqs, load.num_waiting_reqs) == (5, 2)
        # TokenSpeed's running includes its waiting requests; each is counted once.
        assert load.num_total_reqs == (7 if family == "vllm" else 5)
        assert (load.token_usage, load.num_used_tokens) == (0.25, 100_000)
        edge.ranks.step(wire_id, [2], "stop", load=EngineLoad(running=5, waiting=2, kv_usage=0.5))
        load = (await loads(edge)).loads[1]
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 0, 0)
        assert (load.token_usage, load.num_used_tokens) == (0.5, 200_000)
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_one_rank_can_be_asked_for_and_rank_0_is_one(family):
    async with serve_engine(family, ranks=3) as edge:
        report(edge, 0, 4, 1, 0.5)
        for rank in (0, 2):
            answer = await loads(edge, dp_rank=rank)
            assert [load.dp_rank for load in answer.loads] == [rank]
            assert answer.dp_rank_count == 1
        assert [load.dp_rank for load in (await loads(edge)).loads] == [0, 1, 2]


@pytest.mark.parametrize("rank", [-1, 2])
async def test_asking_for_a_rank_that_does_not_exist_is_an_error(family, rank):
    async with serve_engine(family, ranks=2) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await loads(edge, dp_rank=rank)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_info(caught.value).metadata["valid_max"] == "1"


async def test_tokenspeed_loads_have_an_aggregate():
    async with serve_engine("tokenspeed", ranks=2) as edge:
        report(edge, 0, 4, 1, 0.5)
        aggregate = (await loads(edge)).aggregate
        assert (aggregate.total_running_reqs, aggregate.total_waiting_reqs, aggregate.total_reqs) == (4, 1, 4)
        assert aggregate.avg_token_usage == 0.25


async def test_ranks_that_never_joined_are_listed_too(family):
    async with serve_engine(family, ranks=2, join=()) as edge:
        answer = await loads(edge)
        assert [(load.dp_rank, load.num_total_reqs, load.max_total_num_tokens) for load in answer.loads] == [
            (0, 0, 0),
            (1, 0, 0),
        ]
        assert not (await edge.stub.HealthCheck(edge.pb.HealthCheckRequest())).healthy


async def test_loads_carry_an_iso_timestamp(family):
    async with serve_engine(family) as edge:
        stamp = dt.datetime.fromisoformat((await loads(edge)).timestamp)
        assert stamp.tzinfo is not None


async def test_the_rest_of_the_service_is_unimplemented_in_words(family):
    async with serve_engine(family) as edge:
        (service,) = edge.pb.DESCRIPTOR.services_by_name.values()
        rest = [method for method in service.methods if method.name not in HANDLED]
        assert len(rest) == len(service.methods) - len(HANDLED)
        for method in rest:
            path = f"/{service.full_name}/{method.name}"
            kind = edge.channel.unary_stream if method.server_streaming else edge.channel.unary_unary
            call = kind(path)(b"")
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (await call.details()).startswith(f"{method.name} is not implemented by this gateway")


@pytest.mark.parametrize(
    ("model", "name", "advice"),
    [
        ({"tokenizer_path": "/models/tiny"}, "GetTokenizer", "; load it from the path that GetModelInfo names"),
        ({}, "GetTokenizer", "; set model.tokenizer_path, and load it from there"),
        ({}, "SubscribeKvEvents", ""),
    ],
)
async def test_what_to_do_instead_is_something_that_helps(family, model, name, advice):
    async with serve_engine(family, model=model) as edge:
        (service,) = edge.pb.DESCRIPTOR.services_by_name.values()
        call = edge.channel.unary_stream(f"/{service.full_name}/{name}")(b"")
        assert await call.details() == f"{name} is not implemented by this gateway{advice}"


async def test_exactly_one_engine_service_is_listed(family):
    async with serve_engine(family) as edge:
        stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
            break
        assert names & set(SERVICE_NAMES.values()) == {SERVICE_NAMES[family]}
