"""The gateway's own services on the fast listener, with the real grpcurl and with the standard engine service's client."""

import asyncio

import pytest

from gateway.edges.grpc_status import CODES
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import serve, until
from tests.support.grpcurl import grpcurl

GATEWAY = "gateway.v1.GatewayService"


@pytest.fixture
async def edge():
    async with serve(count_up, listen={"transport": "fast"}) as edge:
        yield edge


async def run(edge, *symbol, **options):
    return await asyncio.to_thread(grpcurl, edge.servers.grpc_address, *symbol, **options)


async def test_what_there_is_is_listed_and_described(edge):
    names = (await run(edge, "list")).text.split()
    assert {GATEWAY, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= set(names)
    assert "rpc GenerateMany" in (await run(edge, "describe", GATEWAY)).text


async def test_health(edge):
    for name in ("", GATEWAY, "readiness", "liveness"):
        answer = await run(edge, "grpc.health.v1.Health/Check", data={"service": name})
        assert answer.message == {"status": "SERVING"}


async def test_unary_and_server_stream_and_both_ways(edge):
    assert len((await run(edge, f"{GATEWAY}/ListRanks")).message["ranks"]) == 4
    request = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 5}}
    answer = await run(edge, f"{GATEWAY}/Generate", data=request)
    tokens = [token for message in answer.messages for token in message.get("token_ids", ())]
    assert tokens == [3, 4, 5, 6, 7]
    many = " ".join(
        f'{{"start": {{"request_id": "r{n}", "prompt_token_ids": [1], "sampling": {{"max_tokens": 2}}}}}}'
        for n in range(3)
    )
    answer = await run(edge, f"{GATEWAY}/GenerateMany", data=many)
    outputs = [output for message in answer.messages for output in message["outputs"]]
    assert sum(len(output["token_ids"]) for output in outputs) == 6


async def test_metadata_and_trailers(edge):
    answer = await run(
        edge,
        f"{GATEWAY}/Generate",
        data={"prompt_token_ids": [1], "sampling": {"max_tokens": 1}},
        headers={"x-request-id": "mine"},
        options=("-v",),
    )
    headers, _, trailers = answer.text.partition("Response contents:")
    assert "x-request-id: mine" in headers
    assert "x-rankgate-rank: 0" in trailers


async def test_errors_carry_their_details(edge):
    answer = await run(edge, f"{GATEWAY}/Generate", data={}, headers={"x-data-parallel-rank": "99x"})
    assert answer.refused() == (CODES["INVALID_RANK"].value[0], "INVALID_RANK")
    assert answer.info["metadata"]["valid_max"] == "3"


async def test_a_deadline():
    async with serve(listen={"transport": "fast"}) as edge:
        request = {"prompt_token_ids": [1], "sampling": {"max_tokens": 1}}
        answer = await run(edge, f"{GATEWAY}/Generate", data=request, max_time_s=0.5)
        assert answer.status["code"] == 4
        # The client's own clock may be first; then it is the client that ends the request, in a moment.
        await until(lambda: edge.driver.requests[0].is_ended)
