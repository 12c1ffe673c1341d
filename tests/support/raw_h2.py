"""HTTP/2 by hand: clients that the gRPC library would not let a test have."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
REFUSED_STREAM = 7
_INITIAL_WINDOW_SIZE = 4
RESOURCE_EXHAUSTED = b"\x0bgrpc-status\x018"
"""In trailers: grpcio encodes the name as it is, and the value too."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


GREETING = PREFACE + frame(SETTINGS, 0, 0)
SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def headers(path: str, **more: str) -> bytes:
    """A gRPC call's headers as literals without indexing (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"te": "trailers", "content-type": "application/grpc"} | more
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, parts = len(data) - 127, [b"\x7f"]
    while rest >= 128:
        parts.append(bytes((rest % 128 | 128,)))
        rest //= 128
    return b"".join((*parts, bytes((rest,)), data))


class RawClient:
    """One connection; answers SETTINGS and PING, nothing else. `frames` are (kind, flags, stream, payload)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: str, *, greets: bool = True, window_bytes: int | None = None) -> "RawClient":
        """`window_bytes`: what a stream may send before `widen`; None is the protocol's 64 KiB."""
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        if window_bytes is not None:
            client.writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes)))
        elif greets:
            client.writer.write(GREETING)
        return client

    async def next_frame(self) -> tuple[int, int, int, bytes] | None:
        """None at the end of the connection."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind == SETTINGS and not flags & ACK:
            self.writer.write(SETTINGS_ACK)
        elif kind == PING and not flags & ACK:
            self.writer.write(frame(PING, ACK, 0, payload))
        return kind, flags, stream, payload

    async def until(self, kind: int) -> tuple[int, int, int, bytes] | None:
        """The next frame of this kind; None at the end of the connection."""
        while (found := await self.next_frame()) is not None and found[0] != kind:
            pass
        return found

    async def ended(self) -> None:
        """Wait for the other side to close."""
        while await self.next_frame() is not None:
            pass

    async def settled(self) -> bool:
        """Whether the server has taken the connection: it acknowledges our SETTINGS. False when it closed it."""
        while (found := await self.next_frame()) is not None:
            if found[0] == SETTINGS and found[1] & ACK:
                return True
        return False

    def call(self, stream: int, path: str, message: bytes | None = None, **more: str) -> None:
        """Headers and, with a message, all of a unary request."""
        self.writer.write(frame(HEADERS, END_HEADERS, stream, headers(path, **more)))
        if message is not None:
            self.writer.write(frame(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message))

    def widen(self, stream: int, count: int) -> None:
        """Let a stream send so many bytes more."""
        self.writer.write(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", count)))

    async def trailers(self) -> bytes:
        """The encoded trailers of the only call, after whatever comes before them."""
        while (found := await self.until(HEADERS)) is not None:
            if found[1] & END_STREAM:
                return found[3]
        raise AssertionError("the connection ended without trailers")

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def raw_client(address: str, **options: Any) -> AsyncIterator[RawClient]:
    """A connection that is closed at the end of the block."""
    client = await RawClient.connect(address, **options)
    try:
        yield client
    finally:
        await client.close()
