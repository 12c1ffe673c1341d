"""What RFC 9113 says of each wrong frame: which error, and whether it ends the connection or one stream."""

import pytest

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from tests.h2.by_hand import FIELDS, Peer

U31 = 0x7FFF_FFFF
PROTOCOL, SIZE, FLOW = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR, ErrorCode.FLOW_CONTROL_ERROR
CLOSED, COMPRESSION = ErrorCode.STREAM_CLOSED, ErrorCode.COMPRESSION_ERROR


def setting(name, value):
    return frames.settings(((name, value),))


def u32(value):
    return value.to_bytes(4)


# Stream 1 is open, stream 3 half-closed by the client, stream 5 not there yet.
CONNECTION_ERRORS = {
    "too large for SETTINGS_MAX_FRAME_SIZE": (SIZE, frame(DATA, 0, 1, bytes(16_385))),
    "DATA on stream 0": (PROTOCOL, frame(DATA, 0, 0, b"x")),
    "DATA on an idle stream": (PROTOCOL, frame(DATA, 0, 5, b"x")),
    "DATA on a stream of the server's": (PROTOCOL, frame(DATA, 0, 2, b"x")),
    "DATA with nothing but a padding length": (PROTOCOL, frame(DATA, PADDED, 1, b"\x01")),
    "DATA with more padding than payload": (PROTOCOL, frame(DATA, PADDED, 1, b"\x05abcd")),
    "DATA padded and empty": (PROTOCOL, frame(DATA, PADDED, 1)),
    "HEADERS on stream 0": (PROTOCOL, frame(HEADERS, END_HEADERS, 0, b"\x82")),
    "HEADERS on an even stream": (PROTOCOL, frame(HEADERS, END_HEADERS, 2, b"\x82")),
    "HEADERS with more padding than payload": (PROTOCOL, frame(HEADERS, END_HEADERS | PADDED, 5, b"\x09\x82")),
    "HEADERS too short for their priority": (SIZE, frame(HEADERS, END_HEADERS | frames.HAS_PRIORITY, 5, b"\x82")),
    "HEADERS on a closed stream": (CLOSED, frame(RST_STREAM, 0, 3, u32(8)), frame(HEADERS, END_HEADERS, 3, b"\x82")),
    "an index that no table has": (COMPRESSION, frame(HEADERS, END_HEADERS, 5, b"\xff\x00")),
    "a block that is cut short": (COMPRESSION, frame(HEADERS, END_HEADERS, 5, b"\x82\x00\x05ab")),
    "a block with a number without end": (
        COMPRESSION,
        frame(HEADERS, END_HEADERS, 5, b"\xff\xff\xff\xff\xff\xff\xff\xff"),
    ),
    "a table larger than acknowledged": (COMPRESSION, frame(HEADERS, END_HEADERS, 5, b"\x3f\xe1\x1f\x82")),
    "a table size within a block": (COMPRESSION, frame(HEADERS, END_HEADERS, 5, b"\x82\x20")),
    "DATA within a header block": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(DATA, 0, 1, b"x")),
    "HEADERS within a header block": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(HEADERS, 0, 7, b"\x82")),
    "PING within a header block": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(PING, 0, 0, bytes(8))),
    "an unknown frame within a header block": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(0xEE, 0, 5)),
    "CONTINUATION of another stream": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(CONTINUATION, 4, 7, b"")),
    "CONTINUATION of nothing": (PROTOCOL, frame(CONTINUATION, END_HEADERS, 1, b"\x82")),
    "CONTINUATION on stream 0": (PROTOCOL, frame(HEADERS, 0, 5, b"\x82"), frame(CONTINUATION, 4, 0, b"")),
    "PRIORITY on stream 0": (PROTOCOL, frame(PRIORITY, 0, 0, bytes(5))),
    "RST_STREAM on stream 0": (PROTOCOL, frame(RST_STREAM, 0, 0, u32(8))),
    "RST_STREAM of another size": (SIZE, frame(RST_STREAM, 0, 1, bytes(3))),
    "RST_STREAM on an idle stream": (PROTOCOL, frame(RST_STREAM, 0, 5, u32(8))),
    "SETTINGS on a stream": (PROTOCOL, frame(SETTINGS, 0, 1)),
    "SETTINGS of another size": (SIZE, frame(SETTINGS, 0, 0, bytes(5))),
    "SETTINGS acknowledged with a payload": (SIZE, frame(SETTINGS, ACK, 0, bytes(6))),
    "SETTINGS_ENABLE_PUSH of 2": (PROTOCOL, setting(0x2, 2)),
    "SETTINGS_INITIAL_WINDOW_SIZE of 2^31": (FLOW, setting(0x4, 1 << 31)),
    "SETTINGS_MAX_FRAME_SIZE too small": (PROTOCOL, setting(0x5, 16_383)),
    "SETTINGS_MAX_FRAME_SIZE too large": (PROTOCOL, setting(0x5, 1 << 24)),
    "a stream's window above 2^31-1 by SETTINGS": (
        FLOW,
        frame(WINDOW_UPDATE, 0, 1, u32(U31 - 65_535)),
        setting(4, U31),
    ),
    "PUSH_PROMISE": (PROTOCOL, frame(PUSH_PROMISE, END_HEADERS, 1, u32(2) + b"\x82")),
    "PING on a stream": (PROTOCOL, frame(PING, 0, 1, bytes(8))),
    "PING of another size": (SIZE, frame(PING, 0, 0, bytes(7))),
    "GOAWAY on a stream": (PROTOCOL, frame(GOAWAY, 0, 1, bytes(8))),
    "GOAWAY too short": (SIZE, frame(GOAWAY, 0, 0, bytes(7))),
    "WINDOW_UPDATE of another size": (SIZE, frame(WINDOW_UPDATE, 0, 0, bytes(5))),
    "WINDOW_UPDATE by 0": (PROTOCOL, frame(WINDOW_UPDATE, 0, 0, u32(0))),
    "WINDOW_UPDATE above 2^31-1": (FLOW, frame(WINDOW_UPDATE, 0, 0, u32(U31))),
    "WINDOW_UPDATE on an idle stream": (PROTOCOL, frame(WINDOW_UPDATE, 0, 5, u32(1))),
}
STREAM_ERRORS = {
    "DATA after END_STREAM": (3, CLOSED, frame(DATA, 0, 3, b"x")),
    "HEADERS after END_STREAM": (3, CLOSED, frame(HEADERS, END_HEADERS | END_STREAM, 3)),
    "trailers without END_STREAM": (1, PROTOCOL, frame(HEADERS, END_HEADERS, 1)),
    "trailers with a pseudo-header field": (1, PROTOCOL, frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x84")),
    "PRIORITY of another size": (1, SIZE, frame(PRIORITY, 0, 1, bytes(4))),
    "WINDOW_UPDATE of a stream by 0": (1, PROTOCOL, frame(WINDOW_UPDATE, 0, 1, u32(0))),
    "WINDOW_UPDATE of a stream above 2^31-1": (1, FLOW, frame(WINDOW_UPDATE, 0, 1, u32(U31))),
}
IGNORED = {
    "an unknown type": frame(0xEE, 0xFF, 0, b"whatever"),
    "an unknown type on an idle stream": frame(0xEE, 0, 99),
    "PRIORITY on an idle stream": frame(PRIORITY, 0, 99, bytes(5)),
    "the reserved bit of a stream": frame(WINDOW_UPDATE, 0, 0x8000_0001, u32(1)),
    "an unknown setting": setting(0x99, 7),
    "a frame size larger than we need": setting(0x5, 1 << 20),
    "WINDOW_UPDATE after the end": frame(RST_STREAM, 0, 3, u32(8)) + frame(WINDOW_UPDATE, 0, 3, u32(1)),
    "RST_STREAM twice": frame(RST_STREAM, 0, 3, u32(8)) * 2,
    "PING acknowledged without one": frame(PING, ACK, 0, bytes(8)),
    "GOAWAY": frame(GOAWAY, 0, 0, bytes(8) + b"bye"),
}


@pytest.fixture
def peer():
    peer = Peer()
    peer.request()
    peer.request(is_end=True)
    assert (peer.started(), peer.ended(), peer.resets) == ([1, 3], [3], [])
    return peer


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_a_connection_error_ends_everything_and_is_said(peer, name):
    code, *data = CONNECTION_ERRORS[name]
    peer.send(*data)
    assert peer.failure is not None
    assert peer.failure.code == code, peer.failure.message
    assert {number for number, _ in peer.reset_events()} == {1, 3}
    assert peer.connection.is_done
    peer.frames.clear()
    peer.send(frame(PING, 0, 0, bytes(8)))
    assert not peer.frames, "nothing is read any more"


@pytest.mark.parametrize("name", STREAM_ERRORS)
def test_a_stream_error_ends_one_stream_only(peer, name):
    number, code, data = STREAM_ERRORS[name]
    peer.send(data)
    assert peer.failure is None
    assert peer.resets == [(number, code)]
    assert peer.reset_events() == [(number, code)]
    assert set(peer.connection.streams) == {1, 3} - {number}
    assert peer.request() == 5
    assert peer.started()[-1] == 5


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_no_error(peer, name):
    peer.send(IGNORED[name])
    assert peer.failure is None
    assert not peer.resets
    peer.request()
    assert peer.started()[-1] == 5


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        frames.PREFACE[:-1] + b"x",
        frames.PREFACE + frame(PING, 0, 0, bytes(8)),
        frames.PREFACE + frames.SETTINGS_ACK,
    ],
    ids=["HTTP/1.1", "TLS", "a wrong end", "PING first", "an acknowledgement first"],
)
def test_what_does_not_begin_as_http2_is_refused(data):
    peer = Peer(greet=False)
    peer.send(data)
    assert peer.failure.code == PROTOCOL


