"""The client's side of HTTP/2 by hand: frames as a test wants them, and what a connection answers."""

import itertools
from typing import Any, NamedTuple

from hpack import Decoder, Encoder

from gateway.h2.protocol import frames
from gateway.h2.protocol.connection import Connection
from gateway.h2.protocol.events import ConnectionFailed, DataReceived, Event, RequestEnded, RequestStarted, StreamReset
from gateway.h2.protocol.heads import HeadMemo
from gateway.h2.protocol.limits import Limits

PATH = "/gateway.v1.GatewayService/Generate"
FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PATH),
    (":authority", "test"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


class Frame(NamedTuple):
    """A frame that was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        return self.kind in (frames.DATA, frames.HEADERS) and bool(self.flags & frames.END_STREAM)

    @property
    def number(self) -> int:
        """The last four bytes: an error code, an increment."""
        return int.from_bytes(self.payload[-4:])


def split(data: bytes) -> list[Frame]:
    """Whole frames only."""
    found = []
    while data:
        length = int.from_bytes(data[:3])
        assert len(data) >= 9 + length
        found.append(Frame(data[3], data[4], int.from_bytes(data[5:9]), data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def message(payload: bytes, *, is_compressed: bool = False) -> bytes:
    """With gRPC's prefix."""
    return bytes((is_compressed,)) + len(payload).to_bytes(4) + payload


def in_steps(events: list[Event]) -> list[Event]:
    """The same with an event of its own for each thing that the client has said."""
    steps: list[Event] = []
    for event in events:
        if isinstance(event, RequestStarted):
            steps.append(RequestStarted(event.stream, event.head, event.timeout))
            if event.data:
                steps.append(DataReceived(event.stream, event.data))
            if event.is_ended:
                steps.append(RequestEnded(event.stream))
        elif isinstance(event, DataReceived) and event.is_last:
            steps += (DataReceived(event.stream, event.data), RequestEnded(event.stream))
        else:
            steps.append(event)
    return steps


class Peer:
    """A client joined to a `Connection`. What comes back is kept in `frames` and `events` until it is taken."""

    def __init__(self, *, greet: bool = True, now: float = 100.0, **limits: Any) -> None:
        self.now = now
        self.memo = HeadMemo()
        self.connection = Connection(Limits(**limits), now, self.memo)
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.numbers = itertools.count(1, 2)
        self.frames: list[Frame] = []
        self.events: list[Event] = []
        if greet:
            self.send(frames.PREFACE, frames.settings(()), frames.SETTINGS_ACK)
            self.encoder.header_table_size = 0
            assert not self.events
            self.frames.clear()

    def send(self, *data: bytes) -> "Peer":
        """Let the connection read, in one go."""
        self.events += in_steps(self.connection.receive(b"".join(data), self.now))
        self.take()
        return self

    def take(self) -> list[Frame]:
        """What the connection has to say by now is added to `frames`, which are returned."""
        self.frames += split(self.connection.out.take())
        return self.frames

    def check(self, *, later_s: float) -> list[Frame]:
        """Let time pass."""
        self.now += later_s
        self.events += self.connection.check(self.now)
        return self.take()

    def block(self, *fields: tuple[str, str]) -> bytes:
        encoded: bytes = self.encoder.encode(fields or FIELDS)
        return encoded

    def request(self, *fields: tuple[str, str], is_end: bool = False, number: int | None = None) -> int:
        """Open a stream. Its number is returned."""
        number = next(self.numbers) if number is None else number
        self.send(frames.headers(number, self.block(*fields), is_end=is_end))
        return number

    def stream(self, number: int) -> Any:
        return self.connection.streams[number]

    def of(self, kind: int) -> list[Frame]:
        return [each for each in self.frames if each.kind == kind]

    def fields(self, frame: Frame) -> dict[str, str]:
        """Of a HEADERS frame; each must be decoded, in order."""
        return dict(self.decoder.decode(frame.payload))

    @property
    def failure(self) -> ConnectionFailed | None:
        found = [event for event in self.events if isinstance(event, ConnectionFailed)]
        assert len(found) <= 1
        if found:
            (goaway,) = [each for each in self.of(frames.GOAWAY) if each.payload[8:] == found[0].message.encode()]
            assert int.from_bytes(goaway.payload[4:8]) == found[0].code
            assert isinstance(self.events[-1], ConnectionFailed)
        return found[0] if found else None

    @property
    def resets(self) -> list[tuple[int, int]]:
        """(stream, code) of every RST_STREAM that came back."""
        return [(each.stream, each.number) for each in self.of(frames.RST_STREAM)]

    def started(self) -> list[int]:
        return [event.stream.number for event in self.events if isinstance(event, RequestStarted)]

    def ended(self) -> list[int]:
        return [event.stream.number for event in self.events if isinstance(event, RequestEnded)]

    def reset_events(self) -> list[tuple[int, int]]:
        return [(event.stream.number, int(event.code)) for event in self.events if isinstance(event, StreamReset)]

    def body(self, number: int) -> bytes:
        return b"".join(
            event.data for event in self.events if isinstance(event, DataReceived) and event.stream.number == number
        )
