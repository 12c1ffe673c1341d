"""Flow control: nothing beyond the client's windows, all of it once they allow it, and room given back in batches."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.h2.protocol import frames, settings
from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.protocol.events import StreamDrained
from gateway.h2.protocol.frames import DATA, HEADERS, RST_STREAM, WINDOW_UPDATE, frame
from gateway.h2.rpc import status
from tests.h2.by_hand import Peer, message

WINDOW = 65_535
TRAILERS = status.trailers(0, "", b"")


def answering(*numbers, window=WINDOW, **limits):
    """A client with these streams, whose responses have begun."""
    peer = Peer(**limits)
    peer.send(frames.settings(((settings.INITIAL_WINDOW_SIZE, window),)))
    for number in numbers:
        peer.request(is_end=True, number=number)
        peer.connection.send_headers(peer.stream(number), status.HEAD)
    peer.take()
    peer.frames.clear()
    return peer


def grow(number, increment):
    return frame(WINDOW_UPDATE, 0, number, increment.to_bytes(4))


def sent(peer, number):
    return b"".join(each.payload for each in peer.of(DATA) if each.stream == number)


def test_a_message_that_fits_is_pushed_as_one_frame():
    peer = answering(1)
    assert peer.stream(1).push(b"hello")
    (data,) = peer.take()
    assert (data.kind, data.flags, data.stream, data.payload) == (DATA, 0, 1, message(b"hello"))
    assert peer.stream(1).send_window == peer.connection.out.send_window == WINDOW - 10


def test_push_refuses_what_can_not_go_at_once():
    peer = answering(1, 3, window=100)
    stream = peer.stream(1)
    assert not stream.push(bytes(96)), "the stream's window"
    assert stream.push(bytes(95))
    assert not stream.push(b"")
    peer.send(grow(1, 100_000))
    assert not stream.push(bytes(16_380)), "no frame is that large"
    assert stream.push(bytes(16_379))
    peer.connection.out.send_window = 20
    assert not peer.stream(3).push(bytes(16)), "the connection's window"
    peer.connection.out.send_window = WINDOW
    peer.connection.pause()
    assert not peer.stream(3).push(b"x"), "the transport"
    peer.connection.resume()
    assert peer.stream(3).push(b"x")
    peer.connection.reset(stream, ErrorCode.CANCEL)
    assert not stream.push(b"x"), "it is closed"


def test_push_does_not_overtake_what_waits_for_its_turn():
    peer = answering(1, window=1_000_000, max_turn_bytes=10_000)
    peer.send(grow(0, 1_000_000))
    stream = peer.stream(1)
    peer.connection.send_data(stream, bytes(30_000))
    assert stream.backlog
    assert stream.send_window > 100_000 < peer.connection.out.send_window
    assert not stream.push(b"x")


def test_a_body_waits_for_its_window_and_its_trailers_wait_for_it():
    peer = answering(1, window=10)
    body = bytes(range(35))
    peer.connection.send_data(peer.stream(1), body)
    peer.connection.send_trailers(peer.stream(1), TRAILERS)
    peer.take()
    assert sent(peer, 1) == body[:10]
    for expected in (20, 30):
        peer.send(grow(1, 10))
        assert sent(peer, 1) == body[:expected]
        assert not peer.of(HEADERS)
    peer.send(grow(1, 10))
    assert sent(peer, 1) == body
    (trailers,) = peer.of(HEADERS)
    assert trailers.is_end
    assert not peer.connection.streams
    assert not [event for event in peer.events if isinstance(event, StreamDrained)], "nobody waits for an ended stream"


def test_whoever_waits_is_told_when_the_stream_can_send_again():
    peer = answering(1, window=10)
    stream = peer.stream(1)
    peer.connection.send_data(stream, bytes(15))
    assert len(stream.backlog) == 5
    peer.send(grow(1, 4))
    assert not [event for event in peer.events if isinstance(event, StreamDrained)]
    peer.send(grow(1, 4))
    assert [event.stream for event in peer.events if isinstance(event, StreamDrained)] == [stream]


def test_streams_take_turns_on_the_connections_window():
    peer = answering(1, 3, 5, window=1_000_000)
    for number in (1, 3, 5):
        peer.connection.send_data(peer.stream(number), bytes(60_000))
    peer.take()
    assert sum(len(each.payload) for each in peer.of(DATA)) == WINDOW
    peer.frames.clear()
    peer.send(grow(0, 1_000_000))
    order = [each.stream for each in peer.of(DATA)]
    assert len(order) > 5
    assert order[:2] == order[2:4] == [3, 5]


def test_large_bodies_leave_in_pieces_so_that_others_get_their_turn():
    peer = answering(1, window=2**31 - 1, max_turn_bytes=40_000)
    peer.send(grow(0, 2**31 - 1 - WINDOW))
    peer.connection.send_data(peer.stream(1), bytes(100_000))
    sizes = []
    while peer.take() and peer.frames:
        sizes.append(sum(len(each.payload) for each in peer.of(DATA)))
        peer.frames.clear()
        peer.connection.pump()
    assert sum(sizes) == 100_000
    assert max(sizes) < 40_000 + 16_384
    assert len(sizes) >= 2


def test_a_smaller_initial_window_can_make_a_streams_negative():
    peer = answering(1)
    peer.connection.send_data(peer.stream(1), bytes(50_000))
    peer.send(frames.settings(((settings.INITIAL_WINDOW_SIZE, 10_000),)))
    stream = peer.stream(1)
    assert stream.send_window == 10_000 - 50_000
    peer.connection.send_data(stream, b"more")
    peer.send(grow(1, 40_000))
    assert stream.backlog, "still at 0"
    peer.send(grow(1, 4))
    assert not stream.backlog


def test_a_larger_initial_window_lets_go_what_waits():
    peer = answering(1, window=0)
    peer.connection.send_data(peer.stream(1), b"waits")
    assert not sent(peer, 1)
    peer.send(frames.settings(((settings.INITIAL_WINDOW_SIZE, 5),)))
    assert sent(peer, 1) == b"waits"


def test_nothing_is_sent_while_the_transport_is_full():
    peer = answering(1, 3)
    peer.connection.pause()
    peer.connection.send_data(peer.stream(1), b"one")
    peer.send(grow(1, 10), grow(0, 10))
    assert not peer.of(DATA)
    events = peer.connection.resume()
    assert [event.stream.number for event in events] == [1]
    peer.take()
    assert sent(peer, 1) == b"one"


def test_a_reset_stream_holds_nothing():
    peer = answering(1, window=1)
    stream = peer.stream(1)
    peer.connection.send_data(stream, bytes(1000))
    peer.send(frame(RST_STREAM, 0, 1, (8).to_bytes(4)))
    assert (len(stream.backlog), stream.trailers, peer.connection.out.turns) == (0, None, {})
    peer.connection.send_data(stream, b"x")
    peer.connection.send_trailers(stream, TRAILERS)
    peer.frames.clear()
    assert not peer.take()


def test_clients_get_room_back_in_batches():
    peer = Peer(stream_window_bytes=1000, connection_window_bytes=65_535)
    number = peer.request()
    stream = peer.stream(number)
    for _ in range(4):
        peer.send(frame(DATA, 0, number, bytes(200)))
        peer.connection.consume(stream, 200)
    peer.take()
    assert [(each.stream, each.number) for each in peer.of(WINDOW_UPDATE)] == [(number, 600)]


def test_the_connections_window_does_not_wait_for_anybody():
    """Else one handler that does not read would stop all the others."""
    peer = Peer(stream_window_bytes=60_000, connection_window_bytes=65_535)
    peer.request()
    for _ in range(3):
        peer.send(frame(DATA, 0, 1, bytes(15_000)))
    assert [(each.stream, each.number) for each in peer.of(WINDOW_UPDATE)] == [(0, 45_000)]


def test_a_client_that_ignores_a_window_is_ended():
    peer = Peer(stream_window_bytes=20_000, connection_window_bytes=65_535)
    for _ in range(2):
        number = peer.request()
        peer.send(frame(DATA, 0, number, bytes(15_000)), frame(DATA, 0, number, bytes(5_001)))
        assert peer.resets[-1] == (number, ErrorCode.FLOW_CONTROL_ERROR)
    assert peer.failure is None


def test_padding_is_given_back_without_anybodys_doing():
    peer = Peer(stream_window_bytes=400)
    peer.request()
    peer.send(frame(DATA, frames.PADDED, 1, bytes((249,)) + bytes(249)))
    assert [each.stream for each in peer.of(WINDOW_UPDATE)] == [1]


@given(
    st.lists(st.tuples(st.sampled_from((1, 3, 5)), st.binary(max_size=300)), max_size=20),
    st.lists(st.tuples(st.sampled_from((0, 1, 3, 5)), st.integers(1, 400)), max_size=40),
    st.integers(0, 300),
)
def test_bodies_arrive_whole_in_order_and_never_beyond_a_window(bodies, updates, window):
    peer = answering(1, 3, 5, window=window)
    allowed = dict.fromkeys((1, 3, 5), window) | {0: WINDOW}
    wanted = {1: b"", 3: b"", 5: b""}

    def check():
        peer.take()
        for number, body in wanted.items():
            assert len(sent(peer, number)) <= allowed[number]
            assert body.startswith(sent(peer, number))

    for number, body in bodies:
        wanted[number] += body
        if not peer.stream(number).push(body):
            peer.connection.send_data(peer.stream(number), body)
            continue
        wanted[number] = wanted[number][: len(wanted[number]) - len(body)] + message(body)
    for number, increment in updates:
        check()
        peer.send(grow(number, increment))
        allowed[number] += increment
    check()
    peer.send(*(grow(number, 100_000) for number in (0, 1, 3, 5)))
    assert {number: sent(peer, number) for number in wanted} == wanted
