"""An error that is known before its request has ended.

It waits for that end, for a moment: a client that is told while it sends may report that it could not send, instead
of what it was told (grpc.aio's does).
"""

from typing import TYPE_CHECKING

from gateway.h2.protocol.streams import Stream

if TYPE_CHECKING:
    from gateway.h2.rpc.status import RpcError
    from gateway.h2.server.connection import ServerConnection

WAIT_S = 0.05


class LateEnd:
    """The owner of a stream whose response is one header block."""

    __slots__ = ("_block", "_connection", "_interval", "_stream")

    def __init__(self, connection: "ServerConnection", stream: Stream, block: bytes) -> None:
        self._connection = connection
        self._stream = stream
        self._block = block
        self._interval: int | None = None
        if stream.has_peer_ended or stream.is_closed:
            self._send()
        else:
            stream.owner = self
            self._interval = connection.deadlines.add(self, connection.loop.time() + WAIT_S)

    def receive(self, data: bytes) -> None:
        """Nobody is interested, and the client's window stays as it is."""

    def receive_last(self, _: bytes) -> None:
        """What was waited for, with more that nobody is interested in."""
        self._send()

    def end_request(self) -> None:
        """What was waited for."""
        self._send()

    def expire(self) -> None:
        """Long enough."""
        self._interval = None
        self._send()

    def fail(self, _: "RpcError") -> None:
        """The connection is closing."""
        self._send()

    def drained(self) -> None:
        """Nothing was sent that could have waited."""

    def abandon(self) -> None:
        """The stream is gone."""
        self._stream.owner = None
        if self._interval is not None:
            self._connection.deadlines.remove(self, self._interval)

    def _send(self) -> None:
        self.abandon()
        self._connection.http.send_headers(self._stream, self._block, is_end=True)
        self._connection.write_soon()
