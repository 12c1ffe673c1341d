"""One call and the stream below it.

A handler with an attribute `direct` is called with the request and the call once the request is there. It has no task: it
sends by `push`, goes on in `on_ready`, and ends the call by `finish`; `on_closed` is called when the call has ended without
that, with True when its deadline has passed, with False when the client is gone. All other handlers have a task and get
a `ServicerCall`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from gateway.h2.protocol.streams import Stream
from gateway.h2.rpc import status
from gateway.h2.rpc.heads import CallHead
from gateway.h2.rpc.messages import MessageReader, only_message, prefixed
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.handlers import note_defect
from gateway.h2.server.incoming import Incoming
from gateway.h2.server.late_end import LateEnd

if TYPE_CHECKING:
    from gateway.h2.server.connection import ServerConnection

Metadata = Sequence[tuple[str, str | bytes]]


class Call:
    """The server's side of one RPC."""

    # What many calls do without, or have as most have it.
    is_ready = True
    on_ready: Callable[[], None] | None = None
    on_closed: Callable[[bool], None] | None = None
    _incoming: Incoming | None = None
    _deadline_interval: int | None = None

    def __init__(
        self,
        connection: "ServerConnection",
        stream: Stream,
        head: CallHead,
        handler: Any,
        deadline_at: float | None,
    ) -> None:
        self.head = head
        # Of the loop's clock.
        self.deadline_at = deadline_at
        self._connection: ServerConnection | None = connection
        self._peer = connection.peer
        self._stream = stream
        self._handler = handler
        if deadline_at is not None:
            self._deadline_interval = connection.deadlines.add(self, deadline_at)

    # What the connection tells.

    def begin(self, data: bytes, *, is_ended: bool) -> None:
        """The call is known to its stream, and so much of its request has come with the headers."""
        if is_ended:
            self.receive_last(data)
        elif data:
            self.receive(data)

    def receive(self, data: bytes) -> None:
        """A piece of the request."""
        try:
            self.incoming.receive(data)
        except RpcError as error:
            self._fail_soon(error)

    def receive_last(self, data: bytes) -> None:
        """A piece of the request, and its end."""
        if self._incoming is None and not self._handler.request_streaming:
            message = only_message(data, self._alive().max_request_bytes)
            if message is not None:
                self.serve(message)
                return
        self.receive(data)
        self.end_request()

    def serve(self, request: bytes) -> None:
        """The request is there, of a handler with one request."""
        try:
            self._handler.direct(request, self)
        except RpcError as error:
            self.finish(error.code, error.message)
        except Exception:  # noqa: BLE001 - a defect of one handler must not touch other calls
            self.finish(Code.UNKNOWN, note_defect(self.head.method))

    def end_request(self) -> None:
        """The client has sent everything."""
        try:
            is_whole = self.incoming.end()
        except RpcError as error:
            self._fail_soon(error)
        else:
            if is_whole and not self._handler.request_streaming:
                self.serve(self.incoming.take())

    @property
    def incoming(self) -> Incoming:
        """The request side, of calls whose request does not come as one."""
        if self._incoming is None:
            connection = self._alive()
            self._incoming = Incoming(
                MessageReader(connection.max_request_bytes, is_gzip=self.head.is_gzip),
                is_single=not self._handler.request_streaming,
                give_back=self._give_back,
                hold=connection.hold,
            )
        return self._incoming

    def drained(self) -> None:
        """What had to wait is out: the next message goes out at once.

        Also told of a message that went out within its `push`, which made nobody wait, and by then another may wait.
        """
        if self._connection is None or self.is_ready or self._stream.backlog:
            return
        self.is_ready = True
        if self.on_ready is not None:
            self.on_ready()

    def expire(self) -> None:
        """The deadline has passed."""
        self._deadline_interval = None
        self.fail(RpcError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"), is_late=True)

    def fail(self, error: RpcError, *, is_late: bool = False) -> None:
        """End the call from outside of its handler, unless it has ended."""
        if self._connection is not None:
            on_closed = self.on_closed
            self.finish(error.code, error.message)
            if on_closed is not None:
                on_closed(is_late)

    def abandon(self) -> None:
        """The stream is gone, and the client with it or not: there is nobody to answer."""
        if self._connection is not None:
            on_closed = self.on_closed
            self._let_go(self._connection)
            if on_closed is not None:
                on_closed(False)

    # What handlers use.

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The request headers: lower-case keys, bytes values for `-bin` keys."""
        return self.head.invocation_metadata

    def peer(self) -> str:
        """The client's address, as `ipv4:HOST:PORT`."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        if self.deadline_at is None:
            return None
        return max(0.0, self.deadline_at - asyncio.get_running_loop().time())

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._connection is None

    def send_head(self, initial_metadata: Metadata) -> None:
        """Send the response headers; at most once, before the first message."""
        connection = self._alive()
        if self._stream.has_headers:
            raise grpc.aio.UsageError("the response headers have been sent")
        connection.http.send_headers(self._stream, status.head(initial_metadata))
        connection.write_soon()

    def push(self, message: bytes) -> None:
        """Send one serialised message without waiting. Only while `is_ready`, or it will be held in full."""
        connection = self._connection
        if connection is None:
            return
        stream = self._stream
        if not stream.has_headers:
            connection.http.send_headers(stream, status.HEAD)
        if not stream.push(message):
            if len(message) > connection.max_message_bytes:
                self.fail(
                    RpcError(
                        Code.RESOURCE_EXHAUSTED,
                        f"the response has {len(message)} bytes, which is more than allowed",
                    )
                )
                return
            connection.http.send_data(stream, prefixed(message))
            self.is_ready = not stream.backlog
        if not connection.is_scheduled:
            connection.write_soon()

    @property
    def stream(self) -> Stream:
        """Takes messages by itself after the first one; those that it refuses are for `push`."""
        return self._stream

    def finish(self, code: int, details: str = "", trailing_block: bytes = b"") -> None:
        """End the call with a status, and encoded metadata. A call that has ended is left alone."""
        connection = self._connection
        if connection is None:
            return
        http, stream = connection.http, self._stream
        self._let_go(connection)
        if not stream.has_headers:
            if code:
                LateEnd(connection, stream, status.trailers_only(code, details, trailing_block))
                return
            http.send_headers(stream, status.HEAD)
        block = status.trailers(code, details, trailing_block) if code or details else status.OK + trailing_block
        http.finish(stream, block)
        if not connection.is_scheduled:
            connection.write_soon()

    def _fail_soon(self, error: RpcError) -> None:
        """After the handler's first step: one that refuses the call has no interest in what else is wrong with it."""
        self.incoming.close()
        asyncio.get_running_loop().call_soon(self.fail, error)

    def _let_go(self, connection: "ServerConnection") -> None:
        """The call is over: nothing refers from here to the connection or back any more."""
        self._connection = None
        self.is_ready = False
        self._stream.owner = None
        self.on_ready = self.on_closed = None
        if self._incoming is not None:
            self._incoming.close()
        if self._deadline_interval is not None:
            connection.deadlines.remove(self, self._deadline_interval)

    def _alive(self) -> "ServerConnection":
        if self._connection is None:
            raise grpc.aio.InternalError("the call has ended")
        return self._connection

    def _give_back(self, size: int) -> None:
        connection = self._alive()
        connection.http.consume(self._stream, size)
        connection.write_soon()
