"""Tensors on the wire: `[dtype, shape, data]`, small data inline as ext type 3, the rest in aux frames."""

import sys
from array import array
from typing import Any

import msgspec

INLINE_BELOW_BYTES = 256
RAW_VIEW = 3
"""The msgpack ext type of raw bytes. Types 1 and 2 (pickle) are never written or read."""

_TYPECODES = {4: "i", 8: "q"}


class Frames:
    """Aux frames of one message; a tensor names its frame by index, counted from the payload at 0."""

    def __init__(self) -> None:
        self.aux: list[bytes] = []

    def tensor(self, dtype: str, shape: list[int], data: bytes) -> list[Any]:
        """The wire form of a tensor, its data put where its size says."""
        if len(data) < INLINE_BELOW_BYTES:
            return [dtype, shape, msgspec.msgpack.Ext(RAW_VIEW, data)]
        self.aux.append(data)
        return [dtype, shape, len(self.aux)]


def pack_ints(values: list[int], size: int) -> bytes:
    """Little-endian signed integers of 4 or 8 bytes."""
    return _little_endian(array(_TYPECODES[size], values))


def pack_floats(values: list[float]) -> bytes:
    """Little-endian 32-bit floats."""
    return _little_endian(array("f", values))


def _little_endian(values: Any) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    packed: bytes = values.tobytes()
    return packed
