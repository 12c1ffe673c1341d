"""The server below the services, as `listen.transport` names it: the gRPC library's, or our own for token streams.

Both get the same services, limits and credentials. What the library is told is in `gateway.edges.grpc_options`; here is
the same for `gateway.h2`, which is told everything that it bounds before a call reaches this gateway.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc

from gateway.config.schema import Config
from gateway.edges.grpc_gate import max_request_bytes
from gateway.edges.grpc_options import server_options
from gateway.edges.security import Security
from gateway.h2.protocol.limits import Limits
from gateway.h2.server import Server
from gateway.h2.server.faults import Faults
from gateway.h2.server.writes import Writes

# Clients may be told at once that each of the calls of a full connection is not wanted any more, and a little later again.
_RESETS_PER_STREAM = 2.0
# First the request is ended and its client told why; who does not read that either loses the call.
_UNREAD_STALLS = 2.0


class RpcServer(Protocol):
    """The part of `grpc.aio.Server` that listeners use."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Handlers that are asked for each call."""
        ...

    def add_insecure_port(self, address: str) -> int:
        """Bind for plaintext. Raises RuntimeError."""
        ...

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        """Bind for TLS. Raises RuntimeError."""
        ...

    async def start(self) -> None:
        """Begin to serve."""
        ...

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, let the others end for up to `grace` seconds."""
        ...


def make_server(config: Config, security: Security, connections: int, faults: Faults) -> tuple[RpcServer, Any]:
    """A server for one listener with up to so many connections, and its credentials, None for plaintext.

    `faults` gets to know what is wrong with clients; the library does not tell.
    """
    if config.listen.transport == "fast":
        limits = fast_limits(config, connections)
        server = Server(limits=limits, max_message_bytes=config.listen.max_message_bytes, faults=faults)
        return server, security.http2_context()
    return grpc.aio.server(options=server_options(config, connections)), security.grpc_credentials()


def configure(server: RpcServer, config: Config) -> None:
    """Go by what can change while a server runs. The library was told nothing of it."""
    if isinstance(server, Server):
        server.set_unread_timeout(_unread_timeout_s(config))


def writes_of(server: RpcServer) -> Writes | None:
    """What gathers the writes of a server that has started; the library writes by itself."""
    return server.writes if isinstance(server, Server) else None


def fast_limits(config: Config, connections: int) -> Limits:
    """The bounds of `gateway.h2` for one listener."""
    limits, keepalive = config.limits, config.listen.keepalive
    max_streams = limits.max_streams_per_connection
    return Limits(
        max_connections=connections,
        max_streams=max_streams,
        # Somewhat more than the gate takes, so that whoever is just above the limit is told which one it was.
        max_header_list_bytes=2 * limits.max_metadata_bytes,
        max_request_bytes=min(config.listen.max_message_bytes, 2 * max_request_bytes(config)),
        resets_burst=_RESETS_PER_STREAM * max_streams,
        handshake_timeout_s=limits.handshake_timeout_s,
        unread_timeout_s=_unread_timeout_s(config),
        keepalive_s=keepalive.time_s,
        keepalive_timeout_s=keepalive.timeout_s,
        min_client_ping_s=keepalive.min_client_ping_s,
        max_idle_s=limits.idle_connection_timeout_s,
        max_age_s=keepalive.max_connection_age_s,
        max_age_grace_s=keepalive.max_connection_age_grace_s,
    )


def _unread_timeout_s(config: Config) -> float | None:
    stall_s = config.limits.reader_stall_timeout_s
    return None if stall_s is None else _UNREAD_STALLS * stall_s
