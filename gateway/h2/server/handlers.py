"""Finds what serves a call, and calls it: the four kinds of `grpc.RpcMethodHandler`, on asyncio.

Handlers are coroutine functions or asynchronous generators. Those for threads are not served: a server made for
streams of tokens has no thread pool to run them in.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from gateway.h2.rpc.heads import CallHead
from gateway.h2.rpc.status import Code, RpcError

if TYPE_CHECKING:
    from gateway.h2.server.servicer_call import ServicerCall

_log = structlog.get_logger("gateway.h2")


class Handlers:
    """What was added to a server, in order."""

    def __init__(self) -> None:
        self._generic: list[Any] = []
        self._registered: dict[str, Any] = {}
        # The one that is asked for every call, where there is no other.
        self.only: Callable[[CallHead], Any] | None = None

    def add_generic(self, handlers: Iterable[Any]) -> None:
        """Handlers that are asked for each call; the first that knows the method gets it."""
        self._generic += handlers
        self._look_for_only()

    def add_registered(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Handlers by method name."""
        self._registered |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self._look_for_only()

    def _look_for_only(self) -> None:
        is_alone = len(self._generic) == 1 and not self._registered
        self.only = self._generic[0].service if is_alone else None

    def find(self, head: CallHead) -> Any:
        """The handler of a call. Raises `RpcError` UNIMPLEMENTED."""
        handler = self._registered.get(head.method)
        if handler is not None:
            return handler
        for generic in self._generic:
            handler = generic.service(head)
            if handler is not None:
                return handler
        raise unimplemented()


def unimplemented() -> RpcError:
    """Nobody has the method."""
    return RpcError(Code.UNIMPLEMENTED, "Method not found!")


async def run(handler: Any, call: "ServicerCall") -> None:
    """Serve a call to its end, whichever it is."""
    try:
        await _serve(handler, call)
    except RpcError as error:
        call.finish(error.code, error.message)
    except grpc.aio.AbortError:
        pass  # its status is out
    except asyncio.CancelledError:
        call.finish(Code.CANCELLED, "the call was cancelled by its handler")
        raise
    except Exception:  # noqa: BLE001 - a defect of one handler must not touch other calls
        if not call.done():
            message = note_defect(call.head.method)
            call.finish(call.code() or Code.UNKNOWN, call.details() or message)
    else:
        call.finish_as_set()


def note_defect(method: str) -> str:
    """A handler has raised what it should not: to be called while that is handled. Returns what its client is told."""
    _log.exception("handler_failed", rpc=method)
    return "the handler failed; the server's log says why"


async def _serve(handler: Any, call: "ServicerCall") -> None:
    """Run a handler to its end and send what it returns. Raises whatever it raises."""
    if handler.request_streaming:
        request = _decoded(call, handler.request_deserializer)
        behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        request = _decode(call.take_request(), handler.request_deserializer)
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    call.serializer = handler.response_serializer
    result = behavior(request, call)
    if inspect.isasyncgen(result):
        async for response in result:
            await call.write(response)
        return
    if not inspect.isawaitable(result):
        raise TypeError(f"{call.head.method} is no coroutine; this server has no threads to run it in")
    response = await result
    if not handler.response_streaming:
        await call.write(response)


def _decode(data: bytes, deserializer: Any) -> Any:
    if deserializer is None:
        return data
    try:
        return deserializer(data)
    except Exception:  # noqa: BLE001 - whatever a parser makes of garbage
        raise RpcError(Code.INTERNAL, "the request could not be deserialised") from None


async def _decoded(call: "ServicerCall", deserializer: Any) -> Any:
    while (data := await call.incoming.read()) is not None:
        yield _decode(data, deserializer)


def status_number(code: Any) -> int:
    """GRPC's number of a status code, which may be a number already."""
    if isinstance(code, grpc.StatusCode):
        number: int = code.value[0]
        return number
    return int(code)
