"""RFC 9113, section 8: malformed requests, each a stream error; and what gRPC says of well-formed ones it can't take."""

from tests.conformance.rfc_frames import Row, head, stream
from tests.conformance.wire import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PROTOCOL_ERROR,
    call_fields,
    encode,
    frame,
    prefixed,
)

_BODY = prefixed(b"")


def malformed(section: str, name: str, *fields: tuple[str | bytes, str | bytes]) -> Row:
    """A whole request on stream 7."""
    data = frame(HEADERS, END_HEADERS, 7, encode(fields)) + frame(DATA, END_STREAM, 7, _BODY)
    return stream(section, PROTOCOL_ERROR, 7, name, data)


def field(section: str, name: str, key: str | bytes, value: str | bytes) -> Row:
    return malformed(section, name, *call_fields("EmptyCall", (key, value)))


def trailers(name: str, *fields: tuple[str | bytes, str | bytes], flags: int = END_STREAM) -> Row:
    """Trailers of stream 1, which is open."""
    block = encode(fields or [("x-checksum", "1")])
    return stream("8.1", PROTOCOL_ERROR, 1, name, frame(HEADERS, END_HEADERS | flags, 1, block))


def body(name: str, length: str, *parts: bytes, is_empty: bool = False) -> Row:
    """A request whose content-length is not that of its DATA."""
    block = encode(call_fields("EmptyCall", ("content-length", length)))
    if is_empty:
        return stream("8.1.1", PROTOCOL_ERROR, 7, name, head(block))
    pieces = [frame(DATA, END_STREAM if part is parts[-1] else 0, 7, part) for part in parts]
    return stream("8.1.1", PROTOCOL_ERROR, 7, name, frame(HEADERS, END_HEADERS, 7, block), *pieces)


ROWS = [
    trailers("trailers without END_STREAM", flags=0),
    trailers("trailers with :path", (":path", "/")),
    trailers("trailers with :status", (":status", "200")),
    trailers("trailers with a name in upper case", ("X-Checksum", "1")),
    trailers("trailers with connection", ("connection", "close")),
    trailers("trailers with a line feed", ("x-checksum", "a\nb")),
    body("less than content-length", "6", _BODY),
    body("more than content-length", "4", _BODY),
    body("more in two pieces", "5", _BODY, b"x"),
    body("content-length and no DATA", "1", is_empty=True),
    field("8.1.1", "content-length with a sign", "content-length", "+5"),
    field("8.1.1", "content-length with a blank", "content-length", "5 5"),
    field("8.1.1", "content-length below 0", "content-length", "-5"),
    field("8.1.1", "an empty content-length", "content-length", ""),
    field("8.1.1", "content-length without end", "content-length", "9" * 30),
    malformed("8.1.1", "two different content-lengths", *call_fields(), ("content-length", "5"), ("content-length", "6")),
    field("8.2.1", "a name in upper case", "X-Id", "1"),
    field("8.2.1", "one upper-case letter", "x-Id", "1"),
    field("8.2.1", "an empty name", "", "1"),
    field("8.2.1", "a blank in a name", "x id", "1"),
    field("8.2.1", "a colon in a name", "x:id", "1"),
    field("8.2.1", "a zero byte in a name", b"x\0id", "1"),
    field("8.2.1", "DEL in a name", b"x\x7f", "1"),
    field("8.2.1", "a name that is not ASCII", b"x\xc3\xa4", "1"),
    field("8.2.1", "a line feed in a value", "x-id", "a\nb"),
    field("8.2.1", "a carriage return in a value", "x-id", "a\rb"),
    field("8.2.1", "a zero byte in a value", "x-id", "a\0b"),
    field("8.2.1", "a blank before a value", "x-id", " a"),
    field("8.2.1", "a blank behind a value", "x-id", "a "),
    field("8.2.1", "a tab before a value", "x-id", "\ta"),
    field("8.2.1", "a value of one blank", "x-id", " "),
    field("8.2.2", "connection", "connection", "close"),
    field("8.2.2", "keep-alive", "keep-alive", "5"),
    field("8.2.2", "proxy-connection", "proxy-connection", "x"),
    field("8.2.2", "transfer-encoding", "transfer-encoding", "chunked"),
    field("8.2.2", "upgrade", "upgrade", "h2c"),
    malformed("8.2.2", "te other than trailers", *call_fields(without="te"), ("te", "gzip")),
    malformed("8.2.2", "te with more than trailers", *call_fields(without="te"), ("te", "trailers, gzip")),
    malformed("8.3", "an unknown pseudo-header field", (":version", "2"), *call_fields()),
    malformed("8.3", "a pseudo-header field of responses", (":status", "200"), *call_fields()),
    malformed("8.3", "a pseudo-header field in upper case", (":Path", "/x"), *call_fields()),
    malformed("8.3", "an empty pseudo-header field", (":", "x"), *call_fields()),
    malformed("8.3", "a pseudo-header field behind others", *call_fields(without=":path"), (":path", "/x")),
    malformed("8.3", ":method twice", (":method", "POST"), *call_fields()),
    malformed("8.3", ":scheme twice", (":scheme", "http"), *call_fields()),
    malformed("8.3", ":path twice", (":path", "/x"), *call_fields()),
    malformed("8.3", ":authority twice", (":authority", "x"), *call_fields()),
    malformed("8.3.1", "no :method", *call_fields(without=":method")),
    malformed("8.3.1", "no :scheme", *call_fields(without=":scheme")),
    malformed("8.3.1", "no :path", *call_fields(without=":path")),
    malformed("8.3.1", "an empty :path", (":path", ""), *call_fields(without=":path")),
    malformed("8.3.1", "no field at all"),
    malformed("8.5", "CONNECT with a path", (":method", "CONNECT"), *call_fields(without=":method")),
    malformed("8.5", "CONNECT", (":method", "CONNECT"), (":authority", "a:1")),
    malformed("RFC 8441", "extended CONNECT, which was not offered", (":method", "CONNECT"), (":protocol", "websocket"),
              *call_fields(without=":method")),
]  # fmt: skip

