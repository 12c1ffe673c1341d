"""SETTINGS: what the peer may set, and what we say (RFC 9113, section 6.5)."""

from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError
from gateway.h2.protocol.frames import MAX_FRAME_BYTES, read_settings

HEADER_TABLE_SIZE = 0x1
ENABLE_PUSH = 0x2
MAX_CONCURRENT_STREAMS = 0x3
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_SIZE = 0x5
MAX_HEADER_LIST_SIZE = 0x6

DEFAULT_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = 0x7FFF_FFFF
_MAX_MAX_FRAME_SIZE = 0xFF_FFFF
_MAX_SETTINGS = 64


class PeerSettings:
    """What the client has set, as far as it concerns a server that does not push and compresses nothing."""

    __slots__ = ("initial_window_bytes",)

    def __init__(self) -> None:
        self.initial_window_bytes = DEFAULT_WINDOW_BYTES

    def apply(self, payload: bytes) -> None:
        """Take a SETTINGS payload. Raises `Http2ConnectionError` for what is out of range; unknown settings are ignored."""
        if len(payload) % 6:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is no multiple of 6 bytes")
        if len(payload) > _MAX_SETTINGS * 6:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
        for name, value in read_settings(payload):
            if name == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW_BYTES:
                    raise Http2ConnectionError(
                        ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE above 2^31-1"
                    )
                self.initial_window_bytes = value
            elif name == MAX_FRAME_SIZE and not MAX_FRAME_BYTES <= value <= _MAX_MAX_FRAME_SIZE:
                # Checked only: frames of more than the least maximum would let one stream hold the connection longer.
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE out of range")
            elif name == ENABLE_PUSH and value > 1:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
