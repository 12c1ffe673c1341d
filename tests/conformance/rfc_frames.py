"""RFC 9113, sections 3 to 7: what each wrong frame is answered with.

Stream 1 is open, stream 3 half-closed by the client and being served, stream 5 closed after its response; 7 is idle.
"""

from typing import NamedTuple

from tests.conformance.wire import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    call_fields,
    encode,
    frame,
    ping,
    rst,
    settings,
    u32,
    update,
)

U31 = 0x7FFF_FFFF
BLOCK = encode(call_fields())
HUFFMAN_EOS, HUFFMAN_PADDING = b"\x00\x81\xff\x01a", b"\x00\x82\xff\xff\x01a"


class Row(NamedTuple):
    """Where it is written, what it is, the error, what is sent. `stream` is None where the connection must end."""

    section: str
    name: str
    code: int
    stream: int | None
    data: bytes


class Fine(NamedTuple):
    """What is no error."""

    section: str
    name: str
    data: bytes


def connection(section: str, code: int, name: str, *data: bytes) -> Row:
    return Row(section, name, code, None, b"".join(data))


def stream(section: str, code: int, number: int, name: str, *data: bytes) -> Row:
    return Row(section, name, code, number, b"".join(data))


def open_block(number: int = 7) -> bytes:
    return frame(HEADERS, 0, number, BLOCK[:10])


def begun(name: str, *data: bytes) -> Row:
    return connection("6.10", PROTOCOL_ERROR, f"{name} within a header block", open_block(), *data)


def head(block: bytes, number: int = 7) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, number, block)


