"""The listeners: binding, options, health, reflection, and how they stop."""

import asyncio
import contextlib
import socket

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_health import HealthService
from gateway.edges.grpc_methods import Service, unary
from gateway.edges.grpc_server import GrpcServers, ListenError
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver, count_up
from tests.support.grpc_edge import error_info, generate_request, make_config, serve, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DEPENDENT = ("", "readiness", "gateway.v1.GatewayService", "gateway.v1.AdminService")


async def health(channel, name):
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return response.status


class TestReload:
    @pytest.mark.parametrize(("stall_s", "unread_s"), [(5.0, 10.0), (None, None)])
    async def test_the_time_to_read_reaches_the_transport(self, stall_s, unread_s):
        async with serve(listen={"transport": "fast"}, limits={"reader_stall_timeout_s": 0.5}) as edge:
            assert await health(edge.channel, "liveness") == SERVING
            async with grpc.aio.insecure_channel(edge.servers.admin_address) as admin:
                assert await health(admin, "liveness") == SERVING
                edge.servers.configure(make_config(limits={"reader_stall_timeout_s": stall_s}))
                connections = [each for server in edge.servers._servers for each in server._shared.connections]
                assert [each.http.unread_timeout_s for each in connections] == [unread_s] * 2


class TestBinding:
    @pytest.mark.parametrize("setting", ["grpc", "admin"])
    async def test_a_taken_port_is_an_error_that_names_setting_address_and_cause(self, setting):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            servers = GrpcServers(make_config(listen={setting: address}), FakeDriver())
            with pytest.raises(ListenError) as caught:
                await servers.start()
            assert str(caught.value) == f"listen.{setting}: cannot listen on {address}: Address already in use"
            await servers.stop(0)

    async def test_a_second_gateway_on_the_same_port_is_refused_and_leaves_the_first_alone(self):
        async with serve(count_up) as edge:
            second = GrpcServers(make_config(listen={"grpc": edge.servers.grpc_address}), FakeDriver())
            with pytest.raises(ListenError, match="Address already in use"):
                await second.start()
            assert [r async for r in edge.stub.Generate(generate_request())][-1].HasField("finish")

    async def test_an_address_that_is_not_ours(self):
        with pytest.raises(ListenError, match=r"listen\.grpc: cannot listen on 192\.0\.2\.1:0: "):
            await GrpcServers(make_config(listen={"grpc": "192.0.2.1:0"}), FakeDriver()).start()

    async def test_port_zero_is_replaced_by_the_real_one(self):
        async with serve() as edge:
            assert edge.servers.grpc_address != edge.servers.admin_address
            assert not edge.servers.grpc_address.endswith(":0")


class TestHealth:
    async def test_readiness_moves_everything_but_liveness(self):
        async with serve() as edge, grpc.aio.insecure_channel(edge.servers.admin_address) as admin:
            for is_ready in (True, False, True):
                edge.servers.set_ready(is_ready=is_ready)
                for channel in (edge.channel, admin):
                    assert {await health(channel, name) for name in DEPENDENT} == {SERVING if is_ready else NOT_SERVING}
                    assert await health(channel, "liveness") == SERVING

    async def test_not_ready_until_told(self):
        servers = GrpcServers(make_config(), FakeDriver())
        await servers.start()
        async with grpc.aio.insecure_channel(servers.grpc_address) as channel:
            assert await health(channel, "") == NOT_SERVING
            assert await health(channel, "liveness") == SERVING
        await servers.stop(0)

    async def test_a_watch_sees_readiness_change_and_does_not_hold_up_a_stop(self):
        async with serve() as edge:
            request = health_pb2.HealthCheckRequest(service="readiness")
            watch = health_pb2_grpc.HealthStub(edge.channel).Watch(request)
            assert (await watch.read()).status == SERVING
            # Waited for before the stop: grpcio's client reads nothing more once it knows the status.
            change = asyncio.ensure_future(watch.read())
            await edge.servers.stop(60.0)
            assert (await change).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert error_info(caught.value).reason == "DRAINING"

    async def test_a_watch_waits_for_a_name_that_is_not_known_yet(self):
        service = HealthService()
        messages = []

        class Transport:
            async def write(self, message):
                messages.append(health_pb2.HealthCheckResponse.FromString(message).status)

        watch = asyncio.create_task(service.watch(health_pb2.HealthCheckRequest(service="new"), Transport()))
        await asyncio.sleep(0)
        service.set("other", is_serving=True)
        await asyncio.sleep(0)
        service.set("new", is_serving=True)
        await asyncio.sleep(0)
        watch.cancel()
        assert messages == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN, SERVING]

    async def test_a_watch_that_is_writing_when_all_ends_still_tells_the_last_status(self):
        service = HealthService()
        service.set("", is_serving=True)
        messages, writing, go_on = [], asyncio.Event(), asyncio.Event()

        class Transport:
            async def write(self, message):
                messages.append(health_pb2.HealthCheckResponse.FromString(message).status)
                writing.set()
                await go_on.wait()

        watch = asyncio.create_task(service.watch(health_pb2.HealthCheckRequest(), Transport()))
        await writing.wait()
        service.set("", is_serving=False)
        service.close(GatewayError(Reason.DRAINING, "over"))
        go_on.set()
        with pytest.raises(GatewayError, match="over"):
            await watch
        assert messages == [SERVING, NOT_SERVING]

    async def test_list_shows_every_name(self):
        async with serve() as edge:
            response = await health_pb2_grpc.HealthStub(edge.channel).List(health_pb2.HealthListRequest())
            statuses = {name: answer.status for name, answer in response.statuses.items()}
            assert statuses == dict.fromkeys((*DEPENDENT, "liveness"), SERVING)

    async def test_an_unknown_name_is_not_found(self):
        async with serve() as edge:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(edge.channel, "nonsense")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def names_of(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        response = await stub.ServerReflectionInfo(iter([request])).read()
        return {service.name for service in response.list_services_response.service}


async def test_reflection_lists_what_each_listener_serves():
    common = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    async with serve() as edge:
        assert await names_of(edge.servers.grpc_address) == common | {"gateway.v1.GatewayService"}
        assert await names_of(edge.servers.admin_address) == common | {"gateway.v1.AdminService"}


async def test_reflection_describes_the_service():
    async with serve() as edge:
        stub = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="gateway.v1.GatewayService")
        response = await stub.ServerReflectionInfo(iter([request])).read()
        files = response.file_descriptor_response.file_descriptor_proto
        names = {descriptor_pb2.FileDescriptorProto.FromString(data).name for data in files}
        assert "gateway/v1/gateway.proto" in names


