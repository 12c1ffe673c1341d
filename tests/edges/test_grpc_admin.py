"""AdminService, on its own listener."""

import hashlib
import json
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import json_format

from gateway.edges import grpc_admin
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import error_info, generate_request, serve


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_the_configuration_in_force_with_its_defaults():
    async with serve(admission={"max_in_flight": 77}) as edge:
        response = await edge.admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())
        exact = json.loads(response.json)
        assert exact["admission"]["max_in_flight"] == 77
        assert exact["drain"]["grace_s"] == 30.0
        assert exact["limits"]["default_deadline_s"] is None
        assert list(exact) == sorted(exact)
        assert response.sha256 == hashlib.sha256(response.json.encode()).hexdigest()
        assert json_format.MessageToDict(response.config) == exact


async def test_equal_configurations_have_equal_hashes():
    hashes = []
    for limit in (5, 5, 6):
        async with serve(admission={"max_in_flight": limit}) as edge:
            hashes.append((await edge.admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest())).sha256)
    assert hashes[0] == hashes[1] != hashes[2]


async def test_explain_decides_without_submitting():
    async with serve() as edge:
        request = admin_pb2.ExplainRequest(request=generate_request((1, 2)))
        decision = json_format.MessageToDict((await edge.admin.Explain(request)).decision)
        assert decision["rank"] == 2
        assert decision["costs"] == [0.0, None]  # an infinite cost can't be said in JSON
        assert edge.driver.arrivals == []


async def test_explain_refuses_what_generate_would_refuse():
    async with serve() as edge:
        error = await failure(edge.admin.Explain(admin_pb2.ExplainRequest()))
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        call = edge.admin.Explain(admin_pb2.ExplainRequest(), metadata=(("x-data-parallel-rank", "x"),))
        assert error_info(await failure(call)).reason == "INVALID_RANK"


async def test_a_decision_is_found_by_the_id_that_generate_returned():
    async with serve(count_up) as edge:
        call = edge.stub.Generate(generate_request(data_parallel_rank=3))
        async for _ in call:
            pass
        number = int(dict(await call.trailing_metadata())["x-rankgate-decision-id"])
        response = await edge.admin.GetDecision(admin_pb2.GetDecisionRequest(decision_id=number))
        assert json_format.MessageToDict(response.decision)["rank"] == 3


async def test_an_unknown_decision_is_not_found():
    async with serve() as edge:
        error = await failure(edge.admin.GetDecision(admin_pb2.GetDecisionRequest(decision_id=9)))
        info = error_info(error)
        assert (error.code(), info.reason) == (grpc.StatusCode.NOT_FOUND, "DECISION_NOT_FOUND")
        assert info.metadata["decision_id"] == "9"


async def test_decisions_are_listed_newest_first_within_the_limit():
    async with serve(count_up) as edge:
        for _ in range(25):
            async for _ in edge.stub.Generate(generate_request(sampling={"max_tokens": 1})):
                pass

        async def numbers(**fields):
            response = await edge.admin.ListDecisions(admin_pb2.ListDecisionsRequest(**fields))
            return [int(decision["id"]) for decision in response.decisions]

        assert await numbers(limit=3) == [25, 24, 23]
        assert await numbers() == list(range(25, 5, -1))
        for limit in (0, 1001):
            error = await failure(edge.admin.ListDecisions(admin_pb2.ListDecisionsRequest(limit=limit)))
            assert error_info(error).metadata["field"] == "limit"


async def test_flushing_the_response_cache_says_what_was_forgotten():
    async with serve(response_cache={}) as edge:
        edge.driver.router.response_cache = SimpleNamespace(entries=3, nbytes=4096)
        first = await edge.admin.FlushResponseCache(admin_pb2.FlushResponseCacheRequest())
        assert (first.enabled, first.entries, first.bytes) == (True, 3, 4096)
        again = await edge.admin.FlushResponseCache(admin_pb2.FlushResponseCacheRequest())
        assert (again.enabled, again.entries, again.bytes) == (True, 0, 0)
        # Zeros are facts here: an operator shall see them.
        assert again.HasField("entries")
        assert again.HasField("bytes")


async def test_without_a_response_cache_there_is_nothing_to_flush():
    async with serve() as edge:
        answer = await edge.admin.FlushResponseCache(admin_pb2.FlushResponseCacheRequest())
        assert answer.HasField("enabled")
        assert (answer.enabled, answer.entries, answer.bytes) == (False, 0, 0)


async def test_each_listener_serves_its_own_services_only():
    async with serve() as edge, grpc.aio.insecure_channel(edge.servers.admin_address) as admin:
        wrong = admin.unary_unary("/gateway.v1.GatewayService/ListRanks")
        assert (await failure(wrong(gateway_pb2.ListRanksRequest().SerializeToString()))).code() is (
            grpc.StatusCode.UNIMPLEMENTED
        )
        wrong = edge.channel.unary_unary("/gateway.v1.AdminService/GetEffectiveConfig")
        assert (await failure(wrong(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_listing_stays_below_what_clients_accept(monkeypatch):
    monkeypatch.setattr(grpc_admin, "MAX_ANSWER_BYTES", 3000)
    async with serve(count_up) as edge:
        for _ in range(30):
            await collect(edge.stub.Generate(generate_request()))
        answer = await edge.admin.ListDecisions(admin_pb2.ListDecisionsRequest(limit=30))
        assert 0 < len(answer.decisions) < 30
        assert answer.ByteSize() < 3200


async def collect(call):
    return [response async for response in call]
