"""The scanner agrees with msgspec on where items end, and is bounded on everything else."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire.scan import MAX_ITEMS, MAX_SCAN_BYTES, split_array
from tests.support.wire import pack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(width=64)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=40))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, max_size=20), st.binary(max_size=4))
def test_pieces_are_the_elements(values, after):
    pieces = split_array(pack(values) + after)
    assert pieces.declared == len(values)
    assert pieces.is_complete
    assert pieces.rest == after
    assert pieces.items == [pack(value) for value in values]


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=6), st.data())
def test_a_cut_leaves_a_prefix_of_whole_elements(values, data):
    whole = pack(values)
    cut = data.draw(st.integers(0, len(whole) - 1))
    pieces = split_array(whole[:cut])
    if pieces is None:
        assert cut == 0
        return
    assert not pieces.is_complete
    assert pieces.items == [pack(value) for value in values[: len(pieces.items)]]
    assert pieces.rest == whole[:cut][cut - len(pieces.rest) :]


LONG = [
    "x" * 70_000,
    b"y" * 70_000,
    [None] * 70_000,
    {str(key): 0 for key in range(300)},
    msgspec.msgpack.Ext(5, b"z" * 300),
    msgspec.msgpack.Ext(5, b"z" * 70_000),
]


@pytest.mark.parametrize("item", [*map(pack, LONG), b"\xdf\x00\x00\x00\x01\xa1a\x01"], ids=range(7))
def test_long_forms(item):
    pieces = split_array(b"\x92" + item + b"\x01")
    assert [len(piece) for piece in pieces.items] == [len(item), 1]
    assert pieces.is_complete


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc0", b"E", b"\xdc\x00", b"\xdd\x00\x00\x00"])
def test_not_an_array(data):
    assert split_array(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x91\xc1",  # reserved byte
        b"\x91\xdd\xff\xff\xff\xff",  # promises 4 billion elements
        b"\x91\xdf\xff\xff\xff\xff\x00",
        b"\x91\xdb\xff\xff\xff\xffabc",
        b"\x91\xc9\xff\xff\xff\xff\x01abc",
        b"\x91" * 100_000,  # nesting that no recursion survives
    ],
)
def test_hostile_input_is_an_incomplete_array(data):
    pieces = split_array(data)
    assert pieces.items == []
    assert not pieces.is_complete


def test_only_the_head_of_a_huge_message_is_scanned():
    pieces = split_array(pack(["x" * 1000] * (MAX_SCAN_BYTES // 500)))
    assert len(pieces.items) == MAX_SCAN_BYTES // 1003
    assert not pieces.is_complete


def test_only_so_many_elements_are_cut():
    pieces = split_array(pack([0] * (MAX_ITEMS + 5)))
    assert pieces.declared == MAX_ITEMS + 5
    assert len(pieces.items) == MAX_ITEMS
