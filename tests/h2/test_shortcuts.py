"""Ordinary frames take a shortcut. Whichever way a frame goes, the connection is the same afterwards."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.h2.protocol import frames
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.events import ConnectionFailed, DataReceived, RequestEnded, RequestStarted, StreamReset
from gateway.h2.protocol.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PADDED, PING, RST_STREAM, WINDOW_UPDATE
from gateway.h2.protocol.header_blocks import encode_fields
from gateway.h2.rpc import status
from tests.h2.by_hand import FIELDS, Peer, message

PLAIN = [(name.encode(), value.encode()) for name, value in FIELDS]
BLOCKS = [
    encode_fields(fields)
    for fields in (
        PLAIN,
        [*PLAIN, (b"grpc-timeout", b"10S")],
        [*PLAIN, (b"grpc-timeout", b"9999u"), (b"x-request-id", b"1")],
        [*PLAIN, (b"grpc-timeout", b"9998u"), (b"x-request-id", b"1")],
        [*PLAIN, (b"grpc-timeout", b"soon"), (b"x-request-id", b"1")],
        [*PLAIN, (b"content-length", b"7")],
        [*PLAIN, (b"x-large", bytes([0x61]) * 900)],
        PLAIN[1:],
    )
]
NUMBERS = st.sampled_from((1, 3, 5, 7, 9, 11, 13, 15, 2, 0))
BODIES = st.sampled_from((b"", b"x", message(b"ab"), bytes(300), bytes(700)))


def u32(value):
    return value.to_bytes(4)


REQUESTS = st.builds(
    lambda number, block, body, is_end: (
        frames.frame(HEADERS, END_HEADERS, number, block) + frames.frame(DATA, is_end, number, body)
    ),
    NUMBERS,
    st.sampled_from(BLOCKS),
    BODIES,
    st.sampled_from((0, END_STREAM)),
)
OTHERS = st.one_of(
    st.builds(frames.frame, st.just(HEADERS), st.sampled_from((0, 4, 5)), NUMBERS, st.sampled_from(BLOCKS)),
    st.builds(frames.frame, st.just(DATA), st.sampled_from((0, END_STREAM, 2)), NUMBERS, BODIES),
    st.builds(frames.frame, st.just(DATA), st.sampled_from((PADDED, PADDED | END_STREAM)), NUMBERS, st.just(b"\1ab\0")),
    st.builds(
        frames.frame,
        st.just(WINDOW_UPDATE),
        st.just(0),
        NUMBERS,
        st.sampled_from((u32(0), u32(1), u32(70_000), u32(2**31 - 1), u32(2**31), b"abc")),
    ),
    st.builds(frames.frame, st.just(RST_STREAM), st.just(0), NUMBERS, st.just(u32(8))),
    st.just(frames.frame(PING, 0, 0, bytes(8))),
    st.just(frames.settings(((4, 5_000),))),
    st.just(frames.frame(frames.CONTINUATION, END_HEADERS, 9, b"")),
)
# Mostly calls, as an error of the connection is the end.
STREAMS = st.lists(st.one_of(REQUESTS, REQUESTS, OTHERS), max_size=14).map(b"".join)
LIMITS = {
    "max_streams": 4,
    "stream_window_bytes": 1000,
    "connection_window_bytes": 65_535,
    "window_updates_burst": 12.0,
}


def told(events):
    """What was said of each stream, in order, and of the connection."""
    by_stream = {}
    for event in events:
        number = 0 if isinstance(event, ConnectionFailed) else event.stream.number
        match event:
            case RequestStarted(_, head, timeout):
                fact = (head and head.fields, timeout)
            case DataReceived(_, data):
                fact = data
            case StreamReset(_, code) | ConnectionFailed(code):
                fact = int(code)
            case _:
                fact = None
        by_stream.setdefault(number, []).append((type(event).__name__, fact))
    return by_stream


def state(connection):
    inbound, out, budgets = connection.inbound, connection.out, connection._budgets
    streams = {
        number: (each.send_window, each.receive_left, each.receive_credit, each.received_bytes, each.has_peer_ended)
        for number, each in connection.streams.items()
    }
    late = list(inbound._late)
    return (
        streams,
        late,
        inbound.last_stream_id,
        inbound.credit,
        out.send_window,
        min(budgets._burst, budgets.updates),
        connection.is_failed,
    )


def answered(peer, number):
    """Half of the requests are answered at once, so that frames of the rest meet closed streams."""
    stream = peer.connection.streams.get(number)
    if stream is not None:
        peer.connection.send_headers(stream, status.HEAD)
        stream.push(b"token")
        peer.connection.finish(stream, status.trailers(0, "", b""))


@settings(max_examples=300, deadline=None)
@given(st.data(), STREAMS)
def test_a_shortcut_leads_to_the_same_place(data, stream):
    quick, general = Peer(**LIMITS), Peer(**LIMITS)
    general.connection._takers.clear()
    for peer in (quick, general):
        for block in BLOCKS[:3]:
            # Known from another connection.
            other = Peer()
            other.memo = peer.memo
            other.connection = type(other.connection)(other.connection.inbound._limits, 0.0, peer.memo)
            other.send(frames.PREFACE, frames.settings(()), frames.SETTINGS_ACK, frames.headers(1, block, is_end=False))
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 400))
        for peer in (quick, general):
            peer.send(stream[at : at + size])
            for number in (1, 5):
                answered(peer, number)
            peer.take()
        assert state(quick.connection) == state(general.connection)
        at += size
    assert told(quick.events) == told(general.events)
    assert quick.frames == general.frames


def events_of(*data):
    peer = Peer()
    peer.send(frames.headers(1, BLOCKS[0], is_end=True))
    return peer.connection.receive(b"".join(data), peer.now)


def start(number):
    return frames.headers(number, BLOCKS[0], is_end=False)


def body(number, data, *, is_end=True):
    return frames.frame(DATA, END_STREAM if is_end else 0, number, data)


@pytest.mark.parametrize(
    "data",
    [
        (start(3), body(3, b"abc")),
        (start(3), start(5), body(5, b"xyz"), body(3, b"abc")),
        (start(3), body(3, b"abc", is_end=False), body(3, b"")),
    ],
    ids=["at once", "with others", "and its end apart"],
)
def test_a_request_that_arrives_whole_is_one_event(data):
    event = events_of(*data)[0]
    assert isinstance(event, RequestStarted)
    assert (event.data, event.is_ended) == (b"abc", True)


@pytest.mark.parametrize("between", [(), (frames.frame(PING, 0, 0, bytes(8)),)])
def test_what_comes_after_is_told_after(between):
    """A piece that is told apart is followed by everything after it."""
    data = (start(3), body(3, b"a", is_end=False), *between, body(3, b"b", is_end=False), body(3, b""))
    started, *rest = events_of(*data)
    assert (started.data, started.is_ended) == (b"a", False)
    (piece, end) = rest
    assert (piece.data, piece.is_last) == (b"b", False)
    assert isinstance(end, RequestEnded)


def test_a_shortcut_does_not_overtake_what_went_by_all_the_rules():
    padded = frames.frame(DATA, PADDED, 3, b"\x01x\0")
    started, *pieces = events_of(start(3), padded, body(3, b"y"))
    assert (started.data, started.is_ended) == (b"", False)
    assert [(piece.data, piece.is_last) for piece in pieces] == [(b"x", False), (b"y", True)]


def test_an_event_that_was_seen_does_not_change():
    peer = Peer()
    peer.send(frames.headers(1, BLOCKS[0], is_end=True))
    (started,) = peer.connection.receive(start(3), peer.now)
    (piece,) = peer.connection.receive(body(3, b"abc"), peer.now)
    assert (started.data, started.is_ended) == (b"", False)
    assert (piece.data, piece.is_last) == (b"abc", True)


def test_there_are_no_more_streams_than_allowed():
    peer = Peer(max_streams=2)
    peer.send(*(start(number) for number in (1, 3, 5)))
    assert peer.resets == [(5, ErrorCode.REFUSED_STREAM)]
    assert peer.started() == [1, 3]


def test_a_flood_runs_into_the_same_budgets():
    peer = Peer(window_updates_burst=50.0)
    peer.send(*[frames.window_update(0, 1)] * 50)
    assert peer.failure is None
    peer.send(frames.window_update(0, 1))
    assert peer.failure is not None
