"""HTTP/2 frames of honest clients, and of clients that are honest but for a few of them."""

import itertools
import random
from typing import NamedTuple

from tests.conformance.wire import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GREETING,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    encode,
    prefixed,
    u32,
)
from tests.fuzz.mutator import Mutator

CHUNK_FRAMES = 24
DAMAGE_RATE = 0.004
_OTHERS = 4
"""How often each frame that opens no stream is among the templates, for each that does."""
METHODS = ("Echo", "Push", "Direct", "Both", "Wait", "Refuse", "None")


class Template(NamedTuple):
    """A frame without its stream: `place` is 0 for the connection, 1 for a new stream, 2 for one that was opened."""

    head: bytes
    payload: bytes
    place: int


def template(place: int, kind: int, flags: int, payload: bytes) -> Template:
    return Template(len(payload).to_bytes(3) + bytes((kind, flags)), payload, place)


def templates() -> list[Template]:
    """What honest clients send, in about the proportions of a chatty one."""
    found = []
    for method in METHODS:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/t/{method}"), ("te", "trailers")]
        block = encode([*fields, ("content-type", "application/grpc"), ("x-request-id", method)])
        found += [
            template(1, HEADERS, END_HEADERS, block),
            template(1, HEADERS, END_HEADERS | WITH_PRIORITY, b"\0\0\0\0\x10" + block),
            template(1, HEADERS, END_HEADERS | PADDED, b"\x03" + block + bytes(3)),
        ]
    block = encode([(":method", "POST"), (":scheme", "http"), (":path", "/t/Echo"), ("grpc-timeout", "1n")])
    found.append(template(1, HEADERS, END_HEADERS | END_STREAM, block))
    whole, long = prefixed(b"hello"), prefixed(bytes(300))
    more = [template(2, DATA, END_STREAM, whole)] * 8
    more += [
        template(2, DATA, flags, data) for flags in (0, END_STREAM) for data in (whole, long, whole[:3], whole[3:])
    ]
    more += [template(2, DATA, PADDED | END_STREAM, b"\x02" + whole + bytes(2)), template(2, DATA, 0, b"")]
    more += [template(2, RST_STREAM, 0, u32(8))] * 2
    more += [template(2, WINDOW_UPDATE, 0, u32(100)), template(0, WINDOW_UPDATE, 0, u32(100))] * 2
    sizes = (b"\0\x04\0\0\0\x40", b"\0\x04\0\1\0\0", b"\0\x05\0\0\x40\0\0\3\0\0\0\7", b"")
    more += [template(0, SETTINGS, 0, pairs) for pairs in sizes]
    more += [template(0, PING, 0, bytes(8)), template(0, PING, ACK, bytes(8)), template(0, SETTINGS, ACK, b"")]
    more += [template(2, PRIORITY, 0, bytes(5)), template(0, GOAWAY, 0, bytes(8)), template(0, 0xEE, 0, b"?")]
    # Ends the connection where the stream has ended already.
    found.append(template(2, HEADERS, END_HEADERS | END_STREAM, encode([("x-checksum", "1")])))
    return found + more * _OTHERS


class Source:
    """Frames of one block."""

    def __init__(self, seed: str, known: list[Template]) -> None:
        self._mutator = Mutator(seed, [each.payload for each in known])
        self.random: random.Random = self._mutator.source
        self._known = known
        self._next = 1

    def opening(self) -> tuple[bytes, int]:
        """The first frames of a connection: some streams, so that there is something to damage."""
        self._next = 1
        opened = (each for each in self._known if each.place == 1)
        parts = []
        for head, payload, _ in itertools.islice(opened, 6):
            parts += (head, self._next.to_bytes(4), payload)
            self._next += 2
        return GREETING + b"".join(parts), 8

    def chunk(self) -> tuple[bytes, int]:
        """Some frames as bytes, and how many."""
        parts: list[bytes] = []
        uniform, number = self.random.random, self._next
        for head, payload, place in self.random.choices(self._known, k=CHUNK_FRAMES):
            if place == 1:
                stream, number = number, number + 2
            else:
                stream = place and max(1, number - 2 - 2 * int(uniform() * 6))
            if uniform() < DAMAGE_RATE:
                parts.append(self._damaged(head, stream, payload))
            else:
                parts += (head, stream.to_bytes(4), payload)
        self._next = number
        return b"".join(parts), CHUNK_FRAMES

    def _damaged(self, head: bytes, stream: int, payload: bytes) -> bytes:
        """Another payload under a right length, other flags or another kind; a stray CONTINUATION; or anything at all."""
        choice = self.random.randrange(8)
        if choice < 4:
            payload = self._mutator.raw(payload or b"\0")
        elif choice == 4:
            head = head[:4] + bytes((self.random.randrange(256),))
        elif choice == 5:
            head = head[:3] + bytes((self.random.randrange(12),)) + head[4:]
        elif choice == 6:
            at = self.random.randrange(len(payload) + 1)
            first = at.to_bytes(3) + bytes((HEADERS, 0)) + stream.to_bytes(4) + payload[:at]
            rest = payload[at:]
            return first + len(rest).to_bytes(3) + bytes((CONTINUATION, 4)) + stream.to_bytes(4) + rest
        else:
            return self._mutator.raw(head + stream.to_bytes(4) + payload)
        return len(payload).to_bytes(3) + head[3:5] + stream.to_bytes(4) + payload

    def cuts(self, data: bytes) -> list[bytes]:
        """Mostly one piece."""
        if self.random.random() < 0.7:
            return [data]
        at = sorted(self.random.randrange(len(data) + 1) for _ in range(3))
        return [data[: at[0]], data[at[0] : at[1]], data[at[1] : at[2]], data[at[2] :]]
