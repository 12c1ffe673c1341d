"""However the network cuts what a client sends, the connection understands the same; and nothing that it sends raises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.h2.protocol import frames
from gateway.h2.protocol.frames import DATA, END_STREAM, RST_STREAM, WINDOW_UPDATE, frame
from gateway.h2.rpc import status
from tests.h2.by_hand import Peer, message

KINDS = st.integers(0, 12)
NUMBERS = st.sampled_from((0, 1, 2, 3, 5, 7, 99, 2**31 - 1))
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 2**32 - 1).map(lambda value: value.to_bytes(4)),
    st.sampled_from((b"", bytes(8), b"\x82\x86\x84", b"\x00\x04\x7f\xff\xff\xff")),
)
FRAMES = st.builds(frame, KINDS, st.integers(0, 255), NUMBERS, PAYLOADS)


def facts(peer):
    """All that the layer above and the client have learned."""
    bodies = {number: peer.body(number) for number in (1, 3, 5)}
    failure = peer.failure and (peer.failure.code, peer.failure.message)
    return peer.started(), peer.ended(), bodies, peer.reset_events(), failure, peer.resets


@settings(deadline=None)
@given(st.data())
def test_cuts_do_not_matter(data):
    encoder = Peer()
    stream = b"".join(
        (
            frames.headers(1, encoder.block(), is_end=False),
            frame(DATA, 0, 1, message(b"hello")),
            frames.headers(3, encoder.block(), is_end=True),
            frame(WINDOW_UPDATE, 0, 0, (1000).to_bytes(4)),
            frame(DATA, END_STREAM, 1, message(b"world")),
            frames.headers(5, encoder.block(), is_end=False),
            frame(RST_STREAM, 0, 5, (8).to_bytes(4)),
        )
    )
    whole = facts(Peer().send(stream))
    peer, at = Peer(), 0
    while at < len(stream):
        size = data.draw(st.integers(1, 60))
        peer.send(stream[at : at + size])
        at += size
    assert facts(peer) == whole
    assert not peer.connection._reader.rest


@settings(max_examples=400)
@given(st.lists(FRAMES, max_size=25), st.integers(0, 30), st.booleans())
def test_no_sequence_of_frames_does_more_than_end_the_connection(sequence, cut, greet):
    """Whatever comes, it is answered by the rules, and what the layer above hears adds up."""
    peer = Peer(greet=greet)
    if greet:
        peer.request()
        peer.request(is_end=True)
        peer.connection.send_headers(peer.stream(3), status.HEAD)
        peer.stream(3).push(b"x")
    for each in sequence:
        peer.send(each)
    peer.send(bytes(cut))
    peer.check(later_s=1.0)
    connection = peer.connection
    open_now = set(connection.streams)
    assert open_now <= set(peer.started())
    assert not open_now & {number for number, _ in peer.reset_events()}
    assert connection.out.send_window <= 2**31 - 1
    assert all(stream.send_window <= 2**31 - 1 for stream in connection.streams.values())
    if peer.failure is not None:
        assert not open_now
        assert connection.is_done


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise(data, greet):
    peer = Peer(greet=greet)
    peer.send(frames.PREFACE if not greet else b"", data)
    peer.check(later_s=1000.0)
    assert greet or peer.failure is not None, "its settings were never acknowledged"
