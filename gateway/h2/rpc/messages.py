"""gRPC messages out of a request's body."""

import zlib
from collections import deque

from gateway.h2.protocol.streams import PREFIX_BYTES
from gateway.h2.rpc.status import Code, RpcError

_GZIP = 16 + zlib.MAX_WBITS


def prefixed(message: bytes) -> bytes:
    """A message as it is in a body."""
    return b"\0" + len(message).to_bytes(4) + message


def only_message(body: bytes, max_bytes: int) -> bytes | None:
    """The message of a body that is one message, as it was meant to be sent. None: `MessageReader` has to look at it."""
    size = len(body) - PREFIX_BYTES
    if 0 <= size <= max_bytes and body[0] == 0 and size == int.from_bytes(body[1:PREFIX_BYTES]):
        return body[PREFIX_BYTES:]
    return None


class MessageReader:
    """Cuts a body into messages, none of them larger than `max_bytes`, neither before nor after decompression."""

    __slots__ = ("_buffer", "_is_gzip", "_max_bytes", "messages")

    def __init__(self, max_bytes: int, *, is_gzip: bool) -> None:
        self.messages: deque[bytes] = deque()
        self._buffer = bytearray()
        self._max_bytes = max_bytes
        self._is_gzip = is_gzip

    @property
    def partial_bytes(self) -> int:
        """What has arrived of a message that is not whole."""
        return len(self._buffer)

    def feed(self, data: bytes) -> int:
        """Take a piece of the body. Returns the size of the messages that it completed. Raises `RpcError`."""
        buffer = self._buffer
        if not buffer and len(data) >= PREFIX_BYTES and len(data) == PREFIX_BYTES + int.from_bytes(data[1:5]):
            # The common case by far: one whole message.
            return self._add(data[0], data[PREFIX_BYTES:])
        buffer += data
        completed = 0
        while len(buffer) >= PREFIX_BYTES:
            size = int.from_bytes(buffer[1:PREFIX_BYTES])
            self._check_size(size)
            end = PREFIX_BYTES + size
            if len(buffer) < end:
                break
            completed += self._add(buffer[0], bytes(buffer[PREFIX_BYTES:end]))
            del buffer[:end]
        return completed

    def _add(self, flag: int, payload: bytes) -> int:
        self._check_size(len(payload))
        if flag:
            payload = self._decompress(flag, payload)
        self.messages.append(payload)
        return len(payload)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise RpcError(
                Code.RESOURCE_EXHAUSTED, f"the request has {size} bytes, at most {self._max_bytes} are taken"
            )

    def _decompress(self, flag: int, payload: bytes) -> bytes:
        if flag != 1 or not self._is_gzip:
            raise RpcError(Code.INTERNAL, "a compressed message without grpc-encoding, or an unknown flag")
        decompressor = zlib.decompressobj(_GZIP)
        try:
            data = decompressor.decompress(payload, self._max_bytes + 1)
        except zlib.error:
            raise RpcError(Code.INTERNAL, "the message is not gzip") from None
        self._check_size(len(data))
        if not decompressor.eof:
            raise RpcError(Code.INTERNAL, "the compressed message is cut short")
        return data
