"""The gRPC listeners: one for clients, one for operators.

Both serve tables of methods (`gateway.edges.grpc_methods`), health v1 and reflection. What the transport bounds is in
`gateway.edges.grpc_transport`, what this gateway does by itself in `gateway.edges.grpc_gate`. Where tokens are asked for, a
call is refused before any of its messages is read; only health is open to everyone, as probes bring none.
"""

import asyncio
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection, reflection_pb2

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges import grpc_admin, grpc_gateway, grpc_health, grpc_transport
from gateway.edges.auth import FAILURES, Authenticator, Failure
from gateway.edges.grpc_admin import AdminService
from gateway.edges.grpc_context import Metadata, RpcContext
from gateway.edges.grpc_direct import HeadFacts
from gateway.edges.grpc_engine.outlet import flush_items
from gateway.edges.grpc_gate import CallContext, CallGate
from gateway.edges.grpc_gateway import GatewayService
from gateway.edges.grpc_health import HealthService
from gateway.edges.grpc_methods import Method, Service, bidi
from gateway.edges.grpc_options import MAX_ADMIN_CONNECTIONS, max_connections
from gateway.edges.grpc_status import abort_with
from gateway.edges.grpc_transport import RpcServer, make_server
from gateway.edges.reload import Reloader
from gateway.edges.security import Security

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

LIVENESS = "liveness"
READINESS = "readiness"

_BUILDERS = {
    "unary": grpc.unary_unary_rpc_method_handler,
    "server_stream": grpc.unary_stream_rpc_method_handler,
    "bidi": grpc.stream_stream_rpc_method_handler,
}
_Call = Callable[[Any, Any], Awaitable[Any]]


class ListenError(Exception):
    """A listen address could not be bound; the message names the setting, the address and the cause."""


