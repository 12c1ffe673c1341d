"""One client connection: a transport, the protocol's state, and the calls on it."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

from gateway.h2.protocol.connection import Connection
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    RequestEnded,
    RequestStarted,
    StreamDrained,
    StreamReset,
)
from gateway.h2.protocol.outbound import nobody
from gateway.h2.rpc import status
from gateway.h2.rpc.heads import read_call, read_timeout
from gateway.h2.rpc.messages import only_message
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.call import Call
from gateway.h2.server.handlers import unimplemented
from gateway.h2.server.late_end import LateEnd
from gateway.h2.server.servicer_call import ServicerCall

if TYPE_CHECKING:
    from gateway.h2.server.server import Shared

WRITE_BUFFER_BYTES = 256 * 1024
LINGER_S = 5.0
"""How long a connection that we close may take to take its last bytes."""
_MAX_PARTIAL_BYTES = 16 * 1024 * 1024


class ServerConnection(asyncio.Protocol):
    """Passes bytes to the protocol, and its events to the calls. Writes what has gathered, see `Writes`."""

    def __init__(self, shared: "Shared") -> None:
        self.loop = shared.loop
        self.deadlines = shared.deadlines
        self.tasks = shared.tasks
        self.http = Connection(shared.limits, shared.loop.time(), shared.head_memo)
        out = self.http.out
        out.wake = self.write_soon
        out.max_push_bytes = min(out.max_push_bytes, shared.max_message_bytes)
        self.peer = "unknown"
        self.is_scheduled = False
        # What handlers have written since the transport was last given something.
        self.turn_bytes = 0
        self.max_turn_bytes = shared.limits.max_turn_bytes
        self.max_message_bytes = shared.max_message_bytes
        self.max_request_bytes = shared.limits.max_request_bytes
        self._shared = shared
        self._transport: asyncio.Transport | None = None
        self._partial_bytes = 0
        self._closing_since: float | None = None

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there, its TLS handshake done."""
        # Not every loop's transports are asyncio's by class.
        self._transport = transport = cast("asyncio.Transport", transport)
        self._shared.joining.discard(self)
        self.peer = _peer(transport.get_extra_info("peername"))
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            transport.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._shared.connections.add(self)
        self.write_soon()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._process(self.http.receive(data, self.loop.time()))

    def pause_writing(self) -> None:
        """The transport is full."""
        self.http.pause()

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._process(self.http.resume())

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the reason makes no difference
        """The connection is gone; so are its calls."""
        self._transport = None
        self._process(self.http.close("the connection is lost"))
        self._shared.connections.discard(self)
        self.http.out.wake = nobody  # which was this object's, that holds it

    # What calls use.

    def write_soon(self) -> None:
        """Write at the end of this loop turn, or of the flush that this is part of."""
        if not self.is_scheduled and self._transport is not None:
            self.is_scheduled = True
            self._shared.writes.soon(self)

    def write_out(self) -> None:
        """Hand what waits to the transport, and close it when all is said."""
        self.is_scheduled = False
        self.turn_bytes = 0
        http, transport = self.http, self._transport
        out = http.out
        if transport is None or out.is_paused:
            return
        if out.drained or (out.turns and out.is_waiting):
            self._process(http.pump())
        data = out.take()
        if data:
            transport.write(data)
        if http.is_ending and http.is_done:
            self._close()
        elif out.turns and out.is_waiting:
            self.write_soon()

    def hold(self, size: int) -> None:
        """Incomplete messages take so many bytes more. Raises `RpcError` when all of them take too many."""
        self._partial_bytes += size
        limit = self._shared.limits.max_request_bytes + _MAX_PARTIAL_BYTES
        if size > 0 and self._partial_bytes > limit:
            raise RpcError(
                Code.RESOURCE_EXHAUSTED, f"incomplete messages on this connection take more than {limit} bytes"
            )

    # What the server tells.

    def check(self, now: float) -> None:
        """Look at the clock."""
        if self._closing_since is not None:
            if now - self._closing_since >= LINGER_S:
                self.abort()
            return
        self._process(self.http.check(now))

    def drain(self) -> None:
        """Take no new calls, and close when the last one has ended."""
        self.http.drain(self.loop.time())
        self.write_soon()

    def shut_down(self, error: RpcError) -> None:
        """End every call with the error, then the connection."""
        for stream in list(self.http.streams.values()):
            if stream.owner is not None:
                stream.owner.fail(error)
        self._process(self.http.close(error.message))
        self.write_out()

    def abort(self) -> None:
        """Close without another word."""
        if self._transport is not None:
            self._transport.abort()

    def _process(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, RequestStarted):
                self._begin(event)
            elif isinstance(event, ConnectionFailed):
                self._failed(event.code, event.message)
            elif event.stream.owner is not None:
                _tell(event.stream.owner, event)
        http = self.http
        if not self.is_scheduled and (http.out.parts or (http.is_ending and http.is_done)):
            self.write_soon()

    def _begin(self, event: RequestStarted) -> None:
        stream = event.stream
        if stream.is_closed:
            return  # reset in the same breath
        try:
            if event.head is None:
                raise self._too_large()
            head = event.head.read
            if head is None:
                head = event.head.read = read_call(event.head)
            timeout = event.timeout
            deadline_at = None if timeout is None else self.loop.time() + read_timeout(timeout)
            handlers = self._shared.handlers
            handler = handlers.find(head) if handlers.only is None else handlers.only(head)
            if handler is None:
                raise unimplemented()
        except RpcError as error:
            self._refuse(event, error)
            return
        direct = getattr(handler, "direct", None)
        call: Call
        if direct is None:
            call = stream.owner = ServicerCall(self, stream, head, handler, deadline_at)
        else:
            call = stream.owner = Call(self, stream, head, handler, deadline_at)
            request = only_message(event.data, self.max_request_bytes) if event.is_ended else None
            if request is not None:
                call.serve(request)
                return
        call.begin(event.data, is_ended=event.is_ended)

    def _too_large(self) -> RpcError:
        limit = self._shared.limits.max_header_list_bytes
        return RpcError(Code.RESOURCE_EXHAUSTED, f"the metadata is larger than {limit} bytes")

    def _refuse(self, event: RequestStarted, error: RpcError) -> None:
        if error.http_status == 200:
            block = status.trailers_only(error.code, error.message, b"", error.fields)
        else:
            block = status.http_error(error)
        LateEnd(self, event.stream, block)

    def _failed(self, code: ErrorCode, message: str) -> None:
        if code != ErrorCode.NO_ERROR:
            self._shared.faults.note(code, message, self.peer)
        if self.http.out.is_paused:
            self.abort()  # what it does not read it need not get

    def _close(self) -> None:
        if self._transport is not None and self._closing_since is None:
            self._closing_since = self.loop.time()
            self._transport.close()


def _tell(owner: Any, event: DataReceived | RequestEnded | StreamDrained | StreamReset) -> None:
    if isinstance(event, DataReceived):
        if event.is_last:
            owner.receive_last(event.data)
        else:
            owner.receive(event.data)
    elif isinstance(event, RequestEnded):
        owner.end_request()
    elif isinstance(event, StreamReset):
        owner.abandon()
    else:
        owner.drained()


def _peer(address: Any) -> str:
    """The client's address as gRPC writes it."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
