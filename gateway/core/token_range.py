"""Whether every token of a prompt is in the vocabulary, without a step per token.

The tokens of a long prompt are put side by side as the 32-bit digits of one number. To add what is missing to the top
bit then shows for all of them at once whether any token is too large.
"""

from array import array
from collections.abc import Sequence
from sys import byteorder

_DIGIT_BITS = 32
_TOP = 1 << (_DIGIT_BITS - 1)
MAX_SORTED_TOKENS = 48
"""Up to so many are sorted instead: that is the fastest way to compare a few integers."""


class TokenRange:
    """The ids from 0 to one below the size of a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._digits: dict[int, tuple[int, int]] = {}
        """By the logarithm of a length: in each digit what is missing to the top bit, and the top bit."""

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether all of them, of which there is one at least, are in the range."""
        count = len(tokens)
        if count <= MAX_SORTED_TOKENS:
            ordered = sorted(tokens)
            return ordered[0] >= 0 and ordered[-1] < self._size
        if self._size > _TOP:
            return min(tokens) >= 0 and max(tokens) < self._size
        try:
            number = int.from_bytes(array("I", tokens), byteorder)
        except OverflowError:  # negative, or too large for a digit
            return False
        missing, top_bits = self._digits_for((count - 1).bit_length())
        # A carry into the next digit comes from one that has the top bit itself.
        return not (number | number + missing) & top_bits

    def _digits_for(self, size: int) -> tuple[int, int]:
        """For `2 ** size` digits: more than are used do no harm."""
        found = self._digits.get(size)
        if found is None:
            ones = int.from_bytes(array("I", [1]) * (1 << size), byteorder)
            found = self._digits[size] = (ones * (_TOP - self._size), ones * _TOP)
        return found
