"""gRPC listeners over a fake driver, and typed stubs to call them with."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from gateway.config.schema import Config
from gateway.edges.grpc_server import GrpcServers
from gateway.edges.grpc_status import STATUS_KEY
from gateway.v1 import admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.support.fake_driver import FakeDriver, Script
from tests.support.transport import TRANSPORT


def make_config(ranks: int = 4, **sections: Any) -> Config:
    """A small configuration on free loopback ports; `sections` are merged into it."""
    group = {"name": "g", "protocol": "vllm", "handshake": "tcp://127.0.0.1:1", "ranks": ranks}
    listen = {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0", "transport": TRANSPORT} | sections.pop("listen", {})
    model = {"name": "m", "max_context_tokens": 4096, "vocab_size": 32000} | sections.pop("model", {})
    return msgspec.convert({"version": 1, "model": model, "groups": [group], "listen": listen, **sections}, Config)


class Edge:
    def __init__(self, servers: GrpcServers, driver: Any, channel: grpc.aio.Channel, admin: grpc.aio.Channel) -> None:
        self.servers = servers
        self.driver = driver
        self.channel = channel
        self.stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(admin)


@asynccontextmanager
async def serve(script: Script | None = None, *, driver: Any = None, **config: Any) -> AsyncIterator[Edge]:
    """Both listeners on free ports. When the test is done nothing may be live."""
    driver = driver or FakeDriver(script)
    servers = GrpcServers(make_config(**config), driver)
    await servers.start()
    servers.set_ready(is_ready=True)
    try:
        async with (
            grpc.aio.insecure_channel(servers.grpc_address) as channel,
            grpc.aio.insecure_channel(servers.admin_address) as admin,
        ):
            yield Edge(servers, driver, channel, admin)
    finally:
        await servers.stop(5.0)
    if isinstance(driver, FakeDriver):
        assert not driver.live


async def until(condition: Callable[[], object]) -> None:
    """Let time pass until something that another task or process does has happened."""
    while not condition():  # noqa: ASYNC110 - what is waited for sends no event
        await asyncio.sleep(0.001)


def generate_request(prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> gateway_pb2.GenerateRequest:
    sampling = gateway_pb2.Sampling(**fields.pop("sampling", {"max_tokens": 4}))
    return gateway_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, **fields)


async def stream_failure(call: Any) -> tuple[grpc.aio.AioRpcError, list[Any]]:
    """The error that a response stream ends with, and the messages before it."""
    responses = []

    async def read_all() -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all()
    return caught.value, responses


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a failed call; its status must agree with the call's."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())[STATUS_KEY])
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return info_of(status)


def info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.domain == "rankgate"
    return info
