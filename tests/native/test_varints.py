"""Packed varints: in C as in Python."""

from array import array

import pytest
from google.protobuf.internal.decoder import _DecodeVarint
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.edges import varint
from gateway.edges.varint import pack_in_python
from tests.support.native import compiled_or_skip

pack_varints = compiled_or_skip().pack_varints

MAX = 2**62
EDGES = sorted({min(max((1 << bits) + step, 0), MAX) for bits in range(63) for step in (-1, 0, 1)})

numbers = st.sampled_from(EDGES) | st.integers(0, 300) | st.integers(0, MAX)
uint32 = st.sampled_from([edge for edge in EDGES if edge < 2**32]) | st.integers(0, 2**32 - 1)


class Own(list):
    """Iterates otherwise than it lies."""

    def __iter__(self):
        return iter([1, 2, 300])


def test_it_is_what_the_gateway_packs_with():
    assert varint.pack is pack_varints


@given(st.lists(numbers, max_size=40))
@example([])
@example(EDGES)
def test_lists_and_tuples(values):
    packed = pack_varints(values)
    assert type(packed) is bytes
    assert packed == pack_varints(tuple(values)) == pack_in_python(values)


@pytest.mark.parametrize("value", EDGES)
def test_each_edge_reads_back(value):
    packed = pack_varints((value,))
    assert _DecodeVarint(packed, 0) == (value, len(packed))


@given(st.lists(uint32, max_size=300))
@example([])
@example([2**32 - 1] * 300)
def test_arrays(values):
    for made in (array("I", values), memoryview(array("I", values)), array("I", values)[1:]):
        assert pack_varints(made) == pack_in_python(made)


@given(st.lists(st.integers(0, 127), max_size=20), st.sampled_from("bBhHiILqQ"))
def test_arrays_of_other_kinds(values, kind):
    assert pack_varints(array(kind, values)) == pack_in_python(values)
    assert pack_varints(memoryview(array(kind, values))) == pack_in_python(values)


@given(st.lists(uint32, max_size=20), st.integers(1, 3), st.booleans())
def test_memory_that_is_not_in_one_piece(values, step, is_reversed):
    view = memoryview(array("I", values))[:: -step if is_reversed else step]
    assert pack_varints(view) == pack_in_python(view)


@given(st.lists(numbers, max_size=20))
def test_whatever_can_be_iterated(values):
    wanted = pack_in_python(values)
    assert pack_varints(iter(values)) == wanted
    assert pack_varints(value for value in values) == wanted
    assert pack_varints(dict.fromkeys(values)) == pack_in_python(dict.fromkeys(values))
    assert pack_varints(range(len(values))) == pack_in_python(range(len(values)))
    small = bytes(value & 0xFF for value in values)
    assert pack_varints(small) == pack_varints(bytearray(small)) == pack_in_python(small)


def test_a_class_with_an_order_of_its_own_is_no_crash():
    assert pack_varints(Own([7])) in (pack_in_python(Own([7])), pack_in_python([7]))


@pytest.mark.parametrize("value", [-1, -(2**31), -(2**70), MAX + 1, 2**64, 2**200, 1.0, "1", None, (1,)], ids=repr)
@pytest.mark.parametrize("before", [0, 1, 50])
def test_what_is_no_such_number_is_refused(value, before):
    with pytest.raises(ValueError, match="varint"):
        pack_varints([7] * before + [value])


@pytest.mark.parametrize("kind", "bhilqfd")
def test_an_array_with_what_is_no_such_number(kind):
    with pytest.raises(ValueError, match="varint"):
        pack_varints(array(kind, [1, -1]))


@pytest.mark.parametrize("values", [None, 5, 1.5, object()], ids=lambda value: type(value).__name__)
def test_what_cannot_be_iterated_is_refused(values):
    with pytest.raises(TypeError):
        pack_varints(values)


def test_an_iteration_that_breaks_off_says_why():
    def numbers_and_then():
        yield 1
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        pack_varints(numbers_and_then())


def test_the_number_of_arguments():
    for arguments in ((), ([1], [2])):
        with pytest.raises(TypeError):
            pack_varints(*arguments)
