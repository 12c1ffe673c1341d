"""The standard health service (grpc.health.v1) as a table of methods, so that every transport serves the same.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from gateway.core.errors import GatewayError
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_methods import Service, server_stream, unary

NAME = "grpc.health.v1.Health"

# List is younger than the published types.
_list_messages: Any = health_pb2

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService:
    """Keeps one status per name and tells those who watch. `service` is what a transport serves."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._closing_error: GatewayError | None = None
        self.service = Service(
            NAME,
            (
                unary("Check", health_pb2.HealthCheckRequest, self.check),
                unary("List", _list_messages.HealthListRequest, self.list_all),
                server_stream("Watch", health_pb2.HealthCheckRequest, self.watch),
            ),
        )

    def set(self, name: str, *, is_serving: bool) -> None:
        """Set a name's status; names appear when they are first set."""
        self._statuses[name] = _SERVING if is_serving else _NOT_SERVING
        self._tell()

    def close(self, error: GatewayError) -> None:
        """End every watch with the error, after the latest status."""
        self._closing_error = error
        self._tell()

    async def check(
        self, request: health_pb2.HealthCheckRequest, context: RpcContext
    ) -> health_pb2.HealthCheckResponse:
        """The status of a name; NOT_FOUND, as the protocol wants it, for an unknown one."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service name")
        return health_pb2.HealthCheckResponse(status=status)

    async def list_all(self, _: Message, __: RpcContext) -> Message:
        """The status of every name."""
        response: Message = _list_messages.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        )
        return response

    async def watch(self, request: health_pb2.HealthCheckRequest, context: RpcContext) -> None:
        """The status of a name, now and after each change. An unknown name may become known later."""
        seen = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != seen:
                seen = status
                await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
                continue  # it may have changed meanwhile
            if self._closing_error is not None:
                raise self._closing_error
            await changed.wait()

    def _tell(self) -> None:
        # A new event for the next change: whoever waits for this one sees it even if it looks late.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
