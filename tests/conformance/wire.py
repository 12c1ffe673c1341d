"""A client whose every byte is the test's: frames out, frames in, over a real socket."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from hpack import Decoder

from tests.conformance.service import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED = range(6)
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, _, ENHANCE_YOUR_CALM = range(6, 12)
WAIT_S = 20.0
"""No answer takes so long, on a busy machine either."""

Fields = Iterable[tuple[str | bytes, str | bytes]]


class Frame(NamedTuple):
    """A frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        return self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM)


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(name.to_bytes(2) + value.to_bytes(4) for name, value in pairs))


GREETING = PREFACE + settings() + frame(SETTINGS, ACK)


def u32(value: int) -> bytes:
    return value.to_bytes(4)


def update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, u32(increment))


def ping(number: int = 0) -> bytes:
    return frame(PING, 0, 0, number.to_bytes(8))


def rst(stream: int, code: int = CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream, u32(code))


def prefixed(message: bytes, flag: int = 0) -> bytes:
    """A gRPC message as it is in a body."""
    return bytes((flag,)) + len(message).to_bytes(4) + message


def string(text: str | bytes) -> bytes:
    """A string of HPACK, without Huffman codes."""
    data = text.encode() if isinstance(text, str) else text
    size, parts = len(data), bytearray()
    if size < 0x7F:
        return bytes((size,)) + data
    size -= 0x7F
    while size >= 0x80:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return b"\x7f" + bytes(parts) + bytes((size,)) + data


def encode(fields: Fields) -> bytes:
    """A header block of literals that no table keeps."""
    return b"".join(b"\x00" + string(name) + string(value) for name, value in fields)


def call_fields(method: str = "EmptyCall", *more: tuple[Any, Any], without: str = "") -> list[tuple[Any, Any]]:
    """A gRPC call's fields, but for the one named."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{method}"),
        (":authority", "test"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return [field for field in fields if field[0] != without] + list(more)


def call(stream: int, method: str = "EmptyCall", message: bytes | None = b"", *more: tuple[Any, Any]) -> bytes:
    """A whole call with one message; without message its head alone."""
    head = frame(HEADERS, END_HEADERS, stream, encode(call_fields(method, *more)))
    return head if message is None else head + frame(DATA, END_STREAM, stream, prefixed(message))


class Wire(asyncio.Protocol):
    """One connection. What came is in `frames`, response fields by stream in `fields`.

    Unlike a stream of asyncio it gives what came before the connection was reset.
    """

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._received = bytearray()
        self._news = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._is_lost = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.frames: list[Frame] = []
        self.fields: dict[int, dict[str, str]] = {}
        self.is_ended = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._news.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._is_lost = True
        self._news.set()
        self._may_send.set()

    def pause_writing(self) -> None:
        self._may_send.clear()

    def resume_writing(self) -> None:
        self._may_send.set()

    def send(self, *data: bytes) -> None:
        """Nothing happens when the connection has ended."""
        if not self._is_lost:
            self.transport.write(b"".join(data))

    async def drain(self) -> None:
        """Wait until the server has taken the most of it. Raises ConnectionResetError when it takes no more."""
        await self._may_send.wait()
        if self._is_lost or self.transport.is_closing():
            raise ConnectionResetError

    async def next(self) -> Frame | None:
        """None at the end of the connection."""
        while (found := self._cut()) is None:
            if self._is_lost:
                self.is_ended = True
                return None
            self._news.clear()
            await self._news.wait()
        self.frames.append(found)
        if found.kind == HEADERS:
            self.fields.setdefault(found.stream, {}).update(self._decoder.decode(found.payload))
        return found

    def _cut(self) -> Frame | None:
        received = self._received
        end = 9 + int.from_bytes(received[:3])
        if len(received) < 9 or len(received) < end:
            return None
        found = Frame(received[3], received[4], int.from_bytes(received[5:9]), bytes(received[9:end]))
        del received[:end]
        return found

    async def until(self, condition: Callable[[Frame], bool], wait_s: float = WAIT_S) -> Frame | None:
        """The next frame that is meant; None at the end of the connection."""
        async with asyncio.timeout(wait_s):
            while (found := await self.next()) is not None and not condition(found):
                pass
        return found

    async def end(self) -> int | None:
        """Read to the end of the connection. The code of the last GOAWAY, None without."""
        await self.until(lambda _: False)
        codes = [int.from_bytes(each.payload[4:8]) for each in self.frames if each.kind == GOAWAY]
        return codes[-1] if codes else None

    async def is_well(self, stream: int) -> bool:
        """Whether a whole call on a new stream is answered."""
        self.send(call(stream))
        await self.until(lambda found: found.stream == stream and found.is_end)
        return not self.is_ended and self.fields.get(stream, {}).get("grpc-status") == "0"

    @property
    def resets(self) -> list[tuple[int, int]]:
        """(stream, code) of every RST_STREAM that came."""
        return [(each.stream, int.from_bytes(each.payload)) for each in self.frames if each.kind == RST_STREAM]


@contextlib.asynccontextmanager
async def connected(address: str, context: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """A connection on which nothing was said yet."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, wire = await loop.create_connection(Wire, host, int(port), ssl=context)
    try:
        yield wire
    finally:
        wire.transport.abort()
