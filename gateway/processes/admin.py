"""Operators' calls with several processes: the first one answers them, and passes on what all have to do."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import Message
from msgspec import structs

from gateway.core.errors import GatewayError
from gateway.edges.grpc_admin import AdminService
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_methods import Method, Service
from gateway.edges.grpc_server import GrpcServers
from gateway.processes.peer import Peer, PeerError
from gateway.processes.plan import owner_of, shares_ranks
from gateway.v1 import admin_pb2

if TYPE_CHECKING:
    from gateway.config.schema import Config

_REQUESTS: dict[str, type[Message]] = {
    "DrainRank": admin_pb2.DrainRankRequest,
    "UndrainRank": admin_pb2.UndrainRankRequest,
    "FlushResponseCache": admin_pb2.FlushResponseCacheRequest,
}
"""What is for all processes. Everything else is read from the first one."""
_UNUSED = cast("RpcContext", None)
"""These methods look at nothing of their call."""


class AdminRelay:
    """One process's end: `servers` are its listeners, `apply` does here what another process was called for."""

    def __init__(self, peer: Peer, process: int) -> None:
        self._peer = peer
        self._process = process
        self._admin: AdminService | None = None
        self._config: Config | None = None

    def servers(self, config: "Config", *parts: Any) -> GrpcServers:
        """The listeners of this process; the first one's pass on what is for all."""
        servers = GrpcServers(config, *parts)
        self._config, self._admin = config, servers.admin
        if not self._process:
            servers.admin.service = self._passing_on(servers.admin.service)
        return servers

    async def apply(self, method: str, data: bytes) -> bytes:
        """Do it in this process. Raises PeerError."""
        admin = self._admin
        assert admin is not None
        calls: dict[str, Callable[[Any, RpcContext], Awaitable[Message]]] = {
            "DrainRank": admin.drain_rank,
            "UndrainRank": admin.undrain_rank,
            "FlushResponseCache": admin.flush_response_cache,
        }
        try:
            response = await calls[method](_REQUESTS[method].FromString(data), _UNUSED)
        except GatewayError as error:
            raise PeerError(str(error)) from None
        return response.SerializeToString()

    def _passing_on(self, service: Service) -> Service:
        methods = tuple(
            structs.replace(method, call=self._everywhere(method)) if method.name in _REQUESTS else method
            for method in service.methods
        )
        return structs.replace(service, methods=methods)

    def _everywhere(self, method: Method) -> Callable[[bytes, RpcContext], Awaitable[bytes]]:
        async def call(data: bytes, context: RpcContext) -> bytes:
            own: bytes = await method.call(data, context)  # what is wrong with it ends the call here
            rank = getattr(_REQUESTS[method.name].FromString(data), "rank", None)
            body = {"method": method.name, "request": data, "rank": rank}
            others: dict[int, bytes] = await self._peer.ask("everywhere", body)
            return self._together(rank, own, others)

        return call

    def _together(self, rank: int | None, own: bytes, others: dict[int, bytes]) -> bytes:
        config = self._config
        assert config is not None
        if rank is not None:
            return own if shares_ranks(config) else others.get(owner_of(rank, config.processes), own)
        total = admin_pb2.FlushResponseCacheResponse.FromString(own)
        for other in map(admin_pb2.FlushResponseCacheResponse.FromString, others.values()):
            total.entries += other.entries
            total.bytes += other.bytes
        return total.SerializeToString()
