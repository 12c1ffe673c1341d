"""What a hostile client does, one row a kind, and how its connection must end."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.conformance import service, wire
from tests.conformance.service import Request
from tests.conformance.wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    GREETING,
    HEADERS,
    PREFACE,
    PRIORITY,
    SETTINGS,
    SETTINGS_TIMEOUT,
    call,
    call_fields,
    encode,
    frame,
    ping,
    rst,
    settings,
    string,
    update,
)

BATCH_FRAMES = 50
LIMITS = {
    "handshake_timeout_s": 3.0,
    "frame_timeout_s": 3.0,
    "unread_timeout_s": 3.0,
    "max_connections": 100,
    "max_streams": 128,
}
"""Of the server under attack: times that a test can wait for; all else is what the gateway has."""

Batches = Iterator[tuple[bytes, int]]


class Flood(NamedTuple):
    """`begin` is sent once, then `batches` as fast as they are taken; each says how many frames it has.

    `max_frames` may be sent before the connection ends with one of `codes`; None: it ends without a word. A connection
    that `reads` not has a full socket soon.
    """

    name: str
    codes: tuple[int | None, ...]
    max_frames: int
    begin: bytes
    batches: Callable[[], Batches]
    reads: bool = True
    pause_s: float = 0.0


def same(data: bytes, frames: int = 1) -> Callable[[], Batches]:
    """One batch, again and again."""
    batch = data * (BATCH_FRAMES // frames or 1)
    return lambda: itertools.repeat((batch, (BATCH_FRAMES // frames or 1) * frames))


def streams(make: Callable[[int], bytes], frames: int, first: int = 3) -> Callable[[], Batches]:
    """New streams, without end."""

    def batches() -> Batches:
        numbers = itertools.count(first, 2)
        while True:
            yield b"".join(make(next(numbers)) for _ in range(BATCH_FRAMES)), BATCH_FRAMES * frames

    return batches


def nothing() -> Batches:
    """It only waits."""
    return itertools.repeat((b"", 0))


def _bomb() -> bytes:
    """4 KB that stand for 50 MB: an entry of the table, named again and again."""
    block = b"\x40" + string("x-bomb") + string("y" * 3900) + b"\xbe" * 12_000
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, block)


_CALM = (ENHANCE_YOUR_CALM,)
_OPEN = frame(HEADERS, END_HEADERS, 1, encode(call_fields("FullDuplexCall")))
_FILL = service.encode(Request([16_000]))
_LARGE = service.encode(Request([60_000]))
_SLACK = 1_500
"""What is on its way when the server has decided, of small frames."""
FLOODS = [
    Flood("CONTINUATION of 1 byte", _CALM, 16 + _SLACK, GREETING + frame(HEADERS, 0, 1, b"\x82"), same(frame(CONTINUATION, 0, 1, b"\x82"))),
    Flood("CONTINUATION of 0 bytes", _CALM, 16 + _SLACK, GREETING + frame(HEADERS, 0, 1, b"\x82"), same(frame(CONTINUATION, 0, 1))),
    Flood("CONTINUATION of 16 KB", _CALM, 2_000, GREETING + frame(HEADERS, 0, 1, b"\x82"), same(frame(CONTINUATION, 0, 1, bytes(16_000)), 25)),
    Flood("rapid reset", _CALM, 6_000 + _SLACK, GREETING, streams(lambda n: call(n) + rst(n), 3, 1)),
    Flood("made you reset", _CALM, 6_000 + _SLACK, GREETING, streams(lambda n: call(n, "Wait", None) + update(n, 0), 2, 1)),
    Flood("SETTINGS", _CALM, 1_500 + _SLACK, GREETING, same(settings())),
    Flood("SETTINGS of the window", _CALM, 1_500 + _SLACK, GREETING, same(settings((4, 1)) + settings((4, 2)), 2)),
    Flood("PING", _CALM, 10 + _SLACK, GREETING, same(ping())),
    Flood("PING, answers not read", (ENHANCE_YOUR_CALM, None), 10 + _SLACK, GREETING, same(ping()), reads=False),
    Flood("empty DATA", _CALM, 1_500 + _SLACK, GREETING + _OPEN, same(frame(DATA, 0, 1))),
    Flood("DATA of padding", _CALM, 1_500 + _SLACK, GREETING + _OPEN, same(frame(DATA, 8, 1, b"\x03" + bytes(3)))),
    Flood("empty HEADERS", _CALM, 4_000 + _SLACK, GREETING, streams(lambda n: frame(HEADERS, 5, n), 1, 1)),
    Flood("PRIORITY", _CALM, 1_500 + _SLACK, GREETING, same(frame(PRIORITY, 0, 1, bytes(5)))),
    Flood("GOAWAY", _CALM, 1_500 + _SLACK, GREETING, same(frame(GOAWAY, 0, 0, bytes(8)))),
    Flood("unknown frames", _CALM, 1_500 + _SLACK, GREETING, same(frame(0xEE, 0, 0, b"x"))),
    Flood("acknowledgements of SETTINGS", (ENHANCE_YOUR_CALM, wire.PROTOCOL_ERROR), 1_500 + _SLACK, GREETING, same(frame(SETTINGS, 1))),
    Flood("acknowledgements of PING", (ENHANCE_YOUR_CALM, wire.PROTOCOL_ERROR), 1_500 + _SLACK, GREETING, same(frame(wire.PING, 1, 0, bytes(8)))),
    Flood("WINDOW_UPDATE of the connection", _CALM, 1_500 + _SLACK, GREETING, same(update(0, 1))),
    Flood("WINDOW_UPDATE of a stream", _CALM, 1_500 + _SLACK, GREETING + _OPEN, same(update(1, 1))),
    Flood("WINDOW_UPDATE of closed streams", _CALM, 1_500 + _SLACK, GREETING + call(1) + rst(1), same(update(1, 1))),
    Flood("RST_STREAM of closed streams", _CALM, 3_000 + _SLACK, GREETING + call(1) + rst(1), same(rst(1))),
    Flood("streams above the limit", _CALM, 6_000 + _SLACK, GREETING, streams(lambda n: call(n, "Wait"), 2, 1)),
    Flood("header bomb", _CALM, 2, PREFACE + settings() + _bomb(), nothing),
    Flood("a slow preface", (wire.PROTOCOL_ERROR, None), 0, PREFACE[:10], nothing),
    Flood("no acknowledgement", (SETTINGS_TIMEOUT,), 0, PREFACE + settings(), nothing),
    Flood("a slow frame", _CALM, 0, GREETING + call(1)[:30], nothing),
    Flood("a slow header block", _CALM, 20 + _SLACK, GREETING + frame(HEADERS, 0, 1, b"\x82"), same(frame(CONTINUATION, 0, 1, b"\x82"), 50), pause_s=0.5),
    Flood("calls, answers not read", (ENHANCE_YOUR_CALM, None), 20_000, GREETING + update(0, 2**30), streams(lambda n: call(n, "UnaryCall", _LARGE), 2, 1), reads=False),
]  # fmt: skip


def tiny_window(count: int = 100) -> bytes:
    """Calls that would answer for ever to somebody who takes one byte of each."""
    calls = (call(number, "Fill", _FILL) for number in range(1, 2 * count, 2))
    return PREFACE + settings((4, 1)) + frame(SETTINGS, 1) + b"".join(calls)


def wide_window(count: int = 100) -> bytes:
    """The same to somebody whose windows are open, and who reads nothing."""
    calls = (call(number, "Fill", _FILL) for number in range(1, 2 * count, 2))
    return PREFACE + settings((4, 2**31 - 1)) + frame(SETTINGS, 1) + update(0, 2**30) + b"".join(calls)


async def attack(flood: Flood, address: str, wait_s: float, pause_s: float = 0.0) -> tuple[int | None, int]:
    """(code that the connection ended with, frames that were sent). Raises TimeoutError.

    Whoever sends faster than the server reads may get a reset of TCP before it has seen the code: None.
    """
    pause_s = max(pause_s, flood.pause_s)
    async with wire.connected(address) as hostile, asyncio.timeout(wait_s):
        if not flood.reads:
            hostile.transport.pause_reading()
        reading = asyncio.ensure_future(hostile.end())
        sent, batches = 0, flood.batches()
        hostile.send(flood.begin)
        with contextlib.suppress(ConnectionResetError):
            while not reading.done():
                data, count = next(batches)
                hostile.send(data)
                sent += count
                await hostile.drain()
                await asyncio.sleep(pause_s or (0 if data else 0.05))
        return await reading, sent
