"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6)."""

import struct
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
MAX_FRAME_BYTES = 16_384
"""The largest payload that we take and send: the default, which every peer must support."""
MAX_STREAM_ID = 0x7FFF_FFFF

DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

_SETTING = struct.Struct(">HI")
_HEAD = struct.Struct(">HBBBI")
_pack_head = _HEAD.pack
unpack_head = _HEAD.unpack_from
"""The begin of a frame: its length, two bytes of it and one, type, flags, stream with the reserved bit."""
_pack_u32 = struct.Struct(">I").pack
_pack_two = struct.Struct(">II").pack


class FrameHeads(dict[int, bytes]):
    """By size of the payload, up to `MAX_FRAME_BYTES`: the begin of a frame of one type, up to the stream id."""

    def __init__(self, kind: int, flags: int) -> None:
        self._end = bytes((kind, flags))

    def __missing__(self, size: int) -> bytes:
        head = self[size] = size.to_bytes(3) + self._end
        return head


HEADERS_HEADS = FrameHeads(HEADERS, END_HEADERS)
TRAILERS_HEADS = FrameHeads(HEADERS, END_HEADERS | END_STREAM)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One whole frame. The payload must not be larger than `MAX_FRAME_BYTES`."""
    size = len(payload)
    return _pack_head(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def headers(stream_id: int, block: bytes, *, is_end: bool) -> bytes:
    """A header block as HEADERS and as many CONTINUATION frames as it takes."""
    flags = END_STREAM if is_end else 0
    if len(block) <= MAX_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]
    frames = [frame(HEADERS, flags, stream_id, parts[0])]
    frames += (frame(CONTINUATION, 0, stream_id, part) for part in parts[1:-1])
    frames.append(frame(CONTINUATION, END_HEADERS, stream_id, parts[-1]))
    return b"".join(frames)


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame of (identifier, value) pairs."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def read_settings(payload: bytes) -> Iterable[tuple[int, int]]:
    """The (identifier, value) pairs of a payload whose length is a multiple of 6."""
    return _SETTING.iter_unpack(payload)


def rst_stream(stream_id: int, code: int) -> bytes:
    """End one stream at once."""
    return frame(RST_STREAM, 0, stream_id, _pack_u32(code))


def ping(payload: bytes, *, is_ack: bool) -> bytes:
    """8 bytes that the peer returns, or the return of the peer's."""
    return frame(PING, ACK if is_ack else 0, 0, payload)


def goaway(last_stream_id: int, code: int, message: str = "") -> bytes:
    """No more new streams; those above `last_stream_id` were not looked at."""
    return frame(GOAWAY, 0, 0, _pack_two(last_stream_id, code) + message.encode()[:MAX_FRAME_BYTES])


def window_update(stream_id: int, increment: int) -> bytes:
    """Let the peer send `increment` bytes more; stream 0 stands for the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, _pack_u32(increment))


def read_u31(payload: bytes) -> int:
    """The first four bytes as a number without its reserved highest bit."""
    return int.from_bytes(payload[:4]) & MAX_STREAM_ID
