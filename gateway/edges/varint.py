"""Protobuf varints, remembered: lengths and the token ids that a model really uses are few."""

from collections.abc import Callable, Iterable

from gateway.native import compiled

MEMO_LIMIT = 1 << 18


def encode_varint(value: int) -> bytes:
    """The varint of a non-negative number (https://protobuf.dev/programming-guides/encoding)."""
    # The lengths that occur (token ids are below 2^21), then any other.
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x200000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    return bytes((value & 0x7F | 0x80,)) + encode_varint(value >> 7)


class Memo(dict[int, bytes]):
    """Encodings by number, filled on first use; bounded, whatever numbers a rank makes up."""

    def __init__(self, encode: Callable[[int], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, value: int) -> bytes:
        encoded = self._encode(value)
        if len(self) < MEMO_LIMIT:
            self[value] = encoded
        return encoded


VARINTS = Memo(encode_varint)
"""To be indexed where a call would cost more than the look-up."""
SMALL = 4096
SMALL_VARINTS = [encode_varint(value) for value in range(SMALL)]
"""Those of small numbers once more: the interpreter has a short cut for lists."""
varint = VARINTS.__getitem__


def pack_in_python(values: Iterable[int]) -> bytes:
    """The payload of a packed `repeated uint32`."""
    return b"".join(map(varint, values))


pack: Callable[[Iterable[int]], bytes] = pack_in_python if compiled is None else compiled.pack_varints