async def test_an_engine_service_is_served_reflected_and_health_checked():
    async def answer(request, context):
        return gateway_pb2.AbortResponse()

    service = Service("test.Engine", (unary("Ping", gateway_pb2.AbortRequest, answer),))
    servers = GrpcServers(make_config(), FakeDriver(), [service])
    await servers.start()
    servers.set_ready(is_ready=True)
    async with grpc.aio.insecure_channel(servers.grpc_address) as channel:
        assert await channel.unary_unary("/test.Engine/Ping")(b"") == b""
        assert await health(channel, "test.Engine") == SERVING
    assert "test.Engine" in await names_of(servers.grpc_address)
    assert "test.Engine" not in await names_of(servers.admin_address)
    await servers.stop(0)


async def test_messages_up_to_the_limit_pass_and_larger_ones_are_refused():
    model = {"max_context_tokens": 200_000}
    async with serve(count_up, listen={"max_message_bytes": 100_000}, model=model) as edge:
        fits, too_large = (1,) * 90_000, (1,) * 110_000
        async for _ in edge.stub.Generate(generate_request(fits)):
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in edge.stub.Generate(generate_request(too_large)):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_streams_per_connection_are_bounded():
    """The transport makes further calls wait: what is live never exceeds the limit."""
    async with serve(limits={"max_streams_per_connection": 2}) as edge:
        calls = [edge.stub.Generate(generate_request(request_id=f"r{number}")) for number in range(4)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: len(edge.driver.requests) >= 2)
        for expected in (3, 4):
            request = next(iter(edge.driver.live.values()))
            assert len(edge.driver.requests) == expected - 1
            edge.driver.tokens(request, [1], finish="stop")
            await until(lambda count=expected: len(edge.driver.requests) >= count)
        for request in list(edge.driver.live.values()):
            edge.driver.tokens(request, [1], finish="stop")
        assert [list((await read).token_ids) for read in reads] == [[1]] * 4


class TestStop:
    async def test_a_live_stream_ends_by_itself_then_the_stop_returns(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request())
            await until(lambda: edge.driver.requests)
            stopping = asyncio.create_task(edge.servers.stop(60.0))
            await _closed(edge.servers.grpc_address)
            assert not stopping.done()
            edge.driver.tokens(edge.driver.requests[0], [5], finish="stop")
            await stopping
            assert [list(r.token_ids) async for r in call] == [[5]]
            assert await call.code() is grpc.StatusCode.OK

    async def test_at_the_end_of_grace_the_rest_is_cancelled(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request())
            await until(lambda: edge.driver.requests)
            await edge.servers.stop(0.05)
            assert edge.driver.requests[0].error.reason is Reason.CANCELLED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_new_calls_are_unavailable_while_it_waits(self):
        async with serve() as edge:
            call = edge.stub.Generate(generate_request())
            await until(lambda: edge.driver.requests)
            stopping = asyncio.create_task(edge.servers.stop(60.0))
            await _closed(edge.servers.grpc_address)
            async with grpc.aio.insecure_channel(edge.servers.grpc_address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/gateway.v1.GatewayService/ListRanks")(b"")
                # grpcio cancels a call whose connection it had taken just before the listener closed.
                assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            edge.driver.end(edge.driver.requests[0], GatewayError(Reason.DRAINING, "gone"))
            await stopping
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.details() == "gone"

    async def test_twice_is_fine(self):
        async with serve() as edge:
            await edge.servers.stop(1.0)
            await edge.servers.stop(1.0)


async def _closed(address):
    """Return when nothing listens there any more."""
    host, port = address.rsplit(":", 1)
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            continue  # the listener went while we were in its queue
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
