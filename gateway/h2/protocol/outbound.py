"""What leaves a connection: frames in one list until they are taken, bodies no further than the windows allow.

Streams whose body waits for the connection's window, or for its transport, take turns, one frame each.
"""

from collections.abc import Callable

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError
from gateway.h2.protocol.frames import DATA, HEADERS_HEADS, MAX_FRAME_BYTES
from gateway.h2.protocol.header_blocks import first_block
from gateway.h2.protocol.limits import Budgets, Limits
from gateway.h2.protocol.settings import DEFAULT_WINDOW_BYTES, MAX_WINDOW_BYTES, PeerSettings
from gateway.h2.protocol.streams import MAX_PUSH_BYTES, Stream


def nobody() -> None:
    """Whoever pushes messages writes them out as well."""


class Outbound:
    """The sending half of a connection."""

    __slots__ = (
        "_budgets",
        "_control_frames",
        "_has_sent_headers",
        "_limits",
        "drained",
        "ended",
        "is_paused",
        "max_push_bytes",
        "parts",
        "peer",
        "send_window",
        "turns",
        "wake",
    )

    def __init__(self, limits: Limits, budgets: Budgets) -> None:
        self.parts: list[bytes] = []
        # Larger messages don't go by `Stream.push`.
        self.max_push_bytes = MAX_PUSH_BYTES
        # Called with the first message that a stream pushes when nothing else is to be written.
        self.wake: Callable[[], None] = nobody
        self.send_window = DEFAULT_WINDOW_BYTES
        self.is_paused = False
        self.peer = PeerSettings()
        # Since they were last looked at: streams whose backlog became empty, and those whose response is out.
        self.drained: list[Stream] = []
        self.ended: list[Stream] = []
        self._limits = limits
        self._budgets = budgets
        self._control_frames = 0
        self._has_sent_headers = False
        # Each has something to send and a window of its own to send it in.
        self.turns: dict[Stream, None] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a stream could go on sending in the next loop turn, without any news from the peer."""
        return bool(self.turns) and self.send_window > 0 and not self.is_paused

    def take(self) -> bytes:
        """Everything that is to be written now."""
        parts = self.parts
        if not parts:
            return b""
        if len(parts) > self._control_frames:
            self._budgets.has_sent(len(parts) - self._control_frames)
        self._control_frames = 0
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data

    def control(self, frame: bytes) -> None:
        """A frame that is no part of a response."""
        self.parts.append(frame)
        self._control_frames += 1

    @property
    def is_flooded(self) -> bool:
        """Whether the peer asks for answers and does not read them."""
        return self.is_paused and len(self.parts) > self._limits.max_waiting_frames

    def send_headers(self, stream: Stream, block: bytes, *, is_end: bool = False) -> None:
        """The response's header block; with `is_end` the whole response."""
        stream.has_headers = True
        if not self._has_sent_headers:
            self._has_sent_headers = True
            block = first_block(block)
        size = len(block)
        if size <= MAX_FRAME_BYTES and not is_end and not self.is_paused:
            self.parts += (HEADERS_HEADS[size], stream.id, block)
            return
        self.parts.append(frames.headers(stream.number, block, is_end=is_end))
        if is_end:
            stream.has_ended = True
            self.ended.append(stream)

    def send_data(self, stream: Stream, data: bytes) -> None:
        """A piece of the response's body, which may have to wait."""
        if stream.backlog:
            stream.backlog += data
        else:
            stream.backlog = bytearray(data)
        self.turns[stream] = None
        self.pump()

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        """The end of the response, after all of its body."""
        stream.trailers = block
        if not stream.backlog:
            self._end(stream, block)

    def pump(self) -> None:
        """Send of what waits as much as windows and the limit per turn allow."""
        turns, left = self.turns, self._limits.max_turn_bytes
        while turns and self.send_window > 0 and left > 0 and not self.is_paused:
            stream = next(iter(turns))
            del turns[stream]
            size = min(len(stream.backlog), stream.send_window, self.send_window, MAX_FRAME_BYTES)
            if size <= 0:
                continue  # its window is used up: `grow` brings it back
            self._send_frame(stream, size)
            left -= size
            if stream.backlog:
                turns[stream] = None
            else:
                self.drained.append(stream)
                if stream.trailers is not None:
                    self._end(stream, stream.trailers)

    def grow(self, stream: Stream | None, increment: int) -> None:
        """The peer takes more, on one stream or (None) on the connection. Raises `Http2ConnectionError`."""
        if stream is not None:
            stream.send_window += increment
            if stream.backlog:
                self.turns[stream] = None
        else:
            self.send_window += increment
            if self.send_window > MAX_WINDOW_BYTES:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is above 2^31-1")
        self.pump()

    def drop(self, stream: Stream) -> None:
        """The stream is gone, and with it what it had to send."""
        self.turns.pop(stream, None)
        stream.backlog = b""
        stream.trailers = None

    def _send_frame(self, stream: Stream, size: int) -> None:
        backlog = stream.backlog
        assert isinstance(backlog, bytearray)
        stream.unread_since = None
        stream.send_window -= size
        self.send_window -= size
        with memoryview(backlog) as view:
            payload = bytes(view[:size])
        del backlog[:size]
        self.parts.append(frames.frame(DATA, 0, stream.number, payload))

    def _end(self, stream: Stream, trailers: bytes) -> None:
        self.parts.append(frames.headers(stream.number, trailers, is_end=True))
        stream.trailers = None
        stream.has_ended = True
        self.ended.append(stream)
