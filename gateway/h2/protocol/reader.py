"""From bytes to frames: the preface, the cut between frames, and what a frame must look like whatever it says."""

from collections.abc import Iterator

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError, Http2StreamError
from gateway.h2.protocol.frames import HEAD_BYTES, MAX_FRAME_BYTES, PREFACE

Frame = tuple[int, int, int, bytes]
"""Type, flags, stream and payload."""

_ON_STREAM = frozenset((frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION))
_ON_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_PAYLOAD_BYTES = {frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_MIN_GOAWAY_BYTES = 8
_PRIORITY_BYTES = 5


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._buffer = b""
        self._has_preface = False

    @property
    def is_empty(self) -> bool:
        """Whether no part of a frame is left."""
        return not self._buffer

    def read(self, data: bytes) -> Iterator[Frame]:
        """The whole frames there are; must be used up. Raises `Http2ConnectionError`."""
        if self._buffer:
            data = self._buffer + data
        self._buffer = b""
        at, size = 0, len(data)
        if not self._has_preface:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
            if size < len(PREFACE):
                self._buffer = data
                return
            self._has_preface = True
            at = len(PREFACE)
        while size - at >= HEAD_BYTES:
            length = int.from_bytes(data[at : at + 3])
            if length > MAX_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a frame is larger than SETTINGS_MAX_FRAME_SIZE")
            begin = at + HEAD_BYTES
            end = begin + length
            if end > size:
                break
            number = int.from_bytes(data[at + 5 : begin]) & frames.MAX_STREAM_ID
            yield data[at + 3], data[at + 4], number, data[begin:end]
            at = end
        self._buffer = data[at:]


def check_shape(kind: int, number: int, payload: bytes) -> None:
    """Raises for a frame that is where it can't be, or not as long as all of its type are."""
    if (not number and kind in _ON_STREAM) or (number and kind in _ON_CONNECTION):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {number}")
    size = len(payload)
    if _PAYLOAD_BYTES.get(kind, size) != size or (kind == frames.GOAWAY and size < _MIN_GOAWAY_BYTES):
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {size} bytes")
    if kind == frames.PRIORITY and size != _PRIORITY_BYTES:
        raise Http2StreamError(number, ErrorCode.FRAME_SIZE_ERROR, f"PRIORITY with {size} bytes")


def without_padding(payload: bytes) -> bytes:
    """The payload of a frame with the flag PADDED. Raises `Http2ConnectionError`."""
    if not payload or payload[0] >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def without_priority(payload: bytes) -> bytes:
    """The payload of HEADERS with the flag PRIORITY, which is ignored. Raises `Http2ConnectionError`."""
    if len(payload) < _PRIORITY_BYTES:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
    return payload[_PRIORITY_BYTES:]
