"""One stream: its windows, what waits to be sent on it, and which sides have ended."""

from typing import TYPE_CHECKING, Any

from gateway.h2.protocol.frames import DATA, MAX_FRAME_BYTES

if TYPE_CHECKING:
    from gateway.h2.protocol.outbound import Outbound

PREFIX_BYTES = 5
"""Before every gRPC message: a flag and its length."""
MAX_PUSH_BYTES = MAX_FRAME_BYTES - PREFIX_BYTES
"""A larger message takes more than one frame."""


_SMALL_BYTES = 1024


def _framing(size: int) -> tuple[bytes, bytes]:
    """What stands around the stream's id before a message of this size: the frame's length and type, gRPC's prefix."""
    return (size + PREFIX_BYTES).to_bytes(3) + bytes((DATA, 0)), b"\0" + size.to_bytes(4)


# A list: the interpreter has a short cut for it.
_framings = [_framing(size) for size in range(_SMALL_BYTES)]


class _Sending:
    """What a message touches, in one place: the slots of a base class come first."""

    __slots__ = ("backlog", "has_ended", "has_headers", "id", "out", "send_window")


class Stream(_Sending):
    """A request and its response. Dropped from the connection when both sides have ended or either has reset it.

    `owner` is the upper layer's; it is set to None when the stream is closed, as the owner holds the stream.
    """

    __slots__ = (
        "expected_bytes",
        "has_peer_ended",
        "is_closed",
        "number",
        "owner",
        "receive_credit",
        "receive_left",
        "received_bytes",
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

        The hot path: everything else goes by `Outbound.send_data`. Whoever writes for the connection learns of it.
        """
        size = len(message)
        out = self.out
        if size > out.max_push_bytes:
            return False
        length = size + PREFIX_BYTES
        if length > self.send_window or length > out.send_window or self.backlog or out.is_paused:
            return False
        if self.has_ended or not self.has_headers:
            return False
        self.send_window -= length
        out.send_window -= length
        parts = out.parts
        if not parts:
            out.wake()
        head, prefix = _framings[size] if size < _SMALL_BYTES else _framing(size)
        parts.append(head + self.id + prefix + message)
        return True
