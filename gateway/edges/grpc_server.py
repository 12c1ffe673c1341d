"""The grpcio listeners: one for clients, one for operators.

Both serve tables of methods (`gateway.edges.grpc_methods`), health v1 and reflection. What is set here, and why:
no port sharing (a second gateway on the same port would silently take half of the calls), a bound on messages,
metadata and streams per connection, and keepalive that finds clients which vanished. Where tokens are asked for, a call
is refused before any of its messages is read; only health is open to everyone, as probes bring none.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection, reflection_pb2

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges import grpc_admin, grpc_gateway, grpc_health
from gateway.edges.auth import FAILURES, Authenticator, Failure
from gateway.edges.grpc_admin import AdminService
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_gateway import GatewayService
from gateway.edges.grpc_health import HealthService
from gateway.edges.grpc_methods import Method, Service, bidi
from gateway.edges.grpc_status import abort_with
from gateway.edges.security import Security

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

LIVENESS = "liveness"
READINESS = "readiness"
# gRPC's default soft limit for all request metadata together.
_MAX_METADATA_BYTES = 16 * 1024
_MS = 1000

_BUILDERS = {
    "unary": grpc.unary_unary_rpc_method_handler,
    "server_stream": grpc.unary_stream_rpc_method_handler,
    "bidi": grpc.stream_stream_rpc_method_handler,
}


class ListenError(Exception):
    """A listen address could not be bound; the message names the setting, the address and the cause."""


class GrpcServers:
    """Both listeners and their readiness.

    `grpc_address` and `admin_address` are the bound HOST:PORT, with the real port where port 0 was asked for.
    """

    def __init__(
        self,
        config: Config,
        driver: "Driver",
        engine_services: Sequence[Service] = (),
        security: Security | None = None,
    ) -> None:
        self._config = config
        self._security = Security(config.listen) if security is None else security
        self._gateway = GatewayService(config, driver)
        self._admin = AdminService(config, driver)
        self._health = HealthService()
        self._health.set(LIVENESS, is_serving=True)
        self._engine_services = tuple(engine_services)
        self._servers: list[grpc.aio.Server] = []
        self.grpc_address = config.listen.grpc
        self.admin_address = config.listen.admin

    async def start(self) -> None:
        """Listen on both addresses, not ready yet. Raises `ListenError` or `CredentialsError`; nothing listens then."""
        self.set_ready(is_ready=False)
        self._security.load()
        listen = self._config.listen
        try:
            services = (self._gateway.service, *self._engine_services)
            self.grpc_address = await self._serve("grpc", listen.grpc, services)
            self.admin_address = await self._serve("admin", listen.admin, (self._admin.service,))
        except ListenError:
            await self._stop_servers(None)
            raise

    def set_ready(self, *, is_ready: bool) -> None:
        """Set the health of everything but `liveness`, which holds as long as the process answers."""
        names = ["", READINESS, grpc_gateway.NAME, grpc_admin.NAME]
        names += (service.name for service in self._engine_services)
        for name in names:
            self._health.set(name, is_serving=is_ready)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, end watches and idle streams, let the rest end for up to `grace_s`, then end it."""
        self.set_ready(is_ready=False)
        error = GatewayError(Reason.DRAINING, "the gateway is shutting down; use another one", retryable=True)
        self._gateway.close(error)
        self._health.close(error)
        await self._stop_servers(grace_s)

    async def _stop_servers(self, grace_s: float | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(server.stop(grace_s))

    async def _serve(self, listener: str, address: str, services: Sequence[Service]) -> str:
        server = grpc.aio.server(options=_options(self._config))
        reflected = _reflection([reflection.SERVICE_NAME, *(service.name for service in services), grpc_health.NAME])
        calls = _Calls((*services, reflected), self._health.service, self._security.authenticator(listener))
        server.add_generic_rpc_handlers((calls,))
        credentials = self._security.grpc_credentials()
        bound = _bind(server, f"listen.{listener}", address, credentials)
        await server.start()
        self._servers.append(server)
        return bound


class _Calls(grpc.GenericRpcHandler):
    """Finds what serves a call. The gRPC library asks when it has the headers and nothing else yet."""

    def __init__(self, services: Sequence[Service], open_service: Service, authenticator: Authenticator | None) -> None:
        self._handlers = _handlers(services)
        self._open_handlers = _handlers((open_service,))
        self._authenticator = authenticator
        self._refusals = (
            {} if authenticator is None else {failure: _refusal(authenticator, failure) for failure in FAILURES}
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        handler = self._open_handlers.get(method)
        if handler is not None:
            return handler
        if self._authenticator is not None:
            # Unknown methods as well: who may not call learns nothing of what there is.
            failure = self._authenticator.check(handler_call_details.invocation_metadata)
            if failure is not None:
                return self._refusals[failure]
        return self._handlers.get(method)


def _handlers(services: Sequence[Service]) -> dict[str, Any]:
    return {f"/{service.name}/{method.name}": _handler(method) for service in services for method in service.methods}


def _handler(method: Method) -> Any:
    # Without serialisers, as methods take and give bytes.
    return _BUILDERS[method.kind](method.call)


def _refusal(authenticator: Authenticator, failure: Failure) -> Any:
    """Answers any call with the failure's error. As a stream: those get their first message only when they ask for it."""

    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await abort_with(context, authenticator.refuse(failure, context.peer()))

    return grpc.stream_stream_rpc_method_handler(refuse)


def _reflection(names: Sequence[str]) -> Service:
    """The standard reflection service over the names, as a table like all others: it asks for tokens as they do."""
    # Its published types know only the servicer for threads.
    answers: Any = reflection.aio.ReflectionServicer(names)

    async def serve(requests: AsyncIterator[Message], context: RpcContext) -> None:
        async for response in answers.ServerReflectionInfo(requests, context):
            await context.write(response.SerializeToString())

    method = bidi("ServerReflectionInfo", reflection_pb2.ServerReflectionRequest, serve)
    return Service(reflection.SERVICE_NAME, (method,))


def _bind(server: grpc.aio.Server, setting: str, address: str, credentials: grpc.ServerCredentials | None) -> str:
    host, _, port = address.rpartition(":")
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        problem = _bind_problem(host, port)
        if not problem and credentials is not None:
            problem = "the gRPC library does not take the certificate or the key of listen.tls; use another kind of key"
        raise ListenError(f"{setting}: cannot listen on {address}: {problem or error}") from None
    return f"{host}:{bound}"


def _bind_problem(host: str, port: str) -> str:
    """What the system says about an address: grpcio doesn't pass it on."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _options(config: Config) -> list[tuple[str, Any]]:
    listen, limits = config.listen, config.limits
    keepalive = listen.keepalive
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", listen.max_message_bytes),
        ("grpc.max_send_message_length", listen.max_message_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.keepalive_time_ms", round(keepalive.time_s * _MS)),
        ("grpc.keepalive_timeout_ms", round(keepalive.timeout_s * _MS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", round(keepalive.min_client_ping_s * _MS)),
    ]
    if keepalive.max_connection_age_s is not None:
        options.append(("grpc.max_connection_age_ms", round(keepalive.max_connection_age_s * _MS)))
        options.append(("grpc.max_connection_age_grace_ms", round(keepalive.max_connection_age_grace_s * _MS)))
    return options