# In place of the preface and the first SETTINGS.
PREFACES = [
    connection("3.4", PROTOCOL_ERROR, "HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    connection("3.4", PROTOCOL_ERROR, "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    connection("3.4", PROTOCOL_ERROR, "a preface with a wrong end", PREFACE[:-2] + b"\r\r", settings()),
    connection("3.4", PROTOCOL_ERROR, "PING first", PREFACE, ping()),
    connection("3.4", PROTOCOL_ERROR, "HEADERS first", PREFACE, head(BLOCK, 1)),
    connection("3.4", PROTOCOL_ERROR, "an acknowledgement first", PREFACE, frame(SETTINGS, ACK)),
    connection("3.4", PROTOCOL_ERROR, "an unknown frame first", PREFACE, frame(0xEE)),
]

ROWS = [
    connection("4.2", FRAME_SIZE_ERROR, "DATA larger than allowed", frame(DATA, 0, 1, bytes(16_385))),
    connection("4.2", FRAME_SIZE_ERROR, "HEADERS larger than allowed", frame(HEADERS, 4, 7, bytes(16_385))),
    connection("4.2", FRAME_SIZE_ERROR, "SETTINGS larger than allowed", frame(SETTINGS, 0, 0, bytes(16_386))),
    connection("4.2", FRAME_SIZE_ERROR, "an unknown frame larger than allowed", frame(0xEE, 0, 0, bytes(16_385))),
    connection("4.3", COMPRESSION_ERROR, "an index of 0", head(b"\x80")),
    connection("4.3", COMPRESSION_ERROR, "an index that no table has", head(b"\xff\x20")),
    connection("4.3", COMPRESSION_ERROR, "a name's index that no table has", head(b"\x0f\x60\x01a")),
    connection("4.3", COMPRESSION_ERROR, "a block cut short in a string", head(BLOCK + b"\x00\x05ab")),
    connection("4.3", COMPRESSION_ERROR, "a block cut short in a number", head(BLOCK + b"\x7f\xff")),
    connection("4.3", COMPRESSION_ERROR, "a number without end", head(b"\xff" * 12)),
    connection("4.3", COMPRESSION_ERROR, "a table larger than we allow", head(b"\x3f\xe1\x1f" + BLOCK)),
    connection("4.3", COMPRESSION_ERROR, "a table size after a field", head(BLOCK + b"\x20")),
    connection("4.3", COMPRESSION_ERROR, "the end-of-string code of Huffman", head(BLOCK + b"\x00\x84" + b"\xff" * 4 + b"\x01a")),
    connection("4.3", COMPRESSION_ERROR, "Huffman padding of 8 bits", head(BLOCK + HUFFMAN_EOS)),
    connection("4.3", COMPRESSION_ERROR, "Huffman padding of 16 bits", head(BLOCK + HUFFMAN_PADDING)),
    connection("4.3", COMPRESSION_ERROR, "garbage in trailers", frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff\x20")),
    connection("5.1", PROTOCOL_ERROR, "DATA on an idle stream", frame(DATA, 0, 7, b"x")),
    connection("5.1", PROTOCOL_ERROR, "RST_STREAM on an idle stream", rst(7)),
    connection("5.1", PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream", update(7, 1)),
    connection("5.1", PROTOCOL_ERROR, "DATA on an idle stream of the server's", frame(DATA, 0, 2, b"x")),
    connection("5.1", PROTOCOL_ERROR, "RST_STREAM on an idle stream of the server's", rst(2)),
    stream("5.1", STREAM_CLOSED, 3, "DATA on a half-closed stream", frame(DATA, 0, 3, b"x")),
    stream("5.1", STREAM_CLOSED, 3, "empty DATA on a half-closed stream", frame(DATA, END_STREAM, 3)),
    stream("5.1", STREAM_CLOSED, 3, "HEADERS on a half-closed stream", head(BLOCK, 3)),
    stream("5.1", STREAM_CLOSED, 5, "DATA on a closed stream", frame(DATA, 0, 5, b"x")),
    connection("5.1", STREAM_CLOSED, "HEADERS on a closed stream", head(BLOCK, 5)),
    stream("5.1", STREAM_CLOSED, 1, "DATA after RST_STREAM", rst(1), frame(DATA, 0, 1, b"x")),
    connection("5.1", STREAM_CLOSED, "HEADERS after RST_STREAM", rst(1), head(BLOCK, 1)),
    stream("5.1", STREAM_CLOSED, 11, "DATA after trailers", frame(HEADERS, 4, 11, encode(call_fields("Wait"))),
           frame(DATA, 0, 11, bytes(5)), head(encode([("x-a", "b")]), 11), frame(DATA, 0, 11, b"x")),
    connection("5.1.1", PROTOCOL_ERROR, "HEADERS on an even stream", head(BLOCK, 8)),
    connection("5.1.1", STREAM_CLOSED, "a lower number than the last", head(BLOCK, 13), head(BLOCK, 9)),
    connection("6.1", PROTOCOL_ERROR, "DATA on stream 0", frame(DATA, 0, 0, b"x")),
    connection("6.1", PROTOCOL_ERROR, "DATA with as much padding as payload", frame(DATA, PADDED, 1, b"\x05abcd")),
    connection("6.1", PROTOCOL_ERROR, "DATA with more padding than payload", frame(DATA, PADDED, 1, b"\xffabcd")),
    connection("6.1", PROTOCOL_ERROR, "DATA padded without a length", frame(DATA, PADDED, 1)),
    connection("6.2", PROTOCOL_ERROR, "HEADERS on stream 0", head(BLOCK, 0)),
    connection("6.2", PROTOCOL_ERROR, "HEADERS with more padding than payload", frame(HEADERS, 4 | PADDED, 7, b"\xff" + BLOCK)),
    connection("6.2", PROTOCOL_ERROR, "HEADERS padded without a length", frame(HEADERS, 4 | PADDED, 7)),
    connection("6.2", FRAME_SIZE_ERROR, "HEADERS too short for a priority", frame(HEADERS, 4 | WITH_PRIORITY, 7, b"\0\0\0\0")),
    connection("6.3", PROTOCOL_ERROR, "PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(5))),
    stream("6.3", FRAME_SIZE_ERROR, 1, "PRIORITY of 4 bytes", frame(PRIORITY, 0, 1, bytes(4))),
    stream("6.3", FRAME_SIZE_ERROR, 3, "PRIORITY of 6 bytes", frame(PRIORITY, 0, 3, bytes(6))),
    connection("6.4", PROTOCOL_ERROR, "RST_STREAM on stream 0", rst(0)),
    connection("6.4", FRAME_SIZE_ERROR, "RST_STREAM of 3 bytes", frame(RST_STREAM, 0, 1, bytes(3))),
    connection("6.4", FRAME_SIZE_ERROR, "RST_STREAM of 5 bytes", frame(RST_STREAM, 0, 1, bytes(5))),
    connection("6.5", FRAME_SIZE_ERROR, "an acknowledgement with a payload", frame(SETTINGS, ACK, 0, bytes(6))),
    connection("6.5", PROTOCOL_ERROR, "SETTINGS on a stream", frame(SETTINGS, 0, 1)),
    connection("6.5", PROTOCOL_ERROR, "an acknowledgement on a stream", frame(SETTINGS, ACK, 1)),
    connection("6.5", FRAME_SIZE_ERROR, "SETTINGS of 5 bytes", frame(SETTINGS, 0, 0, bytes(5))),
    connection("6.5", FRAME_SIZE_ERROR, "SETTINGS of 7 bytes", frame(SETTINGS, 0, 0, bytes(7))),
    connection("6.5.2", PROTOCOL_ERROR, "ENABLE_PUSH of 2", settings((2, 2))),
    connection("6.5.2", FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE of 2^31", settings((4, U31 + 1))),
    connection("6.5.2", FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE of 2^32-1", settings((4, 0xFFFF_FFFF))),
    connection("6.5.2", PROTOCOL_ERROR, "MAX_FRAME_SIZE of 2^14-1", settings((5, 16_383))),
    connection("6.5.2", PROTOCOL_ERROR, "MAX_FRAME_SIZE of 2^24", settings((5, 1 << 24))),
    connection("6.5.2", PROTOCOL_ERROR, "the second setting is wrong", settings((3, 1), (2, 9))),
    connection("6.6", PROTOCOL_ERROR, "PUSH_PROMISE of a client", frame(PUSH_PROMISE, 4, 1, u32(2) + BLOCK)),
    connection("6.6", PROTOCOL_ERROR, "PUSH_PROMISE on stream 0", frame(PUSH_PROMISE, 4, 0, u32(2) + BLOCK)),
    connection("6.7", PROTOCOL_ERROR, "PING on a stream", frame(PING, 0, 1, bytes(8))),
    connection("6.7", FRAME_SIZE_ERROR, "PING of 7 bytes", frame(PING, 0, 0, bytes(7))),
    connection("6.7", FRAME_SIZE_ERROR, "PING of 9 bytes", frame(PING, 0, 0, bytes(9))),
    connection("6.7", FRAME_SIZE_ERROR, "an empty answer to a PING", frame(PING, ACK)),
    connection("6.8", PROTOCOL_ERROR, "GOAWAY on a stream", frame(GOAWAY, 0, 1, bytes(8))),
    connection("6.8", FRAME_SIZE_ERROR, "GOAWAY of 7 bytes", frame(GOAWAY, 0, 0, bytes(7))),
    connection("6.9", PROTOCOL_ERROR, "WINDOW_UPDATE by 0", update(0, 0)),
    stream("6.9", PROTOCOL_ERROR, 1, "WINDOW_UPDATE of a stream by 0", update(1, 0)),
    stream("6.9", PROTOCOL_ERROR, 3, "WINDOW_UPDATE by the reserved bit alone", frame(WINDOW_UPDATE, 0, 3, b"\x80\0\0\0")),
    connection("6.9", FRAME_SIZE_ERROR, "WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, 0, 0, bytes(3))),
    connection("6.9", FRAME_SIZE_ERROR, "WINDOW_UPDATE of 5 bytes", frame(WINDOW_UPDATE, 0, 1, bytes(5))),
    connection("6.9.1", FLOW_CONTROL_ERROR, "the connection's window above 2^31-1", update(0, U31)),
    connection("6.9.1", FLOW_CONTROL_ERROR, "the same in two steps", update(0, U31 - 100_000), update(0, 100_000)),
    stream("6.9.1", FLOW_CONTROL_ERROR, 3, "a stream's window above 2^31-1", update(3, U31)),
    connection("6.9.2", FLOW_CONTROL_ERROR, "a stream's window above by SETTINGS", update(3, U31 - 65_535), settings((4, 65_536))),
    connection("6.10", PROTOCOL_ERROR, "CONTINUATION of nothing", frame(CONTINUATION, 4, 1, BLOCK)),
    connection("6.10", PROTOCOL_ERROR, "CONTINUATION on an idle stream", frame(CONTINUATION, 4, 7, BLOCK)),
    connection("6.10", PROTOCOL_ERROR, "CONTINUATION on stream 0", frame(CONTINUATION, 4, 0, BLOCK)),
    connection("6.10", PROTOCOL_ERROR, "CONTINUATION after END_HEADERS", head(BLOCK), frame(CONTINUATION, 4, 7, b"")),
    begun("CONTINUATION of another stream", frame(CONTINUATION, 4, 9, BLOCK[10:])),
    begun("CONTINUATION of stream 0", frame(CONTINUATION, 4, 0, BLOCK[10:])),
    begun("DATA of the same stream", frame(DATA, 0, 7, b"x")),
    begun("DATA of another stream", frame(DATA, 0, 1, b"x")),
    begun("HEADERS of the same stream", frame(HEADERS, 4, 7, BLOCK)),
    begun("HEADERS of another stream", frame(HEADERS, 4, 9, BLOCK)),
    begun("PRIORITY", frame(PRIORITY, 0, 7, bytes(5))),
    begun("RST_STREAM", rst(7)),
    begun("SETTINGS", settings()),
    begun("an acknowledgement", frame(SETTINGS, ACK)),
    begun("PUSH_PROMISE", frame(PUSH_PROMISE, 4, 7, u32(2))),
    begun("PING", ping()),
    begun("GOAWAY", frame(GOAWAY, 0, 0, bytes(8))),
    begun("WINDOW_UPDATE", update(0, 1)),
    begun("an unknown frame", frame(0xEE, 0, 7)),
]  # fmt: skip

FINE = [
    Fine("3.4", "more than one SETTINGS", settings() + settings((3, 10))),
    Fine("4.1", "an unknown type", frame(0xEE, 0xFF, 0, b"whatever")),
    Fine("4.1", "an unknown type on an idle stream", frame(0xEE, 0xFF, 99, b"whatever")),
    Fine("4.1", "flags that DATA does not have", frame(DATA, 0x40 | 0x2, 1)),
    Fine("4.1", "flags that PING does not have", frame(PING, 0xFE, 0, bytes(8))),
    Fine("4.1", "the reserved bit of a stream's number", frame(WINDOW_UPDATE, 0, 0x8000_0001, u32(1))),
    Fine("5.1", "WINDOW_UPDATE on a half-closed stream", update(3, 1)),
    Fine("5.1", "PRIORITY on a half-closed stream", frame(PRIORITY, 0, 3, bytes(5))),
    Fine("5.1", "RST_STREAM on a half-closed stream", rst(3)),
    Fine("5.1", "WINDOW_UPDATE on a closed stream", update(5, 1)),
    Fine("5.1", "RST_STREAM on a closed stream", rst(5)),
    Fine("5.1", "RST_STREAM twice", rst(1) + rst(1)),
    Fine("5.1", "PRIORITY on a closed stream", frame(PRIORITY, 0, 5, bytes(5))),
    Fine("5.1", "PRIORITY on an idle stream", frame(PRIORITY, 0, 99, bytes(5))),
    Fine("5.3.2", "PRIORITY on itself", frame(PRIORITY, 0, 1, u32(1) + b"\x10")),
    Fine("5.3.2", "HEADERS that depend on themselves", frame(HEADERS, END_HEADERS | WITH_PRIORITY, 7, u32(7) + b"\x10" + BLOCK)),
    Fine("6.1", "DATA of padding only", frame(DATA, PADDED, 1, b"\x04" + bytes(4))),
    Fine("6.1", "DATA with padding of 0", frame(DATA, PADDED, 1, b"\0")),
    Fine("6.2", "HEADERS padded and with a priority", frame(HEADERS, 4 | PADDED | WITH_PRIORITY, 7, b"\x02" + bytes(5) + BLOCK + bytes(2))),
    Fine("6.5.2", "an unknown setting", settings((0x99, 7))),
    Fine("6.5.2", "the largest values", settings((5, (1 << 24) - 1), (3, 0xFFFF_FFFF), (6, 0xFFFF_FFFF), (2, 1), (1, 0xFFFF_FFFF))),
    Fine("6.5.2", "a setting twice, the last counts", settings((4, 0), (4, 65_535))),
    Fine("6.7", "PING acknowledged without one", frame(PING, ACK, 0, bytes(8))),
    Fine("6.8", "GOAWAY with a text", frame(GOAWAY, 0, 0, bytes(8) + b"bye")),
    Fine("6.9", "the reserved bit of an increment", frame(WINDOW_UPDATE, 0, 1, b"\x80\0\0\1")),
    Fine("6.9.1", "the largest window", update(0, U31 - 65_535)),
    Fine("6.10", "a block in 3 frames", open_block() + frame(CONTINUATION, 0, 7) + frame(CONTINUATION, 4, 7, BLOCK[10:])),
    Fine("4.3", "a table size of 0 before the fields", head(b"\x20\x20" + BLOCK)),
]  # fmt: skip
