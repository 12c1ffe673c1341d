"""Varints decode to their number, and what is remembered of them is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.edges import varint


@given(number=st.integers(0, 2**64 - 1))
def test_varints_decode_to_their_number(number):
    encoded = varint.varint(number)
    assert sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(encoded)) == number
    assert all(byte & 0x80 for byte in encoded[:-1])
    assert not encoded[-1] & 0x80


def test_the_memory_of_encodings_is_bounded(monkeypatch):
    monkeypatch.setattr(varint, "MEMO_LIMIT", 4)
    memo = varint.Memo(lambda value: bytes((value,)))
    assert [memo[value] for value in range(10)] == [bytes((value,)) for value in range(10)]
    assert len(memo) == 4
