"""What a request's header block says, checked by the rules of RFC 9113, section 8."""

import re
from functools import lru_cache
from typing import Any

from gateway.h2.protocol.header_blocks import MEMO_FIELD_BYTES, SECRET, Field

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_PSEUDO_FIELDS = frozenset((b":method", b":scheme", b":path", b":authority"))

_MAX_KEPT_HEADS = 1024
_MAX_KEPT_BLOCK_BYTES = 512


class MalformedRequestError(Exception):
    """The request breaks a rule of HTTP: a stream error of type PROTOCOL_ERROR."""


class RequestHead:
    """Method, path and authority; every other field, in order; the declared length of the body, None without.

    Requests with the same block may share it; `read` is for what the layer above has made of it.
    """

    __slots__ = ("authority", "content_length", "fields", "method", "path", "read")

    def __init__(self, pseudo: dict[bytes, bytes], fields: list[Field], content_length: int | None) -> None:
        self.method = pseudo[b":method"]
        self.path = pseudo[b":path"]
        self.authority = pseudo.get(b":authority", b"")
        self.fields = fields
        self.content_length = content_length
        self.read: Any = None


class HeadMemo:
    """What was decoded and checked before, for all connections of a server. Bounded, and without secrets."""

    def __init__(self) -> None:
        self.fields: dict[bytes, Field] = {}
        self._heads: dict[bytes, RequestHead] = {}

    def find(self, block: bytes) -> RequestHead | None:
        """The head of a block that was seen before."""
        return self._heads.get(block)

    def remember(self, block: bytes, head: RequestHead) -> None:
        """Keep the head of a block whose meaning depends on its bytes alone."""
        if len(block) > _MAX_KEPT_BLOCK_BYTES or any(name in SECRET for name, _ in head.fields):
            return
        if len(self._heads) >= _MAX_KEPT_HEADS:
            self._heads.clear()
        self._heads[block] = head


def read_head(fields: list[Field]) -> RequestHead:
    """Check a request's fields. Raises `MalformedRequestError`."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    content_length: int | None = None
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO_FIELDS:
                raise MalformedRequestError(f"pseudo-header field {name!r} is unknown, repeated or late")
            pseudo[name] = value
            continue
        is_kept = len(value) <= MEMO_FIELD_BYTES and name not in SECRET
        (_check_known if is_kept else check_field)(name, value)
        if name == b"content-length":
            content_length = _content_length(value, content_length)
        regular.append((name, value))
    if pseudo.get(b":method") == b"CONNECT" or not pseudo.keys() >= {b":method", b":scheme", b":path"}:
        raise MalformedRequestError(":method, :scheme or :path is missing, or this is CONNECT")
    if not pseudo[b":path"]:
        raise MalformedRequestError(":path is empty")
    return RequestHead(pseudo, regular, content_length)


def check_trailers(fields: list[Field]) -> None:
    """Trailers have no pseudo-header fields. Raises `MalformedRequestError`."""
    for name, value in fields:
        if name[:1] == b":":
            raise MalformedRequestError("a pseudo-header field in the trailers")
        check_field(name, value)


def check_field(name: bytes, value: bytes) -> None:
    """Raises `MalformedRequestError` for what no message may carry."""
    if _NAME.fullmatch(name) is None:
        raise MalformedRequestError(f"bad field name {name!r}")
    if _BAD_IN_VALUE.search(value) is not None:
        raise MalformedRequestError(f"bad value of {name!r}")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise MalformedRequestError(f"{name!r} belongs to one connection, which HTTP/2 has no such field for")


# Clients send the same fields again and again.
_check_known = lru_cache(4096)(check_field)


def _content_length(value: bytes, known: int | None) -> int:
    if not value.isdigit() or len(value) > 18 or (known is not None and known != int(value)):
        raise MalformedRequestError("bad content-length")
    return int(value)