class GrpcServers:
    """Both listeners and their readiness.

    `grpc_address` and `admin_address` are the bound HOST:PORT, with the real port where port 0 was asked for. `admin` is what
    operators call.
    """

    def __init__(
        self,
        config: Config,
        driver: "Driver",
        engine_services: Sequence[Service] = (),
        security: Security | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        self._config = config
        self._driver = driver
        self._security = Security(config.listen) if security is None else security
        self.gate = CallGate(config)
        self._gateway = GatewayService(config, driver, self.gate)
        self.admin = AdminService(config, driver, reloader)
        self._health = HealthService()
        self._health.set(LIVENESS, is_serving=True)
        self._engine_services = tuple(engine_services)
        self._servers: list[RpcServer] = []
        self._watching: asyncio.Task[None] | None = None
        self.grpc_address = config.listen.grpc
        self.admin_address = config.listen.admin

    async def start(self) -> None:
        """Listen on both addresses, not ready yet. Raises `ListenError` or `CredentialsError`; nothing listens then."""
        self.set_ready(is_ready=False)
        self._security.load()
        listen = self._config.listen
        try:
            services = (self._gateway.service, *self._engine_services)
            connections = max_connections(self._config)
            self.grpc_address = await self._serve("grpc", listen.grpc, services, connections, self.gate)
            connections = min(connections, MAX_ADMIN_CONNECTIONS)
            self.admin_address = await self._serve("admin", listen.admin, (self.admin.service,), connections)
        except ListenError:
            await self._stop_servers(None)
            raise
        self._watching = asyncio.create_task(self.gate.watch.run(), name="stream-watch")

    def configure(self, config: Config) -> None:
        """Go by another configuration from the next call on. Addresses and connections stay as they are."""
        self.gate.configure(config)
        for service in (self._gateway.service, self.admin.service, *self._engine_services):
            service.configure(config)
        for server in self._servers:
            grpc_transport.configure(server, config)

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
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    async def _stop_servers(self, grace_s: float | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(server.stop(grace_s))

    async def _serve(
        self,
        listener: str,
        address: str,
        services: Sequence[Service],
        connections: int,
        gate: CallGate | None = None,
    ) -> str:
        server, credentials = make_server(self._config, self._security, connections, self.gate.http2_faults)
        reflected = _reflection([reflection.SERVICE_NAME, *(service.name for service in services), grpc_health.NAME])
        authenticator = self._security.authenticator(listener)
        calls = _Calls((*services, reflected), self._health.service, authenticator, gate)
        server.add_generic_rpc_handlers((calls,))
        bound = _bind(server, f"listen.{listener}", address, credentials)
        await server.start()
        self._servers.append(server)
        if gate is not None:  # output is for clients only
            self._driver.writes = grpc_transport.writes_of(server)
            self._driver.flush_items = flush_items
        return bound


class _Calls(grpc.GenericRpcHandler):
    """Finds what serves a call. The transport asks when it has the headers and nothing else yet."""

    def __init__(
        self,
        services: Sequence[Service],
        open_service: Service,
        authenticator: Authenticator | None,
        gate: CallGate | None,
    ) -> None:
        self._gate = gate
        self._handlers = _handlers(services, gate)
        self._open_handlers = _handlers((open_service,), None)
        self._authenticator = authenticator
        self._tokens = None if authenticator is None else authenticator.tokens
        self._refusals = (
            {} if authenticator is None else {failure: _unauthenticated(authenticator, failure) for failure in FAILURES}
        )

    def service(self, handler_call_details: Any) -> Any:
        """The call's handler, None for a method that is not there."""
        # Our own transport asks with heads that calls may share: what was found for them then holds for them now.
        facts: HeadFacts | None = getattr(handler_call_details, "memo", None)
        credentials = None if self._tokens is None else self._tokens.value
        if facts is not None and facts.credentials is credentials:
            return facts.handler
        handler = self._open_handlers.get(handler_call_details.method)
        if handler is not None:
            return handler
        metadata = handler_call_details.invocation_metadata
        refusal = self._refuse(metadata)
        if refusal is not None:
            return refusal
        handler = self._handlers.get(handler_call_details.method)
        if handler is not None and hasattr(handler_call_details, "memo"):
            handler_call_details.memo = HeadFacts(handler, credentials)
        return handler

    def _refuse(self, metadata: Metadata | None) -> Any:
        if self._authenticator is not None:
            # Unknown methods as well: who may not call learns nothing of what there is.
            failure = self._authenticator.check(metadata)
            if failure is not None:
                return self._refusals[failure]
        if self._gate is not None:
            error = self._gate.check_metadata(metadata)
            if error is not None:
                return _refusal(error, self._gate)
        return None


def _handlers(services: Sequence[Service], gate: CallGate | None) -> dict[str, Any]:
    return {
        f"/{service.name}/{method.name}": _handler(method, gate) for service in services for method in service.methods
    }


def _handler(method: Method, gate: CallGate | None) -> Any:
    # Without serialisers, as methods take and give bytes.
    if gate is None:
        return _build(method.kind, method.call)
    handler = _build(method.kind, gate.open(method))
    if method.direct is not None:
        handler.direct = method.direct(gate)
    return handler


def _build(kind: str, call: _Call) -> Any:
    async def run(data: Any, context: Any) -> Any:
        try:
            return await call(data, context)
        except grpc.aio.AbortError as error:
            # The library keeps the exception of its `abort` with the call, and the exception keeps all frames that it
            # went through, which know the call: a cycle per refused call, with its request in it.
            traceback.clear_frames(error.__traceback__)
            error.__context__ = None
            del data, context
            raise

    return _BUILDERS[kind](run)


# Answers to any call are streams: those get their first message only when they ask for it.


def _unauthenticated(authenticator: Authenticator, failure: Failure) -> Any:
    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await abort_with(context, authenticator.refuse(failure, context.peer()))

    return _build("bidi", refuse)


def _refusal(error: GatewayError, gate: CallGate) -> Any:
    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await abort_with(CallContext(context, gate), error)

    return _build("bidi", refuse)


def _reflection(names: Sequence[str]) -> Service:
    """The standard reflection service over the names, as a table like all others: it asks for tokens as they do."""
    # Its published types know only the servicer for threads.
    answers: Any = reflection.aio.ReflectionServicer(names)

    async def serve(requests: AsyncIterator[Message], context: RpcContext) -> None:
        async for response in answers.ServerReflectionInfo(requests, context):
            await context.write(response.SerializeToString())

    method = bidi("ServerReflectionInfo", reflection_pb2.ServerReflectionRequest, serve)
    return Service(reflection.SERVICE_NAME, (method,))


def _bind(server: RpcServer, setting: str, address: str, credentials: Any) -> str:
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
