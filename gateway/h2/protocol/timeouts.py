"""A header block apart from its grpc-timeout.

Clients send the same block again and again but for this one value. So a block is remembered by what is around the value,
and the value is read by itself: with and without Huffman codes, as clients have it either way.
"""

import re
from functools import lru_cache

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman

from gateway.h2.protocol.header_blocks import split_fields

FIELD = b"grpc-timeout"
MAX_VALUE_BYTES = 9
_VALUE = re.compile(rb"[0-9]{1,8}[HMSmun]")
# The name as a string literal (RFC 7541, section 5.2).
_PLAIN = b"\x0cgrpc-timeout"
_HUFFMAN = b"\x89\x9a\xca\xc8\xb2\x4d\x49\x4f\x6a\x7f"
# Literals that no table keeps, or whose sender does not mind if one does.
_LITERALS = b"\x00\x40"

Rest = tuple[bytes, bytes]
"""What comes before the value, and what after it."""


def cut(block: bytes) -> tuple[Rest, bytes] | None:
    """What looks like the value, as a string literal, and the block without it. None: there is none.

    It may be a part of another field. It is none for sure if `is_field` says so of any block with this rest, as what
    comes before a field alone decides where the field begins.
    """
    at = block.find(_PLAIN)
    if at >= 0:
        at += len(_PLAIN)
    else:
        at = block.find(_HUFFMAN)
        if at < 0:
            return None
        at += len(_HUFFMAN)
    end = at + 1 + (block[at] & 0x7F) if at < len(block) else at
    if end == at or end > len(block):
        return None
    return (block[:at], block[end:]), block[at:end]


def is_field(rest: Rest, value: bytes) -> bool:
    """Whether what `cut` has found is a field by itself. The block is well-formed."""
    before, after = rest
    name = _PLAIN if before.endswith(_PLAIN) else _HUFFMAN
    field = before[-len(name) - 1 :] + value
    if field[0] not in _LITERALS:
        return False
    parts = list(split_fields(before + value + after))
    left = len(after)
    while left > 0:
        left -= len(parts.pop())
    return not left and bool(parts) and parts[-1] == field


@lru_cache(4096)
def read_value(literal: bytes) -> bytes | None:
    """The value, None if it is no time-out."""
    value = literal[1:]
    if literal[0] & 0x80:
        try:
            value = decode_huffman(value)
        except HPACKDecodingError:
            return None
    return value if _VALUE.fullmatch(value) is not None else None
