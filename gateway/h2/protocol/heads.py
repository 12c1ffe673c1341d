"""What a request's header block says, checked by the rules of RFC 9113, section 8."""

import re
from functools import lru_cache
from typing import Any, TypeVar

from gateway.h2.protocol import timeouts
from gateway.h2.protocol.header_blocks import FIELD_OVERHEAD_BYTES, MEMO_FIELD_BYTES, SECRET, Field

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]|\A[ \t]|[ \t]\Z")
_CONNECTION_FIELDS = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
_PSEUDO_FIELDS = frozenset((b":method", b":scheme", b":path", b":authority"))

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

_MAX_KEPT_HEADS = 1024
_MAX_KEPT_BLOCK_BYTES = 512


class MalformedRequestError(Exception):
    """The request breaks a rule of HTTP: a stream error of type PROTOCOL_ERROR."""


class RequestHead:
    """Method, path and authority; every other field but grpc-timeout, in order; the body's declared length, None without.

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


KnownHead = tuple[RequestHead, bytes | None]
"""A head, and the value of grpc-timeout."""


class HeadMemo:
    """What was decoded and checked before, for all connections of a server. Bounded, and without secrets."""

    def __init__(self) -> None:
        self.fields: dict[bytes, Field] = {}
        # By whole blocks. Never replaced: whoever reads much may keep it.
        self.heads: dict[bytes, KnownHead] = {}
        self._rests: dict[timeouts.Rest, RequestHead] = {}

    def find(self, block: bytes) -> KnownHead | None:
        """The head and the time-out of a block that was seen before, with this time-out or another one."""
        found = self.heads.get(block)
        if found is not None:
            return found
        parts = timeouts.cut(block)
        if parts is None:
            return None
        head = self._rests.get(parts[0])
        if head is None:
            return None
        timeout = timeouts.read_value(parts[1])
        if timeout is None:
            return None
        found = (head, timeout)
        _keep(self.heads, block, found)
        return found

    def remember(self, block: bytes, known: KnownHead, fields: list[Field], max_list_bytes: int) -> None:
        """Keep the head of a block whose meaning depends on its bytes alone. `fields` are all of it."""
        if len(block) > _MAX_KEPT_BLOCK_BYTES:
            return
        count = size = 0
        for name, value in fields:
            if name in SECRET:
                return
            count += name == timeouts.FIELD
            size += len(name) + len(value) + FIELD_OVERHEAD_BYTES
        _keep(self.heads, block, known)
        # Any other time-out must fit as well, and what is left without this one must not have another.
        parts = timeouts.cut(block) if count == 1 and size + timeouts.MAX_VALUE_BYTES <= max_list_bytes else None
        if parts is not None and timeouts.is_field(*parts):
            _keep(self._rests, parts[0], known[0])


def _keep(memo: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
    if len(memo) >= _MAX_KEPT_HEADS:
        memo.clear()
    memo[key] = value


def read_head(fields: list[Field]) -> KnownHead:
    """Check a request's fields. Returns them, and the time-out apart. Raises `MalformedRequestError`."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    content_length: int | None = None
    timeout: bytes | None = None
    for name, value in fields:
        if name[:1] == b":":
            if regular or timeout is not None or name in pseudo or name not in _PSEUDO_FIELDS:
                raise MalformedRequestError(f"pseudo-header field {name!r} is unknown, repeated or late")
            pseudo[name] = value
            continue
        is_kept = len(value) <= MEMO_FIELD_BYTES and name not in SECRET
        (_check_known if is_kept else check_field)(name, value)
        if name == b"content-length":
            content_length = _content_length(value, content_length)
        if name == timeouts.FIELD:
            timeout = value
        else:
            regular.append((name, value))
    if pseudo.get(b":method") == b"CONNECT" or not pseudo.keys() >= {b":method", b":scheme", b":path"}:
        raise MalformedRequestError(":method, :scheme or :path is missing, or this is CONNECT")
    if not pseudo[b":path"]:
        raise MalformedRequestError(":path is empty")
    return RequestHead(pseudo, regular, content_length), timeout


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
