"""How a call ends: status, message and metadata as trailers. Codes are gRPC's numbers."""

import base64
import re
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

from gateway.h2.protocol.header_blocks import Field, encode_fields, encode_length, encode_name

Metadata = Iterable[tuple[str, str | bytes]]

CONTENT_TYPE: Field = (b"content-type", b"application/grpc")
ACCEPTED_ENCODINGS: Field = (b"grpc-accept-encoding", b"identity,gzip")
HEAD = encode_fields((CONTENT_TYPE,), with_status_200=True)
"""The header block of a response without metadata of its own."""
OK = encode_fields(((b"grpc-status", b"0"),))
_MESSAGE_BYTES = re.compile(rb"[^\x20-\x24\x26-\x7e]")
_KEY = re.compile(rb"[0-9a-z_.-]+")
# Printable, and no blanks at its ends: they would not arrive.
_VALUE = re.compile(rb"(?:[\x21-\x7e\x80-\xff](?:[\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")


_SHORT_BYTES = 127
_LENGTHS = [encode_length(size) for size in range(_SHORT_BYTES)]


class Code(IntEnum):
    """The statuses that this layer itself gives."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """A call that can't go on. `http_status` is another than 200 where the caller does not speak gRPC."""

    def __init__(self, code: int, message: str, *, http_status: int = 200, fields: tuple[Field, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status
        self.fields = fields


def head(metadata: Metadata) -> bytes:
    """The header block of a response with metadata."""
    return HEAD + encode_metadata(metadata)


def trailers(code: int, message: str, metadata: bytes) -> bytes:
    """The block after the last message. `metadata` are encoded."""
    if not code and not message:
        return OK + metadata
    return _status_block(code, message) + metadata


def trailers_only(code: int, message: str, metadata: bytes, fields: Iterable[Field] = ()) -> bytes:
    """The only block of a response without messages."""
    return HEAD + encode_fields(fields) + _status_block(code, message) + metadata


def http_error(error: RpcError) -> bytes:
    """The only block of a response to what is no gRPC call. It carries gRPC's status as well, for its clients."""
    http_status = (b":status", b"%d" % error.http_status)
    return encode_fields((http_status, *error.fields, *_status_fields(error.code, error.message)))


def encode_metadata(metadata: Metadata) -> bytes:
    """Fields for metadata; `-bin` values as base64 without padding. Raises ValueError for what can't be sent."""
    parts: list[bytes] = []
    for key, value in metadata:
        name, is_binary = _encode_key(key)
        size = len(value)
        if (
            isinstance(value, str)
            and not is_binary
            and size < _SHORT_BYTES
            and value.isascii()
            and value.isprintable()
            and value.strip(" ") == value
        ):
            # The common case, without a search: no control characters, and blanks at no end.
            parts += (name, _LENGTHS[size], value.encode())
            continue
        data = _encode_value(key, value, is_binary=is_binary)
        parts += (name, encode_length(len(data)), data)
    return b"".join(parts)


def _encode_value(key: str, value: str | bytes, *, is_binary: bool) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    if is_binary:
        return base64.b64encode(data).rstrip(b"=")
    if _VALUE.fullmatch(data) is None:
        raise ValueError(f"the value of {key!r} can't be sent as metadata")
    return data


@lru_cache(1024)
def _encode_key(key: str) -> tuple[bytes, bool]:
    name = key.lower().encode()
    if _KEY.fullmatch(name) is None:
        raise ValueError(f"{key!r} can't be sent as metadata")
    return encode_name(name), name.endswith(b"-bin")


def percent_encode(message: str) -> bytes:
    """Everything but printable ASCII, and the percent sign itself, as %XX."""
    return _MESSAGE_BYTES.sub(lambda found: b"%%%02X" % found[0][0], message.encode("utf-8", "replace"))


@lru_cache(256)
def _status_block(code: int, message: str) -> bytes:
    return encode_fields(_status_fields(code, message))


def _status_fields(code: int, message: str) -> Iterable[Field]:
    yield b"grpc-status", b"%d" % code
    if message:
        yield b"grpc-message", percent_encode(message)
