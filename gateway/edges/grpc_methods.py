"""What a gRPC transport serves: services as tables of methods over bytes.

Servicers are written against typed requests and raise `GatewayError`. The three builders here add what every
method needs, once: decoding that answers garbage with INVALID_ARGUMENT, the mapping of errors to statuses, and a
log entry for defects.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import grpc
import msgspec
import structlog
from google.protobuf.message import DecodeError, Message

from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_context import DirectCall, RpcContext
from gateway.edges.grpc_status import abort_with, defect_of

if TYPE_CHECKING:
    from gateway.edges.grpc_gate import CallGate

_log = structlog.get_logger("gateway.grpc")

RequestT = TypeVar("RequestT", bound=Message)
ResultT = TypeVar("ResultT")


class Method(msgspec.Struct, frozen=True):
    """One RPC. `call` takes bytes (bidi: an async iterator of bytes) and a context.

    A unary call returns its response as bytes; the others write theirs through the context. `direct`, for the gate that
    the method gets, is the same without a task, for transports that can do with that.
    """

    name: str
    kind: Literal["unary", "server_stream", "bidi"]
    call: Callable[[Any, RpcContext], Awaitable[Any]]
    direct: Callable[["CallGate"], Callable[[bytes, DirectCall], None]] | None = None


class Service(msgspec.Struct, frozen=True):
    """One service under its full name, e.g. `gateway.v1.GatewayService`."""

    name: str
    methods: tuple[Method, ...]
    configure: Callable[[Config], None] = lambda _: None
    """Go by another configuration from the next call on."""


def unary(
    name: str, request_type: type[RequestT], handler: Callable[[RequestT, RpcContext], Awaitable[Message]]
) -> Method:
    """A method with one request and one response."""

    async def run(data: bytes, context: RpcContext) -> bytes:
        response = await handler(decode(request_type, data), context)
        return response.SerializeToString()

    async def call(data: bytes, context: RpcContext) -> bytes:
        return await _guard(name, run(data, context), context)

    return Method(name, "unary", call)


def server_stream(
    name: str,
    request_type: type[RequestT],
    handler: Callable[[RequestT, RpcContext], Awaitable[None]],
) -> Method:
    """A method with one request whose handler writes the responses itself, as bytes."""

    async def run(data: bytes, context: RpcContext) -> None:
        await handler(decode(request_type, data), context)

    return raw_stream(name, run)


def raw_stream(
    name: str,
    run: Callable[[bytes, RpcContext], Awaitable[None]],
    direct: Callable[["CallGate"], Callable[[bytes, DirectCall], None]] | None = None,
) -> Method:
    """The same with a handler that decodes its request itself."""

    async def call(data: bytes, context: RpcContext) -> None:
        await _guard(name, run(data, context), context)

    return Method(name, "server_stream", call, direct)


def bidi(
    name: str,
    request_type: type[RequestT],
    handler: Callable[[AsyncIterator[RequestT], RpcContext], Awaitable[None]],
) -> Method:
    """A method with streams both ways. Its iterator of requests raises `GatewayError` on garbage."""

    async def requests(data: AsyncIterator[bytes]) -> AsyncIterator[RequestT]:
        async for message in data:
            yield decode(request_type, message)

    async def call(data: AsyncIterator[bytes], context: RpcContext) -> None:
        await _guard(name, handler(requests(data), context), context)

    return Method(name, "bidi", call)


def decode(request_type: type[RequestT], data: bytes) -> RequestT:
    """Parse one message; `GatewayError` INVALID_REQUEST when it is not one."""
    try:
        return request_type.FromString(data)
    except DecodeError:
        full_name = request_type.DESCRIPTOR.full_name
        raise GatewayError(Reason.INVALID_REQUEST, f"the request is not a valid {full_name} message") from None


async def _guard(name: str, work: Awaitable[ResultT], context: RpcContext) -> ResultT:
    """Run a handler; whatever it raises becomes a status. Cancellation passes untouched."""
    try:
        return await _answer(name, work, context)
    except grpc.aio.InternalError:
        # The transport had ended the call already: the client left an instant before it was told so.
        raise asyncio.CancelledError from None


async def _answer(name: str, work: Awaitable[ResultT], context: RpcContext) -> ResultT:
    try:
        return await work
    except GatewayError as error:
        await abort_with(context, error)
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise
    except Exception:  # noqa: BLE001 - the last line of defence: a defect must not kill other calls
        _log.exception("rpc_failed", rpc=name)
        await abort_with(context, defect_of(name))
