"""Tokens at the gRPC listeners: which calls need which, and what a call without one costs."""

import asyncio
from itertools import product

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.edges.auth import Role
from gateway.edges.credentials import CredentialsError
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.certificates import token, write, write_tokens
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import error_info, generate_request, serve, stream_failure, until
from tests.support.secured_edge import Tokens, bearer, call, secured

GARBAGE = b"\xff\xff\xff"
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


@pytest.fixture
def tokens(tmp_path):
    return Tokens(tmp_path)


@pytest.fixture
async def edge(tokens):
    async with secured(count_up, auth=tokens.settings) as edge:
        yield edge


async def reflected(channel, metadata):
    """Full names of all methods of all services that reflection lists."""
    request = reflection_pb2.ServerReflectionRequest(list_services="*")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answer = await stub.ServerReflectionInfo(iter([request]), metadata=metadata).read()
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(each.name) for each in answer.list_services_response.service]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


@pytest.mark.parametrize("is_admin", [False, True], ids=["grpc", "admin"])
async def test_every_method_but_health_wants_its_token(edge, tokens, is_admin):
    """The walk: all that is reflected, and a method that is not there, with each kind of token."""
    channel = await edge.connect(is_admin=is_admin)
    methods = await reflected(channel, bearer(tokens.operator))
    names = {method.split("/")[1] for method in methods}
    assert {HEALTH, REFLECTION} < names
    assert len(names) == (3 if is_admin else 4)
    expected = {"none": "missing", "wrong": "unknown", "client": "not_admin" if is_admin else None, "operator": None}
    brought = {
        "none": (),
        "wrong": bearer(token()),
        "client": bearer(tokens.client),
        "operator": bearer(tokens.operator),
    }
    counts = dict.fromkeys(("missing", "malformed", "unknown", "not_admin"), 0)
    for method, kind in product([*methods, "/test.None/None"], brought):
        answer = await call(channel, method, GARBAGE, brought[kind])
        failure = None if HEALTH in method else expected[kind]
        if failure is None:
            assert not (isinstance(answer, grpc.aio.AioRpcError) and answer.code() in REFUSALS), (method, kind)
            continue
        counts[failure] += 1
        reason = "PERMISSION_DENIED" if failure == "not_admin" else "UNAUTHENTICATED"
        info = error_info(answer)
        assert (answer.code().name, info.reason) == (reason, reason), (method, kind)
        assert dict(info.metadata) == {"retryable": "false"}
    assert edge.security.authenticator("admin" if is_admin else "grpc").failures == counts
    assert edge.driver.requests == []


async def test_the_right_token_lets_calls_through(edge, tokens):
    gateway, admin = await edge.gateway(), await edge.admin()
    for each in (tokens.client, tokens.operator):
        answers = [answer async for answer in gateway.Generate(generate_request(), metadata=bearer(each))]
        assert answers[-1].HasField("finish")
        assert (await gateway.ListRanks(gateway_pb2.ListRanksRequest(), metadata=bearer(each))).ranks
    assert (
        await admin.GetEffectiveConfig(admin_pb2.GetEffectiveConfigRequest(), metadata=bearer(tokens.operator))
    ).json


async def test_without_operators_nobody_makes_admin_calls(tmp_path):
    client = token()
    path = write_tokens(tmp_path / "t", client)
    async with secured(auth={"tokens_file": str(path)}) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (await edge.admin()).ListDecisions(admin_pb2.ListDecisionsRequest(), metadata=bearer(client))
        assert error_info(caught.value).reason == "PERMISSION_DENIED"


async def test_probes_need_no_token(edge):
    for is_admin in (False, True):
        channel = await edge.connect(is_admin=is_admin)
        for method, name in product(("Check", "Watch"), ("", "readiness", "liveness")):
            data = health_pb2.HealthCheckRequest(service=name).SerializeToString()
            answer = health_pb2.HealthCheckResponse.FromString(await call(channel, f"/{HEALTH}/{method}", data))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("data", [GARBAGE, bytes(5000), bytes(40 << 20)], ids=["garbage", "over the bound", "huge"])
async def test_a_request_that_may_not_come_in_is_not_read(tokens, data):
    """Neither decoded nor taken from the connection: each of these has an error of its own once it is read."""
    async with secured(count_up, auth=tokens.settings, max_message_bytes=1000) as edge:
        channel = await edge.connect()
        for metadata, expected in (((), "UNAUTHENTICATED"), (bearer(tokens.client), None)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/gateway.v1.GatewayService/Generate")(data, metadata=metadata, timeout=20)
            if expected is not None:
                assert error_info(caught.value).reason == expected
            else:
                assert caught.value.code() not in REFUSALS
        assert edge.driver.requests == []


async def test_a_stream_that_may_not_come_in_ends_before_its_first_message(edge):
    gateway = await edge.gateway()
    many = gateway.GenerateMany(metadata=bearer(token()))
    error, answers = await stream_failure(many)
    assert (error_info(error).reason, answers) == ("UNAUTHENTICATED", [])


async def test_a_list_that_changes_counts_for_new_calls_and_not_for_open_ones(tmp_path):
    old, new = token(), token()
    path = write_tokens(tmp_path / "t", old)
    async with secured(auth={"tokens_file": str(path)}) as edge:
        gateway = await edge.gateway()
        held = gateway.Generate(generate_request(), metadata=bearer(old))
        await until(lambda: edge.driver.requests)
        write_tokens(path, new)
        edge.look()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ListRanks(gateway_pb2.ListRanksRequest(), metadata=bearer(old))
        assert error_info(caught.value).reason == "UNAUTHENTICATED"
        assert (await gateway.ListRanks(gateway_pb2.ListRanksRequest(), metadata=bearer(new))).ranks
        write(path, b"not a token\n")
        edge.look()
        assert (await gateway.ListRanks(gateway_pb2.ListRanksRequest(), metadata=bearer(new))).ranks
        edge.driver.tokens(edge.driver.requests[0], [7], finish="stop")
        assert [list(answer.token_ids) async for answer in held] == [[7]]


@pytest.mark.parametrize("setting", ["tokens_file", "admin_tokens_file"])
async def test_a_file_that_is_missing_at_start_is_an_error_and_nothing_listens(tokens, setting):
    settings = tokens.settings
    (tokens.client_file if setting == "tokens_file" else tokens.operator_file).unlink()
    with pytest.raises(CredentialsError, match=f"listen.auth.{setting}: can't read "):
        async with secured(auth=settings):
            pass


async def test_without_tokens_a_header_is_no_matter():
    async with serve(count_up) as edge:
        for metadata in ((), bearer(token())):
            assert [answer async for answer in edge.stub.Generate(generate_request(), metadata=metadata)]


async def test_many_callers_at_once_are_told_apart(edge, tokens):
    gateway = await edge.gateway()

    async def attempt(metadata):
        try:
            await gateway.ListRanks(gateway_pb2.ListRanksRequest(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    kinds = [bearer(tokens.client), (), bearer(token())] * 60
    codes = await asyncio.gather(*map(attempt, kinds))
    refused = grpc.StatusCode.UNAUTHENTICATED
    assert codes == [grpc.StatusCode.OK, refused, refused] * 60
    failures = edge.security.authenticator("grpc").failures
    assert (failures["missing"], failures["unknown"]) == (60, 60)


def test_the_roles_of_the_listeners(tokens):
    from gateway.edges.security import ROLES

    assert ROLES == {"grpc": Role.CLIENT, "admin": Role.ADMIN, "metrics": Role.CLIENT}
