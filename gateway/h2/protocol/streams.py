"""One stream: its windows, what waits to be sent on it, and which sides have ended."""

from typing import TYPE_CHECKING, Any

from gateway.h2.protocol.frames import DATA_HEADS, MAX_FRAME_BYTES

if TYPE_CHECKING:
    from gateway.h2.protocol.outbound import Outbound

PREFIX_BYTES = 5
"""Before every gRPC message: a flag and its length."""
_MAX_PUSH_BYTES = MAX_FRAME_BYTES - PREFIX_BYTES


class _Prefixes(dict[int, bytes]):
    """By size of a message: gRPC's prefix of an uncompressed one."""

    def __missing__(self, size: int) -> bytes:
        prefix = self[size] = b"\0" + size.to_bytes(4)
        return prefix


# Bounded: sizes are at most `_MAX_PUSH_BYTES`.
_prefixes = _Prefixes()


class Stream:
    """A request and its response. Dropped from the connection when both sides have ended or either has reset it.

    `owner` is the upper layer's; it is set to None when the stream is closed, as the owner holds the stream.
    """

    __slots__ = (
        "backlog",
        "expected_bytes",
        "has_ended",
        "has_headers",
        "has_peer_ended",
        "id",
        "is_closed",
        "number",
        "out",
        "owner",
        "receive_credit",
        "receive_left",
        "received_bytes",
        "send_window",
        "trailers",
        "unread_since",
    )

    def __init__(self, number: int, out: "Outbound", send_window: int, window_bytes: int) -> None:
        self.number = number
        self.id = number.to_bytes(4)
        self.out = out
        self.send_window = send_window
        # What the client may still send, and what of that which it has sent is done with.
        self.receive_left = window_bytes
        self.receive_credit = 0
        self.received_bytes = 0
        # From content-length, None without.
        self.expected_bytes: int | None = None
        self.backlog: bytes | bytearray = b""
        # What ends the response once the backlog is out.
        self.trailers: bytes | None = None
        # Since when the client has taken nothing of the backlog, as noticed by whoever looks at the clock.
        self.unread_since: float | None = None
        self.has_headers = False
        self.has_ended = False
        self.has_peer_ended = False
        self.is_closed = False
        self.owner: Any = None

    def push(self, message: bytes) -> bool:
        """Send one gRPC message as one DATA frame, when the windows allow that. False: nothing was sent.

        The hot path: everything else goes by `Outbound.send_data`.
        """
        size = len(message)
        if size > _MAX_PUSH_BYTES:
            return False
        length = size + PREFIX_BYTES
        out = self.out
        if length > self.send_window or length > out.send_window or self.backlog or out.is_paused:
            return False
        if self.has_ended or not self.has_headers:
            return False
        self.send_window -= length
        out.send_window -= length
        out.parts += (DATA_HEADS[length], self.id, _prefixes[size], message)
        return True
