"""HPACK both ways: what is remembered, what is not, and that it means what the library says."""

import contextlib

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from gateway.h2.protocol import header_blocks
from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError
from gateway.h2.protocol.header_blocks import HeaderDecoder, HeaderListTooLargeError, encode_fields, split_fields
from tests.h2.by_hand import FIELDS, Peer

NAMES = st.sampled_from([":path", ":method", "te", "x-request-id", "grpc-timeout", "authorization", "x"])
VALUES = st.text(st.characters(codec="latin-1"), max_size=200)
PLAIN = [(name.encode(), value.encode()) for name, value in FIELDS]


def stateless(memo=None, limit=16_384):
    decoder = HeaderDecoder(limit, {} if memo is None else memo)
    decoder.forbid_table()
    return decoder


def encoder():
    made = Encoder()
    made.header_table_size = 0
    return made


@given(st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=12), max_size=5), st.booleans())
def test_blocks_without_a_table_mean_what_the_library_says(blocks, is_huffman):
    """As the encoder has them: indexed, literal, with and without Huffman codes; the memo is warm from the second on."""
    memo = {}
    for _ in range(2):
        made, decoder = encoder(), stateless(memo)
        for fields in blocks:
            wanted = [(name.encode(), value.encode()) for name, value in fields]
            assert decoder.decode(made.encode(wanted, huffman=is_huffman)) == wanted


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12))
def test_what_is_encoded_here_needs_no_table_there(fields):
    wanted = [(name.encode(), value.encode()) for name, value in fields]
    decoder = Decoder()
    for _ in range(2):
        assert list(decoder.decode(encode_fields(wanted), raw=True)) == wanted
    assert not decoder.header_table.dynamic_entries


def test_before_the_acknowledgement_the_clients_table_counts():
    made, decoder = Encoder(), HeaderDecoder(16_384, {})
    first, second = made.encode(FIELDS), made.encode(FIELDS)
    assert len(second) < len(first), "the second refers to the table"
    assert decoder.decode(first) == decoder.decode(second) == PLAIN
    decoder.forbid_table()
    with pytest.raises(Http2ConnectionError) as caught:
        decoder.decode(second)
    assert caught.value.code is ErrorCode.COMPRESSION_ERROR


def test_a_client_that_never_used_a_table_need_not_say_that_it_has_none():
    block = encode_fields(PLAIN)
    assert stateless().decode(block) == PLAIN
    assert stateless().decode(b"\x20" + block) == PLAIN


def test_secrets_are_not_remembered():
    memo = {}
    fields = [("authorization", "Bearer secret"), ("x-plain", "remembered")]
    stateless(memo).decode(encoder().encode(fields))
    stateless(memo).decode(encoder().encode([("x-never", "indexed", True)]))
    assert list(memo.values()) == [(b"x-plain", b"remembered")]


def test_the_memo_is_bounded():
    memo = {}
    decoder = stateless(memo)
    for number in range(2 * header_blocks.MEMO_FIELDS):
        decoder.decode(encode_fields([(b"x", b"%d" % number)]))
        assert len(memo) <= header_blocks.MEMO_FIELDS
    decoder.decode(encode_fields([(b"y", bytes(1000))]))
    assert all(len(part) <= header_blocks.MEMO_FIELD_BYTES for part in memo)


@pytest.mark.parametrize("is_stateless", [True, False])
def test_a_list_beyond_the_limit(is_stateless):
    """A small block can stand for a large list: one entry of the table, again and again."""
    decoder = HeaderDecoder(1000, {})
    if is_stateless:
        decoder.forbid_table()
        with pytest.raises(HeaderListTooLargeError):
            decoder.decode(encode_fields([(b"x", bytes(300))] * 4))
        assert decoder.decode(encode_fields(PLAIN)) == PLAIN
    else:
        block = Encoder().encode([("x", "y" * 300)] * 4)
        assert len(block) < 400
        with pytest.raises(Http2ConnectionError) as caught:
            decoder.decode(block)
        assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


@given(st.binary(max_size=60))
def test_garbage_is_an_error_or_fields(data):
    for decoder in (stateless(), HeaderDecoder(1000, {})):
        with contextlib.suppress(Http2ConnectionError, HeaderListTooLargeError):
            fields = decoder.decode(data)
            assert all(isinstance(part, bytes) for field in fields for part in field)


@given(st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=6), st.data())
def test_a_block_that_ends_within_a_field_is_cut_short(fields, data):
    block = encode_fields([(name.encode(), value.encode()) for name, value in fields])
    parts = list(split_fields(block))
    assert b"".join(parts) == block
    cut = data.draw(st.integers(1, len(block) - 1))
    ends = [len(b"".join(parts[:count])) for count in range(len(parts))]
    if cut not in ends:
        with pytest.raises(Http2ConnectionError, match="cut short"):
            list(split_fields(block[:cut]))


def test_requests_with_the_same_block_share_what_was_read_of_it_unless_it_holds_a_secret():
    peer = Peer()
    secret = (*FIELDS, ("authorization", "Bearer secret"))
    for fields in (FIELDS, FIELDS, FIELDS, secret, secret):
        peer.request(*fields)
    heads = [event.head for event in peer.events]
    assert heads[1] is heads[2]
    assert heads[3] is not heads[4]
    assert heads[3].fields == heads[4].fields
    assert b"secret" not in repr((peer.memo.fields, peer.memo.heads, peer.memo._rests)).encode()


def test_the_shared_heads_are_bounded():
    peer = Peer(max_streams=10_000)
    for number in range(2_500):
        peer.request(*FIELDS, ("x-request-id", f"r{number}"), is_end=True)
        assert len(peer.memo.heads) <= 1024
    assert len(peer.started()) == 2_500
