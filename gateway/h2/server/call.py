"""One call: the context that its handler gets, and the stream below.

What a servicer may use of `grpc.aio.ServicerContext` is here, with its meaning. When the client cancels, goes away or
its deadline passes, the handler's task is cancelled. `push` is for those who have a message now and don't wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from gateway.h2.protocol.streams import Stream
from gateway.h2.rpc import status
from gateway.h2.rpc.heads import CallHead
from gateway.h2.rpc.messages import MessageReader, prefixed
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.handlers import run, status_number
from gateway.h2.server.incoming import Incoming
from gateway.h2.server.late_end import LateEnd

if TYPE_CHECKING:
    from gateway.h2.server.connection import ServerConnection
    from gateway.h2.server.server import Shared

Metadata = Sequence[tuple[str, str | bytes]]


class Call:
    """The server's side of one RPC."""

    def __init__(
        self, connection: "ServerConnection", stream: Stream, head: CallHead, handler: Any, shared: "Shared"
    ) -> None:
        self.method = head.method
        self.serializer: Any = None
        self.is_ready = True
        self._connection: ServerConnection | None = connection
        self._peer = connection.peer
        self._stream = stream
        self._head = head
        self._handler = handler
        self._max_message_bytes = shared.max_message_bytes
        self.incoming = Incoming(
            MessageReader(shared.limits.max_request_bytes, is_gzip=head.is_gzip),
            is_single=not handler.request_streaming,
            give_back=self._give_back,
            hold=connection.hold,
        )
        self._deadline_at = None if head.timeout_s is None else connection.loop.time() + head.timeout_s
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._code: int | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._trailing_block = b""
        self._is_cancelled = False
        self._done_callbacks: list[Callable[[Any], None]] = []
        self._deadline_slot = None if self._deadline_at is None else connection.deadlines.add(self, self._deadline_at)

    # What the connection tells.

    def begin(self) -> None:
        """The call is known to its stream: a handler of a stream of requests starts at once, others with the request."""
        if self._handler.request_streaming:
            self._start()

    def receive(self, data: bytes) -> None:
        """A piece of the request."""
        try:
            self.incoming.receive(data)
        except RpcError as error:
            self._fail_soon(error)

    def end_request(self) -> None:
        """The client has sent everything."""
        try:
            is_whole = self.incoming.end()
        except RpcError as error:
            self._fail_soon(error)
        else:
            if is_whole and not self._handler.request_streaming:
                self._start()

    def _fail_soon(self, error: RpcError) -> None:
        """After the handler's first step: one that refuses the call has no interest in what else is wrong with it."""
        self.incoming.close()
        asyncio.get_running_loop().call_soon(self.fail, error)

    def drained(self) -> None:
        """What had to wait is out: the next message goes out at once.

        Also told of a message that went out within its `push`, which made nobody wait, and by then another may wait.
        """
        if self._connection is None or self.is_ready or self._stream.backlog:
            return
        self.is_ready = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._on_ready is not None:
            self._on_ready()

    def expire(self) -> None:
        """The deadline has passed."""
        self._deadline_slot = None
        self.fail(RpcError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def fail(self, error: RpcError) -> None:
        """End the call from outside of its handler, unless it has ended."""
        if self._connection is not None:
            self._is_cancelled = True
            self.finish(error.code, error.message)
            self._cancel_task()

    def abandon(self) -> None:
        """The stream is gone, and the client with it or not: there is nobody to answer."""
        if self._connection is not None:
            self._is_cancelled = True
            self._code = Code.CANCELLED
            self._let_go()
            self._cancel_task()

    # What servicers use.

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The request headers: lower-case keys, bytes values for `-bin` keys."""
        return self._head.metadata

    def peer(self) -> str:
        """The client's address, as `ipv4:HOST:PORT`."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        if self._deadline_at is None:
            return None
        return max(0.0, self._deadline_at - asyncio.get_running_loop().time())

    async def send_initial_metadata(self, initial_metadata: Metadata) -> None:
        """Send the response headers; at most once, before the first message."""
        connection = self._alive()
        if self._stream.has_headers:
            raise grpc.aio.UsageError("the response headers have been sent")
        connection.http.send_headers(self._stream, status.head(initial_metadata))
        connection.write_soon()

    async def write(self, message: Any) -> None:
        """Send one response message; returns when the transport takes the next one."""
        data = message if self.serializer is None else self.serializer(message)
        if len(data) > self._max_message_bytes:
            await self.abort(Code.RESOURCE_EXHAUSTED, f"the response has {len(data)} bytes, which is more than allowed")
        connection = self._alive()
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

    async def abort_with_status(self, error: Any) -> NoReturn:
        """The same with a `grpc.Status`."""
        await self.abort(error.code, error.details, error.trailing_metadata or ())

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

    def trailing_metadata(self) -> Metadata:
        """What `set_trailing_metadata` was given."""
        return self._trailing

    def cancelled(self) -> bool:
        """Whether the call ended without its handler's doing."""
        return self._is_cancelled

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._connection is None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have the callback called with this context when the call has ended."""
        if self._connection is None:
            callback(self)
        else:
            self._done_callbacks.append(callback)

    def outlet(self, on_ready: Callable[[], None]) -> "Call":
        """Begin to take messages by `push`. `on_ready` is called whenever `is_ready` becomes true again."""
        self._on_ready = on_ready
        return self

    def push(self, message: bytes) -> None:
        """Send one serialised message without waiting. Only while `is_ready`, or it will be held in full."""
        connection = self._connection
        if connection is None:
            return
        stream = self._stream
        if not stream.has_headers:
            connection.http.send_headers(stream, status.HEAD)
        if not stream.push(message):
            connection.http.send_data(stream, prefixed(message))
            self.is_ready = not stream.backlog
        if not connection.is_scheduled:
            connection.write_soon()

    def _start(self) -> None:
        connection = self._alive()
        task = self._task = connection.loop.create_task(run(self._handler, self))
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    def finish(self, code: int, details: str, trailing: bytes = b"") -> None:
        """End the call with a status, and encoded metadata. A call that has ended is left alone."""
        connection = self._connection
        if connection is None:
            return
        self._code, self._details = code, details
        http, stream = connection.http, self._stream
        self._let_go()
        if code != Code.OK and not stream.has_headers:
            LateEnd(connection, stream, status.trailers_only(code, details, trailing))
            return
        if not stream.has_headers:
            http.send_headers(stream, status.HEAD)
        http.send_trailers(stream, status.trailers(code, details, trailing))
        connection.write_soon()

    def _let_go(self) -> None:
        """The call is over: nothing refers from here to the connection or back any more."""
        connection = self._connection
        assert connection is not None
        self._connection = None
        self.is_ready = False
        self._stream.owner = None
        self._on_ready = None
        self.incoming.close()
        if self._deadline_slot is not None:
            connection.deadlines.remove(self, self._deadline_slot)
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            connection.loop.call_soon(callback, self)

    def _alive(self) -> "ServerConnection":
        if self._connection is None:
            raise grpc.aio.InternalError("the call has ended")
        return self._connection

    def _cancel_task(self) -> None:
        # Let go of it: its exception leads through the handler's frames back to here.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _give_back(self, size: int) -> None:
        connection = self._alive()
        connection.http.consume(self._stream, size)
        connection.write_soon()
