"""Header blocks (HPACK, RFC 7541): from bytes to fields by the `hpack` library, and the other way by hand.

Neither side keeps a table, once the client has acknowledged our SETTINGS_HEADER_TABLE_SIZE of 0: blocks are then
functions of their bytes alone. So what was decoded once is remembered by its bytes, whole blocks and single fields, as
clients repeat both; and what we send is encoded without a table from the start.
"""

from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder, HPACKError, OversizedHeaderListError

from gateway.h2.protocol.errors import ErrorCode, Http2ConnectionError

Field = tuple[bytes, bytes]
"""Name and value as they were sent."""

MEMO_FIELDS = 4096
MEMO_FIELD_BYTES = 256
FIELD_OVERHEAD_BYTES = 32
"""What a field counts in a header list beyond its name and value (RFC 9113, section 6.5.2)."""
_CUT_SHORT = "the header block is cut short"
_STATUS_200 = b"\x88"
_NO_TABLE = b"\x20"
SECRET = frozenset((b"authorization", b"cookie", b"proxy-authorization"))
"""Fields that are not kept any longer than their call."""
# Literals with a name of their own: kept by a table, by none, and by none on the whole way.
_NEW_NAMES = frozenset((0x40, 0x00, 0x10))
# By the sender's own word (RFC 7541, section 6.2.3).
_NEVER_INDEXED = 0x10


class HeaderListTooLargeError(Exception):
    """The block is well-formed and says more than is allowed. The connection can go on."""


class OpenBlock:
    """A header block that has begun: the frames of it, and what its first one said."""

    __slots__ = ("_max_bytes", "_max_frames", "_parts", "_size", "is_end", "number")

    def __init__(self, number: int, *, is_end: bool, max_bytes: int, max_frames: int) -> None:
        self.number = number
        self.is_end = is_end
        self._max_bytes = max_bytes
        self._max_frames = max_frames
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """The next frame's share. Raises `Http2ConnectionError` when it is too much."""
        self._parts.append(part)
        self._size += len(part)
        if len(self._parts) > self._max_frames or self._size > self._max_bytes:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")

    def whole(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


class HeaderDecoder:
    """Decodes the blocks of one connection, in order. `memo` may be shared between connections.

    `is_stateless` says whether a block's meaning depends on its bytes alone.
    """

    def __init__(self, max_list_bytes: int, memo: dict[bytes, Field]) -> None:
        self._max_list_bytes = max_list_bytes
        self._decoder = Decoder(max_list_bytes)
        self._memo = memo
        self.is_stateless = False

    def forbid_table(self) -> None:
        """The peer has acknowledged that there is no table any more.

        It should say so in its next block; one that never used a table may forget to, and is understood all the same.
        """
        self._decoder.max_allowed_table_size = self._decoder.header_table_size = 0
        self.is_stateless = True

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block. Raises `Http2ConnectionError` for garbage, `HeaderListTooLargeError`."""
        if not self.is_stateless:
            return self._decode(block)
        memo, fields, size = self._memo, [], 0
        for part in split_fields(block):
            field = memo.get(part)
            if field is None:
                field = _read_plain(part)
                if field is None:
                    (field,) = self._decode(part)
                self._remember(part, field)
            fields.append(field)
            size += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
            if size > self._max_list_bytes:
                raise HeaderListTooLargeError
        return fields

    def _remember(self, part: bytes, field: Field) -> None:
        if len(part) > MEMO_FIELD_BYTES or field[0] in SECRET or part[0] & 0xF0 == _NEVER_INDEXED:
            return
        if len(self._memo) >= MEMO_FIELDS:
            # Deadlines differ from call to call and fill it slowly; what all calls share is back after one of them.
            self._memo.clear()
        self._memo[part] = field

    def _decode(self, block: bytes) -> list[Field]:
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            if self.is_stateless:
                raise HeaderListTooLargeError from None
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from None
        except (HPACKError, ValueError, IndexError) as error:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, f"bad header block: {error}") from None


def split_fields(block: bytes) -> list[bytes]:
    """Cut a block without table into the bytes of its fields. Raises `Http2ConnectionError` where it is cut short."""
    try:
        return _split_fields(block)
    except IndexError:
        raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, _CUT_SHORT) from None


def _split_fields(block: bytes) -> list[bytes]:
    parts: list[bytes] = []
    at, size = 0, len(block)
    while at < size and block[at] & 0xE0 == 0x20:
        if block[at] != 0x20:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "a table size above the acknowledged 0")
        at += 1
    while at < size:
        begin, first = at, block[at]
        if first & 0x80:
            _, at = _integer(block, at, 0x7F) if first == 0xFF else (0, at + 1)
        elif first & 0xE0 == 0x20:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "a table size update after a field")
        else:
            _, at = (0, at + 1) if first in _NEW_NAMES else _integer(block, at, 0x3F if first & 0x40 else 0x0F)
            for _ in range(2 if first in _NEW_NAMES else 1):
                length = block[at] & 0x7F
                if length == 0x7F:
                    length, at = _integer(block, at, 0x7F)
                else:
                    at += 1
                at += length
        if at > size:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, _CUT_SHORT)
        parts.append(block[begin:at])
    return parts


def _read_plain(part: bytes) -> Field | None:
    """A field whose strings are short and as they are; None for all others."""
    if part[0] not in _NEW_NAMES or part[1] >= 0x7F:
        return None
    value_at = 3 + part[1]
    return (part[2 : value_at - 1], part[value_at:]) if part[value_at - 1] < 0x7F else None


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """A number with the prefix `mask`, and where it ends (RFC 7541, section 5.1)."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 28:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "a number in the header block is too long")


def encode_fields(fields: Iterable[Field], *, with_status_200: bool = False) -> bytes:
    """A block that needs no table and adds nothing to one. Without Huffman codes: they would cost more than they save."""
    parts = [_STATUS_200] if with_status_200 else []
    for name, value in fields:
        parts += (encode_name(name), encode_length(len(value)), value)
    return b"".join(parts)


@lru_cache(1024)
def encode_name(name: bytes) -> bytes:
    """A field up to its value: a literal that no table keeps."""
    return b"".join((b"\x00", encode_length(len(name)), name))


def first_block(block: bytes) -> bytes:
    """The first block of a connection says that we keep no table, so that no setting of the peer concerns us."""
    return _NO_TABLE + block


def encode_length(value: int) -> bytes:
    """The length of a string without Huffman codes (RFC 7541, section 5.1)."""
    if value < 0x7F:
        return bytes((value,))
    parts = bytearray((0x7F,))
    value -= 0x7F
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
