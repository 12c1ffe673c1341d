"""From bytes to frames: the preface, the cut between frames, and what a frame must look like whatever it says."""

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError, Http2StreamError
from gateway.h2.protocol.frames import PREFACE

_ON_STREAM = frozenset((frames.DATA, frames.HEADERS, frames.PRIORITY, frames.RST_STREAM, frames.CONTINUATION))
_ON_CONNECTION = frozenset((frames.SETTINGS, frames.PING, frames.GOAWAY))
_PAYLOAD_BYTES = {frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_MIN_GOAWAY_BYTES = 8
_PRIORITY_BYTES = 5


class FrameReader:
    """What is between the frames of a connection: the preface before the first one, and a frame that is not whole."""

    __slots__ = ("has_preface", "rest")

    def __init__(self) -> None:
        self.rest = b""
        self.has_preface = False

    def begin(self, data: bytes) -> int:
        """Where the first frame begins, 0 as long as the preface is not whole. Raises `Http2ConnectionError`."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
        if len(data) < len(PREFACE):
            self.rest = data
            return 0
        self.has_preface = True
        return len(PREFACE)


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
