"""The check of a prompt's tokens, beside one that looks at each."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.token_range import MAX_SORTED_TOKENS, TokenRange

SIZES = (1, 2, 32000, 2**31 - 1, 2**31, 2**31 + 1)


def near(size):
    edges = [0, 1, -1, size - 1, size, size + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**70]
    return st.one_of(st.sampled_from(edges), st.integers(0, size - 1))


@given(data=st.data(), size=st.sampled_from(SIZES), count=st.sampled_from([1, 2, 48, 49, 64, 65, 200]))
def test_it_is_what_a_look_at_each_token_says(data, size, count):
    tokens = [0] * count
    for place, token in data.draw(st.lists(st.tuples(st.integers(0, count - 1), near(size)), max_size=6)):
        tokens[place] = token
    expected = all(0 <= token < size for token in tokens)
    known = TokenRange(size)
    assert known.holds(tokens) is expected
    assert known.holds(tuple(tokens)) is expected
    if expected and size <= 2**31:
        assert known.holds(array("I", tokens))


@pytest.mark.parametrize("count", [1, MAX_SORTED_TOKENS, MAX_SORTED_TOKENS + 1, 63, 64, 65, 127, 128, 129, 1000])
@pytest.mark.parametrize("token", [-1, 32000, 2**31 - 1, 2**31, 2**32 - 1, 2**32])
def test_one_bad_token_is_found_wherever_it_is(count, token):
    known = TokenRange(32000)
    assert known.holds([31999] * count)
    for place in {0, 1, count // 2, count - 1} & set(range(count)):
        tokens = [31999] * count
        tokens[place] = token
        assert not known.holds(tokens)


def test_what_is_remembered_is_bounded_by_the_lengths():
    known = TokenRange(32000)
    for count in range(1, 3000):
        assert known.holds([1] * count)
    assert sorted(known._digits) == list(range(6, 13))
