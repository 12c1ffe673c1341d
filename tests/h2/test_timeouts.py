"""A header block apart from its grpc-timeout: the same as decoding it, for every block and every value."""

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from gateway.h2.protocol import frames, timeouts
from gateway.h2.protocol.header_blocks import encode_fields
from tests.h2.by_hand import FIELDS, Peer

PLAIN = [(name.encode(), value.encode()) for name, value in FIELDS]
TIMEOUT = b"grpc-timeout"


def grpcio(value):
    """As gRPC's C core has it."""
    return encode_fields(PLAIN) + b"\x40\x0cgrpc-timeout" + bytes((len(value),)) + value + encode_fields([(b"x", b"1")])


def huffman(value):
    """As nghttp2, Go's and Rust's libraries have it."""
    encoder = Encoder()
    encoder.header_table_size = 0
    block = encoder.encode([*PLAIN, (TIMEOUT, value), (b"x", b"1")])
    return block.lstrip(b"\x20")


def seen(peer, block):
    """The head and the time-out of a request with this block; None where it is refused."""
    number = next(peer.numbers)
    before = len(peer.events)
    peer.send(frames.headers(number, block, is_end=True))
    events = [event for event in peer.events[before:] if hasattr(event, "head")]
    return (events[0].head, events[0].timeout) if events else None


@pytest.mark.parametrize("encode", [grpcio, huffman])
def test_blocks_that_differ_by_the_time_out_only_share_their_head(encode):
    peer = Peer()
    first = seen(peer, encode(b"10S"))
    for value in (b"1S", b"30100m", b"99999999u", b"10S"):
        head, timeout = seen(peer, encode(value))
        assert timeout == value
        assert head is first[0]
    assert TIMEOUT not in dict(head.fields)
    assert head.fields[-1] == (b"x", b"1")


@pytest.mark.parametrize("encode", [grpcio, huffman])
@pytest.mark.parametrize("value", [b"", b"1", b"soon", b"123456789S", b"1S1S1S1S1S"])
def test_what_is_no_time_out_is_never_taken_from_the_memo(encode, value):
    peer = Peer()
    known, _ = seen(peer, encode(b"10S"))
    head, timeout = seen(peer, encode(value))
    assert timeout == value
    assert head is not known


def test_a_value_that_can_not_be_sent_is_refused_all_the_same():
    peer = Peer()
    assert seen(peer, grpcio(b"10S")) is not None
    assert seen(peer, grpcio(b"1\nS")) is None
    assert len(peer.resets) == 1


def test_a_value_that_looks_like_the_field_is_none():
    """Its bytes are those of the field, and it is a part of another one."""
    tricks = b"\x0cgrpc-timeout\x0310S"
    plain = [*PLAIN, (b"x-trick", b"\0" + tricks)]
    assert timeouts.cut(encode_fields(plain)) is not None
    for fields in (
        [*PLAIN, (b"x-trick", b"@" + tricks)],
        [*PLAIN, (b"x-trick", b"@" + tricks), (TIMEOUT, b"5S")],
        [*PLAIN, (TIMEOUT, b"5S"), (b"x-trick", b"@" + tricks)],
        [*PLAIN, (TIMEOUT, b"5S"), (TIMEOUT, b"6S")],
    ):
        peer = Peer()
        for trick in (b"10S", b"11S", b"12S"):
            changed = [(name, value.replace(b"10S", trick)) for name, value in fields]
            head, timeout = seen(peer, encode_fields(changed))
            wanted = dict(fields).get(TIMEOUT)
            assert timeout == wanted
            assert dict(head.fields).get(b"x-trick") == dict(changed).get(b"x-trick")


def test_of_two_time_outs_the_last_one_counts_whatever_is_known():
    peer = Peer()
    for first in (b"5S", b"7S", b"8S"):
        _, timeout = seen(peer, encode_fields([*PLAIN, (TIMEOUT, first), (TIMEOUT, b"6S")]))
        assert timeout == b"6S"


def test_fields_that_must_not_be_kept_are_not_kept_without_their_time_out_either():
    peer = Peer()
    block = encode_fields([*PLAIN, (b"authorization", b"Bearer secret"), (TIMEOUT, b"5S")])
    first, second = seen(peer, block), seen(peer, block)
    assert first[0] is not second[0]
    assert not peer.memo._rests


def test_a_list_that_only_fits_with_a_short_time_out_is_not_shared():
    size = sum(len(name) + len(value) + 32 for name, value in [*PLAIN, (TIMEOUT, b"1S"), (b"x", b"1")])
    peer = Peer(max_header_list_bytes=size + 3)
    assert seen(peer, grpcio(b"1S"))[0] is not None
    assert seen(peer, grpcio(b"12345S"))[0] is None


def test_the_shared_rests_are_bounded():
    peer = Peer(max_streams=10_000)
    for number in range(2_500):
        seen(peer, encode_fields([*PLAIN, (b"x-request-id", b"%d" % number), (TIMEOUT, b"%du" % number)]))
        assert len(peer.memo._rests) <= 1024
        assert len(peer.memo.heads) <= 1024


@given(st.binary(max_size=40), st.binary(max_size=20), st.sampled_from((b"", timeouts._PLAIN, timeouts._HUFFMAN)))
def test_no_bytes_raise(before, after, name):
    parts = timeouts.cut(before + name + after)
    if parts is not None:
        rest, value = parts
        assert rest[0] + value + rest[1] == before + name + after
        timeouts.read_value(value)
