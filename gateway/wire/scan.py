"""Finds the pieces of a msgpack array without decoding them: the first step of every salvage.

A typed decoder answers "no" for a whole message; salvage needs to know which of its pieces are
whole. The scan is iterative, does at most one step per byte, looks at the first `MAX_SCAN_BYTES`
only and cuts `MAX_ITEMS` at most: what lies beyond counts as cut off. Format: the lead-byte table of
the msgpack specification.
"""

from typing import Final, NamedTuple

MAX_SCAN_BYTES: Final = 256 << 10
MAX_ITEMS: Final = 16 << 10

_ARRAY16, _ARRAY32 = 0xDC, 0xDD
_RESERVED = 0xC1


class Pieces(NamedTuple):
    """An array cut into its whole elements; `rest` is what follows the last of them."""

    declared: int
    items: list[bytes]
    rest: bytes

    @property
    def is_complete(self) -> bool:
        """Whether every element that the header promised is there."""
        return len(self.items) == self.declared


class _Lead(NamedTuple):
    """How to step over an item: `size` bytes, the last `length_bytes` of which hold a length.

    `added` is added to that length, or is the length where there are no length bytes. A length
    counts bytes, or (`children` 1 for arrays, 2 for maps) groups of that many items.
    """

    size: int
    length_bytes: int = 0
    children: int = 0
    added: int = 0


_NAMED_LEADS: Final = {
    **{0xC4 + i: _Lead(1 + (1 << i), length_bytes=1 << i) for i in range(3)},  # bin 8/16/32
    **{0xC7 + i: _Lead(1 + (1 << i), length_bytes=1 << i, added=1) for i in range(3)},  # ext 8/16/32: a type byte
    **{0xD9 + i: _Lead(1 + (1 << i), length_bytes=1 << i) for i in range(3)},  # str 8/16/32
    **{0xCA + i: _Lead(5 + 4 * i) for i in range(2)},  # float 32/64
    **{0xCC + i: _Lead(1 + (1 << i)) for i in range(4)},  # uint 8..64
    **{0xD0 + i: _Lead(1 + (1 << i)) for i in range(4)},  # int 8..64
    **{0xD4 + i: _Lead(2 + (1 << i)) for i in range(5)},  # fixext 1..16
    **{_ARRAY16 + i: _Lead(3 + 2 * i, length_bytes=2 + 2 * i, children=1) for i in range(2)},
    **{0xDE + i: _Lead(3 + 2 * i, length_bytes=2 + 2 * i, children=2) for i in range(2)},  # map 16/32
}


def _lead_of(byte: int) -> _Lead:
    if byte in _NAMED_LEADS:
        return _NAMED_LEADS[byte]
    if 0x80 <= byte <= 0x8F:
        return _Lead(1, children=2, added=byte & 0x0F)
    if 0x90 <= byte <= 0x9F:
        return _Lead(1, children=1, added=byte & 0x0F)
    if 0xA0 <= byte <= 0xBF:
        return _Lead(1 + (byte & 0x1F))
    return _Lead(1)  # small integers, nil, booleans


_LEADS: Final = tuple(_lead_of(byte) for byte in range(256))


def split_array(data: bytes) -> Pieces | None:
    """Cut an array into its whole elements; None if `data` doesn't begin with an array header."""
    data = data[:MAX_SCAN_BYTES]
    header = _array_header(data)
    if header is None:
        return None
    declared, position = header
    items: list[bytes] = []
    while len(items) < min(declared, MAX_ITEMS):
        end = _item_end(data, position)
        if end is None:
            break
        items.append(data[position:end])
        position = end
    return Pieces(declared, items, data[position:])


def _array_header(data: bytes) -> tuple[int, int] | None:
    """Return (element count, offset of the first element)."""
    if not data:
        return None
    size, length_bytes, children, added = _LEADS[data[0]]
    if children != 1 or len(data) < size:
        return None
    return int.from_bytes(data[size - length_bytes : size], "big") + added, size


def _item_end(data: bytes, position: int) -> int | None:
    """Return the offset just after the item at `position`; None if it is cut off or malformed."""
    limit = len(data)
    pending = 1
    while pending:
        if position >= limit or pending > limit - position or data[position] == _RESERVED:
            return None
        size, length_bytes, children, length = _LEADS[data[position]]
        position += size
        if length_bytes:
            length += int.from_bytes(data[position - length_bytes : position], "big")
        if children:
            pending += children * length
        else:
            position += length
        pending -= 1
    return position if position <= limit else None