def test_a_number_below_the_last_one_can_not_be_opened(peer):
    peer.request(number=9)
    peer.send(frames.headers(7, peer.block(), is_end=True))
    assert peer.failure.code == CLOSED


def test_late_frames_of_a_stream_that_we_ended_are_no_error(peer):
    peer.connection.reset(peer.stream(1), ErrorCode.CANCEL)
    peer.send(frame(DATA, 0, 1, b"late"), frame(DATA, END_STREAM, 1, b"and the last"))
    assert peer.failure is None
    assert peer.resets == [(1, ErrorCode.CANCEL)]
    peer.send(frame(DATA, 0, 1, b"after the end"))
    assert peer.resets[1:] == [(1, CLOSED)]


def without(name):
    return [field for field in FIELDS if field[0] != name]


MALFORMED = {
    "no method": without(":method"),
    "no scheme": without(":scheme"),
    "no path": without(":path"),
    "an empty path": [*without(":path"), (":path", "")][-1:] + without(":path"),
    "CONNECT": [(":method", "CONNECT"), *without(":method")],
    "a pseudo-header field twice": [(":method", "POST"), *FIELDS],
    "an unknown pseudo-header field": [(":protocol", "x"), *FIELDS],
    "a pseudo-header field of responses": [(":status", "200"), *FIELDS],
    "a pseudo-header field after others": [*without(":path"), (":path", "/x")],
    "a name in upper case": [*FIELDS, ("X-Id", "1")],
    "an empty name": [*FIELDS, ("", "1")],
    "a blank in a name": [*FIELDS, ("x id", "1")],
    "connection": [*FIELDS, ("connection", "close")],
    "transfer-encoding": [*FIELDS, ("transfer-encoding", "chunked")],
    "te other than trailers": [*without("te"), ("te", "gzip")],
    "a line feed in a value": [*FIELDS, ("x-id", "a\nb")],
    "a zero byte in a value": [*FIELDS, ("x-id", "a\0b")],
    "blanks around a value": [*FIELDS, ("x-id", " a")],
    "content-length that is none": [*FIELDS, ("content-length", "+1")],
    "content-length twice": [*FIELDS, ("content-length", "1"), ("content-length", "2")],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_a_stream_error_and_reaches_nobody(peer, name):
    number = peer.request(*MALFORMED[name])
    assert peer.resets == [(number, PROTOCOL)]
    assert number not in peer.started()
    assert peer.failure is None
    peer.send(frame(DATA, END_STREAM, number, b"its body is late, not wrong"))
    assert len(peer.resets) == 1


@pytest.mark.parametrize(
    ("declared", "sent", "is_wrong"), [("3", b"abc", False), ("3", b"ab", True), ("3", b"abcd", True)]
)
def test_content_length_counts(peer, declared, sent, is_wrong):
    number = peer.request(*FIELDS, ("content-length", declared))
    peer.send(frame(DATA, END_STREAM, number, sent))
    assert bool(peer.resets) is is_wrong
    assert (number in peer.ended()) is not is_wrong


def test_padding_and_priority_change_nothing():
    peer = Peer()
    block = peer.block()
    payload = bytes((3,)) + bytes(5) + block + bytes(3)
    peer.send(frame(HEADERS, END_HEADERS | PADDED | frames.HAS_PRIORITY, 1, payload))
    peer.send(frame(DATA, PADDED | END_STREAM, 1, bytes((4,)) + b"body" + bytes(4)))
    assert (peer.started(), peer.body(1), peer.ended()) == ([1], b"body", [1])


def test_a_header_block_may_come_in_pieces_with_trailers_at_the_end():
    peer = Peer()
    block = peer.block()
    parts = [frame(HEADERS, 0, 1, block[:3]), frame(CONTINUATION, 0, 1), frame(CONTINUATION, END_HEADERS, 1, block[3:])]
    for part in parts:
        peer.send(part)
    assert peer.started() == [1]
    peer.send(frames.headers(1, peer.block(("x-checksum", "7")), is_end=True))
    assert peer.ended() == [1]