_EMPTY = frame(DATA, END_STREAM, 7, _BODY)


def call(*fields: tuple[str | bytes, str | bytes], data: bytes = _EMPTY) -> bytes:
    return frame(HEADERS, END_HEADERS, 7, encode(fields)) + data


# What is sent on stream 7, and what its response must say. Not HTTP/2's errors: the stream ends with a response.
STATUSES = {
    "GET": (call((":method", "GET"), *call_fields(without=":method")), {":status": "405"}),
    "another content-type": (
        call(*call_fields(without="content-type"), ("content-type", "application/json")),
        {":status": "415"},
    ),
    "no content-type": (call(*call_fields(without="content-type")), {":status": "415"}),
    "a content-type that only begins so": (
        call(*call_fields(without="content-type"), ("content-type", "application/grpcx")),
        {":status": "415"},
    ),
    "no te": (call(*call_fields(without="te")), {":status": "400"}),
    "an unknown grpc-encoding": (
        call(*call_fields("EmptyCall", ("grpc-encoding", "zstd"))),
        {"grpc-status": "12", "grpc-accept-encoding": "identity,gzip"},
    ),
    "grpc-timeout without a unit": (call(*call_fields("EmptyCall", ("grpc-timeout", "10"))), {"grpc-status": "13"}),
    "grpc-timeout of 9 digits": (call(*call_fields("EmptyCall", ("grpc-timeout", "100000000S"))), {"grpc-status": "13"}),
    "grpc-timeout of 0": (call(*call_fields("Wait", ("grpc-timeout", "0n"))), {"grpc-status": "4"}),
    "metadata that are not base64": (call(*call_fields("EmptyCall", ("x-bin", "?"))), {"grpc-status": "13"}),
    "too much metadata": (call(*call_fields("EmptyCall", *[("x", "")] * 600)), {"grpc-status": "8"}),
    "an unknown method": (call(*call_fields("Nothing")), {":status": "200", "grpc-status": "12"}),
    "no message": (call(*call_fields(), data=frame(DATA, END_STREAM, 7)), {"grpc-status": "13"}),
    "two messages": (call(*call_fields(), data=frame(DATA, END_STREAM, 7, _BODY * 2)), {"grpc-status": "13"}),
    "a message cut short": (call(*call_fields(), data=frame(DATA, END_STREAM, 7, prefixed(b"abc")[:-1])), {"grpc-status": "13"}),
    "an unknown flag": (call(*call_fields(), data=frame(DATA, END_STREAM, 7, prefixed(b"", 2))), {"grpc-status": "13"}),
    "compressed without saying so": (call(*call_fields(), data=frame(DATA, END_STREAM, 7, prefixed(b"", 1))), {"grpc-status": "13"}),
    "gzip that is none": (
        call(*call_fields("EmptyCall", ("grpc-encoding", "gzip")), data=frame(DATA, END_STREAM, 7, prefixed(b"no", 1))),
        {"grpc-status": "13"},
    ),
    "a message of 4 GiB": (call(*call_fields(), data=frame(DATA, 0, 7, b"\0\xff\xff\xff\xff")), {"grpc-status": "8"}),
    "content-type with a parameter": (
        call(*call_fields(without="content-type"), ("content-type", "application/grpc+proto; a=b")),
        {"grpc-status": "0"},
    ),
    "the same content-length twice": (
        call(*call_fields(), ("content-length", "5"), ("content-length", "5")),
        {"grpc-status": "0"},
    ),
    "trailers of a request": (
        call(*call_fields(), data=frame(DATA, 0, 7, _BODY) + head(encode([("x-checksum", "1")]))),
        {"grpc-status": "0"},
    ),
}  # fmt: skip
