"""What a request's head says of the call, and which requests are none."""

import base64
import binascii
import re
from functools import lru_cache
from typing import Any

from gateway.h2.protocol.header_blocks import MEMO_FIELD_BYTES, SECRET
from gateway.h2.protocol.heads import RequestHead
from gateway.h2.rpc.status import ACCEPTED_ENCODINGS, Code, RpcError

_CONTENT_TYPE = re.compile(rb"application/grpc(?:[+;].*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_ENCODINGS = frozenset((b"identity", b"gzip"))
_BASE64_GROUP = 4
# What belongs to the transport is no metadata.
_TRANSPORT = frozenset((b"content-type", b"content-length", b"te", b"grpc-encoding", b"host"))


class CallHead:
    """Method, metadata (`-bin` values as bytes), gzip or not. The time-out is the call's alone.

    Calls with the same header block may share it; `memo` is for what the layer above has made of it. Generic handlers
    are asked with it, as grpc.HandlerCallDetails describes.
    """

    __slots__ = ("invocation_metadata", "is_gzip", "memo", "method")

    def __init__(self, method: str, metadata: tuple[tuple[str, str | bytes], ...], *, is_gzip: bool) -> None:
        self.method = method
        self.invocation_metadata = metadata
        self.is_gzip = is_gzip
        self.memo: Any = None


def read_call(head: RequestHead) -> CallHead:
    """Raises `RpcError` for what is no gRPC call, or one that this server can't take."""
    if head.method != b"POST":
        raise RpcError(Code.INTERNAL, "gRPC calls use POST", http_status=405, fields=((b"allow", b"POST"),))
    transport: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in head.fields:
        if name in _TRANSPORT:
            transport[name] = value
        else:
            is_kept = len(value) <= MEMO_FIELD_BYTES and name not in SECRET
            metadata += _read_known_pairs(name, value) if is_kept else _read_pairs(name, value)
    if _CONTENT_TYPE.fullmatch(transport.get(b"content-type", b"")) is None:
        raise RpcError(Code.INTERNAL, "content-type is not application/grpc", http_status=415)
    if b"te" not in transport:
        # A proxy that drops it may drop trailers as well, and with them the status.
        raise RpcError(Code.INTERNAL, "te: trailers is missing; a proxy on the way may not know gRPC", http_status=400)
    encoding = transport.get(b"grpc-encoding", b"identity")
    if encoding not in _ENCODINGS:
        raise RpcError(
            Code.UNIMPLEMENTED, f"grpc-encoding {_text(encoding)} is not supported", fields=(ACCEPTED_ENCODINGS,)
        )
    return CallHead(_text(head.path), tuple(metadata), is_gzip=encoding == b"gzip")


def _read_pairs(name: bytes, value: bytes) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata as servicers see them: one pair, or several where binary values were joined."""
    if name.endswith(b"-bin"):
        return tuple((name.decode(), part) for part in _binary(name, value))
    return ((name.decode(), _text(value)),)


# Clients send the same metadata again and again.
_read_known_pairs = lru_cache(1024)(_read_pairs)


@lru_cache(1024)
def read_timeout(value: bytes) -> float:
    """Seconds from the head's arrival. Raises `RpcError`."""
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise RpcError(Code.INTERNAL, f"bad grpc-timeout {_text(value[:32])}")
    return int(found[1]) * _UNIT_S[found[2]]


def _binary(name: bytes, value: bytes) -> list[bytes]:
    """Several values may have been joined by commas; padding is optional."""
    try:
        return [
            base64.b64decode(part + b"=" * (-len(part) % _BASE64_GROUP), validate=True)
            for part in (piece.strip() for piece in value.split(b","))
        ]
    except binascii.Error:
        raise RpcError(Code.INTERNAL, f"the value of {name.decode()} is not base64") from None


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
