"""gRPC listeners with TLS and tokens over a fake driver, and clients with what it takes to call them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from gateway.edges.grpc_engine import engine_service
from gateway.edges.grpc_server import GrpcServers
from gateway.edges.security import Security
from gateway.v1 import admin_pb2_grpc, gateway_pb2_grpc
from tests.support.certificates import NAME, look, token, write_tokens
from tests.support.fake_driver import FakeDriver, Script
from tests.support.grpc_edge import make_config

UNSHARED = ("grpc.use_local_subchannel_pool", 1)


def bearer(text: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {text}"),)


class Tokens:
    """A client's and an operator's token, each in its file."""

    def __init__(self, directory: Path) -> None:
        self.client, self.operator = token("client"), token("operator")
        self.client_file = write_tokens(directory / "tokens", self.client)
        self.operator_file = write_tokens(directory / "admin-tokens", self.operator)

    @property
    def settings(self) -> dict[str, str]:
        return {"tokens_file": str(self.client_file), "admin_tokens_file": str(self.operator_file)}


class SecuredEdge:
    """Both listeners. `look` stands for the interval at which files are looked at."""

    def __init__(self, servers: GrpcServers, security: Security, driver: Any, cleanup: AsyncExitStack) -> None:
        self.servers = servers
        self.security = security
        self.driver = driver
        self._cleanup = cleanup

    def look(self) -> None:
        for watched in self.security._watched():
            look(watched)

    async def connect(self, credentials: grpc.ChannelCredentials | None = None, *, is_admin: bool = False) -> Any:
        """A channel with a connection of its own; in plaintext without credentials."""
        address = self.servers.admin_address if is_admin else self.servers.grpc_address
        options = [UNSHARED, ("grpc.ssl_target_name_override", NAME)]
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options[:1])
        else:
            channel = grpc.aio.secure_channel(address, credentials, options)
        return await self._cleanup.enter_async_context(channel)

    async def gateway(self, credentials: grpc.ChannelCredentials | None = None) -> Any:
        return gateway_pb2_grpc.GatewayServiceStub(await self.connect(credentials))

    async def admin(self, credentials: grpc.ChannelCredentials | None = None) -> Any:
        return admin_pb2_grpc.AdminServiceStub(await self.connect(credentials, is_admin=True))


@asynccontextmanager
async def secured(script: Script | None = None, **listen: Any) -> AsyncIterator[SecuredEdge]:
    """Listeners with keys of `listen` set. Nothing may be live at the end."""
    driver: Any = FakeDriver(script)
    config = make_config(listen=listen)
    security = Security(config.listen)
    servers = GrpcServers(config, driver, [engine_service(config, driver)], security)
    await servers.start()
    servers.set_ready(is_ready=True)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(servers.stop, 5.0)
        yield SecuredEdge(servers, security, driver, cleanup)
    assert not driver.live


async def call(channel: Any, method: str, data: bytes = b"", metadata: Sequence[tuple[str, str]] = ()) -> Any:
    """One call of any kind, as bytes: what its first answer is, or its error. An answer may be no message at all."""
    stream = channel.stream_stream(method)(iter([data]), metadata=metadata, timeout=20)
    try:
        answer = await stream.read()
    except grpc.aio.AioRpcError as error:
        return error
    stream.cancel()
    return answer
