"""The HTTP/2 listener's connection: whatever a client sends, in whatever pieces."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from gateway.h2.protocol.connection import Connection
from gateway.h2.protocol.events import DataReceived
from gateway.h2.protocol.heads import HeadMemo
from gateway.h2.protocol.limits import Limits
from tests.fuzz.mutator import MAX_FRAME_BYTES, Frame, Mutator
from tests.fuzz.target import Check, Target
from tests.h2.by_hand import in_steps
from tests.support import raw_h2 as h2

_PRIORITY, _CONTINUATION, _PADDED, _WITH_PRIORITY = 2, 9, 8, 32
_LIMITS = Limits(max_streams=8, max_request_bytes=4096, max_header_list_bytes=2048)
_MESSAGE = b"\0\0\0\0\x05hello"


@cache
def conversation_corpus() -> Sequence[Frame]:
    """What clients say after the preface, a frame each: calls of every shape, settings, pings, resets, windows."""
    block = h2.headers("/gateway.v1.GatewayService/Generate", **{"grpc-timeout": "10S", "x-request-id": "r"})
    # Indexed fields, names from the static table, a Huffman string, a change of the table's size.
    compressed = b"\x83\x86\x04\x09/a.B/Call\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff\x3f\xe1\x0f"
    call = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, block)
    body = h2.frame(h2.DATA, h2.END_STREAM, 1, _MESSAGE)
    return [
        [h2.GREETING, h2.SETTINGS_ACK, call, body],
        [h2.GREETING, call, h2.frame(h2.DATA, 0, 1, _MESSAGE[:3]), h2.frame(h2.DATA, _PADDED | 1, 1, b"\x02" + _MESSAGE[3:] + b"\0\0")],
        [h2.GREETING, h2.frame(h2.HEADERS, 0, 1, block[:20]), h2.frame(_CONTINUATION, h2.END_HEADERS, 1, block[20:]), body],
        [h2.GREETING, h2.frame(h2.HEADERS, h2.END_HEADERS | _WITH_PRIORITY, 1, b"\0\0\0\0\x10" + block), h2.frame(h2.RST_STREAM, 0, 1, b"\0\0\0\x08")],
        [h2.GREETING, h2.frame(h2.HEADERS, h2.END_HEADERS, 1, compressed), h2.frame(h2.HEADERS, h2.END_HEADERS | 1, 3, compressed)],
        [h2.GREETING, h2.frame(h2.SETTINGS, 0, 0, b"\0\x04\0\0\0\x40\0\x01\0\0\0\0\0\x05\0\0\x40\0"), h2.frame(h2.PING, 0, 0, b"12345678")],
        [h2.GREETING, h2.frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\x10\0"), call, h2.frame(h2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff")],
        [h2.GREETING, h2.frame(_PRIORITY, 0, 3, b"\0\0\0\0\x10"), h2.frame(h2.GOAWAY, 0, 0, b"\0" * 8), call],
        [h2.GREETING, *(h2.frame(h2.HEADERS, h2.END_HEADERS, number, block) for number in range(1, 25, 2))],
    ]  # fmt: skip


def _damage_conversation(mutator: Mutator, frame: Frame) -> Frame:
    """Frames come, go and change, bytes of them too; mostly the preface stays, as behind a bad one there is nothing."""
    source = mutator.source
    frames = list(frame)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(frames)) if source.random() < 0.1 else source.randrange(1, max(2, len(frames)))
        at = min(at, len(frames) - 1)
        match source.randrange(6):
            case 0:
                frames.insert(at, frames[at])
            case 1 if len(frames) > 1:
                del frames[at]
            case 2:
                frames.insert(at + 1, source.choice(source.choice(conversation_corpus())))
            case 3 if len(frames[at]) >= 9:
                # Another kind, flags or stream, the rest as it was.
                head = bytearray(frames[at])
                head[source.choice((3, 4, 8))] = source.choice((0, 1, 2, 4, 8, 9, 13, 32, 255))
                frames[at] = bytes(head)
            case _:
                frames[at] = mutator.raw(frames[at])[:MAX_FRAME_BYTES]
    return frames


def _said(connection: Connection, pieces: Sequence[bytes]) -> "tuple[list[Any], dict[int, bytes], Connection]":
    """Events by stream, a failure last; and bodies, which are put together by stream.

    What arrives together is one event, so the order of events of different streams depends on the pieces.
    """
    events: list[Any] = []
    bodies: dict[int, bytes] = {}
    for piece in pieces:
        for event in in_steps(connection.receive(piece, 1.0)):
            if isinstance(event, DataReceived):
                bodies[event.stream.number] = bodies.get(event.stream.number, b"") + event.data
            else:
                stream = getattr(event, "stream", None)
                events.append((type(event).__name__, stream and stream.number, getattr(event, "code", None)))
        assert len(connection.streams) <= _LIMITS.max_streams
    events.sort(key=lambda event: event[1] or math.inf)
    return events, bodies, connection


def _check_conversation() -> Check:
    memo = HeadMemo()

    def run(frame: Frame) -> None:
        data = b"".join(frame)
        events, bodies, whole = _said(Connection(_LIMITS, 0.0, memo), [data])
        failures = [event for event in events if event[0] == "ConnectionFailed"]
        assert len(failures) == whole.is_failed
        assert not failures or events[-1] is failures[0]
        step = 1 + len(data) % 37
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        again, same_bodies, _ = _said(Connection(_LIMITS, 0.0, memo), pieces)
        assert (again, same_bodies) == (events, bodies), "pieces make a difference"
        whole.check(2.0)
        whole.check(500.0)
        assert whole.receive(b"", 501.0) is not None

    return run


TARGETS = (Target("http2", 3, conversation_corpus, _check_conversation, _damage_conversation),)
