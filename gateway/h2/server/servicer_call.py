"""A call with a task, and the context that its handler gets.

What a servicer may use of `grpc.aio.ServicerContext` is here, with its meaning. When the client cancels, goes away or
its deadline passes, the handler's task is cancelled. `push` is for those who have a message now and don't wait.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from gateway.h2.rpc import status
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.call import Call, Metadata
from gateway.h2.server.handlers import run, status_number

if TYPE_CHECKING:
    from gateway.h2.server.connection import ServerConnection


class ServicerCall(Call):
    """The server's side of one RPC, for `grpc.RpcMethodHandler`s of all four kinds."""

    serializer: Any = None
    _request: bytes | None = None
    _task: asyncio.Task[None] | None = None
    _drained: asyncio.Future[None] | None = None
    _code: int | None = None
    _details = ""
    _trailing: Metadata = ()
    _trailing_block = b""
    _is_cancelled = False
    _done_callbacks: tuple[Callable[[Any], None], ...] = ()

    # What the connection tells.

    def begin(self, data: bytes, *, is_ended: bool) -> None:
        """A handler of a stream of requests starts at once, others with the request."""
        if self._handler.request_streaming:
            self._incoming = self.incoming
            self._spawn()
        super().begin(data, is_ended=is_ended)

    def serve(self, request: bytes) -> None:
        """The request is there, of a handler with one request."""
        self._request = request
        self._spawn()

    def drained(self) -> None:
        """What had to wait is out: whoever waits in `write` may go on."""
        super().drained()
        if self.is_ready and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def fail(self, error: RpcError, *, is_late: bool = False) -> None:
        """End the call from outside of its handler, unless it has ended."""
        if self._connection is not None:
            self._is_cancelled = True
            super().fail(error, is_late=is_late)
            self._cancel_task()

    def abandon(self) -> None:
        """The stream is gone, and the client with it or not: there is nobody to answer."""
        if self._connection is not None:
            self._is_cancelled = True
            self._code = Code.CANCELLED
            super().abandon()
            self._cancel_task()

    # What servicers use.

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send the response headers; at most once, before the first message."""
        self.send_head(initial_metadata)

    async def write(self, message: Any) -> None:
        """Send one response message; returns when the transport takes the next one."""
        data = message if self.serializer is None else self.serializer(message)
        connection = self._alive()
        if len(data) > connection.max_message_bytes:
            await self.abort(Code.RESOURCE_EXHAUSTED, f"the response has {len(data)} bytes, which is more than allowed")
        self.push(data)
        connection.turn_bytes += len(data)
        if connection.turn_bytes > connection.max_turn_bytes:
            # The transport must see it before it can say that it is enough.
            await asyncio.sleep(0)
            self._alive()
        while not self.is_ready:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
            self._alive()

    async def read(self) -> Any:
        """The next request message of a stream of requests; `grpc.aio.EOF` after the last one."""
        data = await self.incoming.read()
        if data is None:
            return grpc.aio.EOF
        deserializer = self._handler.request_deserializer
        return data if deserializer is None else deserializer(data)

    def take_request(self) -> bytes:
        """The only message."""
        request, self._request = self._request, None
        assert request is not None
        return request

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Metadata to send with the status."""
        self._trailing_block = status.encode_metadata(trailing_metadata)
        self._trailing = trailing_metadata

    async def abort(self, code: Any, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with an error status. Raises `grpc.aio.AbortError`, which the handler lets pass."""
        number = status_number(code)
        if number == Code.OK:
            raise ValueError("an aborted call can't have the status OK")
        block = status.encode_metadata(trailing_metadata) if trailing_metadata else self._trailing_block
        self.finish(number, details, block)
        raise grpc.aio.AbortError("Locally aborted.")

    def set_code(self, code: Any) -> None:
        """The status to end with when the handler returns."""
        self._code = status_number(code)

    def set_details(self, details: str) -> None:
        """Its message."""
        self._details = details

    def code(self) -> int:
        """GRPC's number of the status so far."""
        return Code.OK if self._code is None else self._code

    def details(self) -> str:
        """The status message so far."""
        return self._details

    def finish_as_set(self) -> None:
        """End the call as `set_code`, `set_details` and `set_trailing_metadata` have it: OK when they say nothing."""
        self.finish(self.code(), self._details, self._trailing_block)

    def finish(self, code: int, details: str = "", trailing_block: bytes = b"") -> None:
        """End the call with a status, and encoded metadata. A call that has ended is left alone."""
        if self._connection is not None:
            self._code, self._details = code, details
            super().finish(code, details, trailing_block)

    def trailing_metadata(self) -> Metadata:
        """What `set_trailing_metadata` was given."""
        return self._trailing

    def cancelled(self) -> bool:
        """Whether the call ended without its handler's doing."""
        return self._is_cancelled

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have the callback called with this context when the call has ended."""
        if self._connection is None:
            callback(self)
        else:
            self._done_callbacks += (callback,)

    def outlet(self, on_ready: Callable[[], None]) -> Call:
        """Begin to take messages by `push`. `on_ready` is called whenever `is_ready` becomes true again."""
        self.on_ready = on_ready
        return self

    def _spawn(self) -> None:
        connection = self._alive()
        task = self._task = connection.loop.create_task(run(self._handler, self))
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    def _let_go(self, connection: "ServerConnection") -> None:
        super()._let_go(connection)
        callbacks, self._done_callbacks = self._done_callbacks, ()
        for callback in callbacks:
            connection.loop.call_soon(callback, self)

    def _cancel_task(self) -> None:
        # Let go of it: its exception leads through the handler's frames back to here.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
